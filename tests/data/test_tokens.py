"""Token files: every window in its place, read from files that other programs wrote."""

import errno
import os

import numpy
import pytest
import torch

from hasten import ConfigurationError
from hasten.data import tokens

TEXT = numpy.random.default_rng(0).integers(0, 60_000, 1000)


def written(path, text=TEXT, dtype=numpy.uint16):
    text.astype(dtype).tofile(path)
    return path


def samples(pipeline):
    """Returns all (input, target) of an epoch."""
    parts = list(pipeline.batch(7))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


@pytest.mark.parametrize("stride", [None, 1, 5, 64])
def test_tokens_windows_and_their_successors(tmp_path, stride):
    x, y = samples(tokens(written(tmp_path / "a.bin"), 16, stride=stride))
    begins = range(0, len(TEXT) - 16, stride or 16)
    assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
    assert x.tolist() == [TEXT[i : i + 16].tolist() for i in begins]
    assert y.tolist() == [TEXT[i + 1 : i + 17].tolist() for i in begins]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64", "uint8"])
def test_tokens_of_every_integer_dtype_are_read(tmp_path, dtype):
    text = TEXT % 250
    numpy.save(tmp_path / "a.npy", text.astype(dtype))
    assert samples(tokens(tmp_path / "a.npy", 16))[0].flatten().tolist() == text[: 62 * 16].tolist()
    written(tmp_path / "a.bin", text, dtype)
    assert samples(tokens(tmp_path / "a.bin", 16, dtype=dtype))[0].flatten().tolist() == text[: 62 * 16].tolist()


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_tokens_header_is_skipped(tmp_path, magic, dtype):
    header = numpy.zeros(256, numpy.int32)
    header[:3] = magic, 1, len(TEXT)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + TEXT.astype(dtype).tobytes())
    assert samples(tokens(tmp_path / "a.bin", 100))[0][0].tolist() == TEXT[:100].tolist()


def test_tokens_windows_do_not_cross_files(tmp_path):
    for name, part in (("a", TEXT[:100]), ("b", TEXT[100:105]), ("c", TEXT[105:400])):
        written(tmp_path / f"{name}.bin", part)
    pipeline = tokens(tmp_path, 10)
    ordered, _ = samples(pipeline)
    expected = [TEXT[i : i + 10].tolist() for i in [*range(0, 90, 10), *range(105, 390, 10)]]
    assert ordered.tolist() == expected
    shuffled = torch.cat([x for x, _ in pipeline.shuffle(seed=1).batch(8)]).tolist()
    assert shuffled != expected and sorted(shuffled) == sorted(expected)
    mixed = torch.cat([x for x, _ in pipeline.shuffle(seed=1, window=1).batch(8)]).tolist()
    assert sorted(mixed) == sorted(expected)


def test_tokens_changed_file_is_another_source(tmp_path):
    before = tokens(written(tmp_path / "a.bin"), 16).source.fingerprint()
    assert tokens(tmp_path / "a.bin", 16).source.fingerprint() == before
    assert tokens(written(tmp_path / "a.bin", TEXT[1:]), 16).source.fingerprint() != before
    assert tokens(tmp_path / "a.bin", 17).source.fingerprint() != tokens(tmp_path / "a.bin", 16).source.fingerprint()


def test_tokens_replaced_file_is_read_from_the_next_epoch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = tokens(written(tmp_path / "a.bin").name, 16).batch(99)
    monkeypatch.chdir("/")
    before = pipeline.source.fingerprint()
    os.replace(written(tmp_path / "b", TEXT[1:]), tmp_path / "a.bin")
    assert pipeline.source.fingerprint() == before, "what is mapped is still the old one"
    ((x, _),) = pipeline
    assert x[0].tolist() == TEXT[1:17].tolist() and pipeline.source.fingerprint() != before
    os.replace(written(tmp_path / "b", TEXT[:3]), tmp_path / "a.bin")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="shorter than a window"):
            list(pipeline)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda directory: tokens(directory / "missing.bin", 8), "missing.bin"),
        (lambda directory: tokens(directory / "short.bin", 8), "shorter than a window of 9 tokens"),
        (lambda directory: tokens(directory / "empty.bin", 8), "shorter than a window"),
        (
            lambda directory: tokens(directory / "odd.bin", 2),
            "odd.bin has 7 bytes, which is no multiple of the 2 bytes of uint16",
        ),
        (lambda directory: tokens(directory / "short.bin", 0), "length"),
        (lambda directory: tokens(directory / "short.bin", 2, stride=-1), "stride"),
        (lambda directory: tokens(directory / "short.bin", 2, dtype="uint15"), "uint15"),
        (lambda directory: tokens(directory / "floats.npy", 2), "floats.npy holds float64 of 1 dimensions"),
        (lambda directory: tokens(directory / "square.npy", 2), "of 2 dimensions"),
        (lambda directory: tokens(directory / "empty.npy", 2), "empty.npy is not an array of numbers"),
        (lambda directory: tokens(directory / "zip.npy", 2), "zip.npy is a zip archive, not one array"),
    ],
)
def test_tokens_invalid_file_is_refused(tmp_path, wrong, message):
    written(tmp_path / "short.bin", TEXT[:8])
    (tmp_path / "empty.bin").touch()
    (tmp_path / "odd.bin").write_bytes(b"1234567")
    numpy.save(tmp_path / "floats.npy", numpy.zeros(9))
    numpy.save(tmp_path / "square.npy", numpy.zeros((9, 9), int))
    (tmp_path / "empty.npy").touch()
    with open(tmp_path / "zip.npy", "wb") as file:
        numpy.savez(file, x=numpy.arange(9))
    with pytest.raises(ConfigurationError, match=message):
        wrong(tmp_path)


def test_tokens_file_that_may_not_be_opened_is_refused(tmp_path, monkeypatch):
    """The error is planted, because the superuser may open every file."""

    def denied(file, *arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)

    written(tmp_path / "a.bin")
    with monkeypatch.context() as planted, pytest.raises(ConfigurationError, match=r"cannot read .*a\.bin: Permission"):
        planted.setattr("builtins.open", denied)
        tokens(tmp_path / "a.bin", 8)


def test_tokens_of_more_than_16_bits_are_not_read_as_such(tmp_path):
    file = written(tmp_path / "a.bin", 2 * TEXT, numpy.uint32)
    with pytest.raises(ConfigurationError, match=r"below 16, as where tokens take 32 or 64 bits; pass their dtype"):
        tokens(file, 16)
    assert samples(tokens(file, 16, dtype="uint32"))[0][0].tolist() == (2 * TEXT[:16]).tolist()
