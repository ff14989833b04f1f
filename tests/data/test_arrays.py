"""Arrays of all kinds, and arguments that are refused."""

import os

import numpy
import pytest
import torch

from hasten import ConfigurationError
from hasten.data import arrays


def test_arrays_nested_inputs_keep_their_nesting(tmp_path):
    x, y = numpy.arange(20.0).reshape(10, 2), torch.arange(10)
    numpy.save(tmp_path / "x.npy", x)
    for a, b in arrays(tmp_path / "x.npy", y).batch(4):
        assert torch.equal(a[:, 0], 2.0 * b)
    for batch in arrays({"x": x, "more": (y, y)}).batch(4):
        assert torch.equal(batch["x"][:, 0], 2.0 * batch["more"][1])
    assert [batch.tolist() for batch in arrays(y[:3]).batch(2)] == [[0, 1], [2]]


def test_arrays_paths_are_resolved_as_in_other_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    numpy.save(tmp_path / "x.npy", numpy.arange(3))
    for path in ("~/x.npy", f"file://{tmp_path}/x.npy"):
        assert [batch.tolist() for batch in arrays(path).batch(3)] == [[0, 1, 2]]


def test_arrays_dtypes_unsupported_by_torch_are_converted():
    backwards, readonly = numpy.arange(6)[::-1], numpy.arange(6)
    readonly.flags.writeable = False
    (batch,) = arrays(backwards, readonly, torch.arange(12)[::2]).batch(6)
    assert [column.tolist() for column in batch] == [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]]


def test_arrays_batches_are_copies():
    data = torch.zeros(10, 2000)
    for batch in arrays(data).batch(5):
        batch += 1
    assert data.sum() == 0


def test_fingerprint_differs_with_contents(tmp_path):
    x = torch.arange(10)
    assert (
        arrays(x).source.fingerprint() == arrays(x.clone()).source.fingerprint() != arrays(x + 1).source.fingerprint()
    )
    numpy.save(tmp_path / "x.npy", x.numpy())
    before = arrays(tmp_path / "x.npy").source.fingerprint()
    numpy.save(tmp_path / "x.npy", x.numpy()[:9])
    assert arrays(tmp_path / "x.npy").source.fingerprint() != before


def test_fingerprint_differs_with_names_and_nesting():
    x, y = torch.arange(10), torch.arange(10)
    forms = [
        (x, y),
        ((x, y),),
        ((x,), (y,)),
        ({"a": x, "b": y},),
        ({"b": x, "a": y},),
        ({"a": {"b": x}, "c": y},),
        ({0: x, 1: y},),
    ]
    identities = [str(arrays(*form).source.fingerprint()) for form in (*forms, (x, y.double()), (x.view(10, 1), y))]
    assert len(set(identities)) == len(identities) - 1, "(x, y) is what arrays(x, y) makes of itself; all others differ"


def test_fingerprint_of_memory_is_hashed_once_and_again_after_a_change(monkeypatch):
    hashed = []
    digest = "hasten.data.array_source._digest"
    monkeypatch.setattr(digest, lambda column: hashed.append(column.shape) or str(column.sum()))
    data = torch.arange(10)
    source = arrays(data, data[:10:2].repeat_interleave(2), data.view(10, 1)).source
    before = [source.fingerprint() for _ in range(3)]
    assert len(hashed) == 3 and before[0] == before[2]
    data += 1
    assert source.fingerprint() != before[0] and len(hashed) == 5, "those that share what was written to"


def test_arrays_replaced_file_is_read_from_the_next_epoch(tmp_path, monkeypatch):
    """The fingerprint is taken before the file is mapped, so a replaced file differs even with equal size and time."""
    monkeypatch.chdir(tmp_path)
    numpy.save("x.npy", numpy.zeros(8))
    pipeline = arrays("x.npy").batch(20)
    monkeypatch.chdir("/")
    before, about = pipeline.source.fingerprint(), os.stat(tmp_path / "x.npy")
    numpy.save(tmp_path / "new.npy", numpy.ones(8))
    os.utime(tmp_path / "new.npy", ns=(about.st_atime_ns, about.st_mtime_ns))
    os.replace(tmp_path / "new.npy", tmp_path / "x.npy")
    assert pipeline.source.fingerprint() == before
    assert torch.equal(*pipeline, torch.ones(8, dtype=torch.float64)) and pipeline.source.fingerprint() != before
    numpy.save(tmp_path / "new.npy", numpy.zeros(12))
    os.replace(tmp_path / "new.npy", tmp_path / "x.npy")
    assert torch.equal(*pipeline, torch.zeros(12, dtype=torch.float64)) and len(pipeline.source) == 12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda directory: arrays(), "at least one"),
        (lambda directory: arrays({}), "at least one"),
        (lambda directory: arrays(torch.zeros(3), torch.zeros(4)), "unequal lengths: 3, 4"),
        (lambda directory: arrays(torch.tensor(3)), "first dimension is the sample"),
        (lambda directory: arrays([1, 2, 3]), "not list"),
        (lambda directory: arrays(numpy.array(["a", "b"])), "torch cannot hold"),
        (lambda directory: arrays(numpy.array([None, 3])), "without executing code"),
        (lambda directory: arrays(torch.zeros(3, device="meta")), "cpu"),
        (lambda directory: arrays("s3://b/x.npy"), "local files into memory; copy s3://b/x.npy to this machine"),
        (lambda directory: arrays(directory / "missing.npy"), "cannot read .*missing.npy: No such file"),
        (lambda directory: arrays(directory / "pickled.npy"), "pickled.npy is not an array of numbers"),
        (lambda directory: arrays(directory / "text.npy"), "text.npy is not an array of numbers"),
        (lambda directory: arrays(directory / "empty.npy"), "empty.npy is not an array of numbers"),
        (lambda directory: arrays(directory / "broken.npy"), "broken.npy is not an array of numbers"),
        (lambda directory: arrays(directory / "zip.npy"), "zip.npy is a zip archive, not one array; unpack"),
    ],
)
def test_arrays_invalid_input_is_refused(tmp_path, wrong, message):
    numpy.save(tmp_path / "pickled.npy", numpy.array([{"a": 1}]), allow_pickle=True)
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "empty.npy").touch()
    with open(tmp_path / "zip.npy", "wb") as file:
        numpy.savez(file, x=numpy.arange(3))
    numpy.save(tmp_path / "broken.npy", numpy.arange(3))
    (tmp_path / "broken.npy").write_bytes((tmp_path / "broken.npy").read_bytes().replace(b"}", b"{"))
    with pytest.raises(ConfigurationError, match=message):
        wrong(tmp_path)
