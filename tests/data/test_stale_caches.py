"""Caches are never stale: a change of rows, files, functions, sources or of this package makes another cache."""

import importlib
import os
import shutil
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch

from hasten import RunError
from hasten.data import Pipeline, arrays, tokens
from hasten.data.array_source import Arrays
from hasten.data.cache.cache import source_identity
from helpers.caches import KINDS, NUMBERS, counting, files
from helpers.pipelines import BATCH, ROWS, Bad, equal


@pytest.fixture(autouse=True)
def own_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", KINDS)
def test_changed_file_is_detected_between_epochs(kind, tmp_path):
    file = tmp_path / "x.npy"
    numpy.save(file, NUMBERS.numpy())
    pipeline = arrays(file).cache(kind).batch(ROWS)
    assert torch.equal(*pipeline, NUMBERS)
    with open(file, "r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(numpy.float32(-1).tobytes())
    os.utime(file, (1, 1))
    (changed,) = pipeline
    assert changed[-1, -1] == -1


class Doubled(Arrays):
    """Returns the same fingerprint as Arrays."""

    def read(self, rows):
        return super().read(rows) * 2


def test_sources_with_different_rows_share_no_cache(tmp_path):
    x, y = torch.arange(8), torch.arange(8)
    for name in ("x", "y"):
        numpy.save(tmp_path / f"{name}.npy", x.numpy())
    pictures = torch.zeros(8, 3, 4, 4, dtype=torch.uint8)
    built = [
        arrays(x),
        Pipeline(Doubled(x)),
        arrays(x, y),
        arrays({"x": x, "y": y}),
        arrays({"y": x, "x": y}),
        arrays({"x": (x, y)}),
        arrays(tmp_path / "x.npy"),
        arrays({"x": tmp_path / "x.npy"}),
        arrays({"y": tmp_path / "x.npy"}),
        arrays(tmp_path / "y.npy"),
        tokens(tmp_path / "x.npy", 2),
        tokens(tmp_path / "x.npy", 3),
        tokens(tmp_path / "x.npy", 2, stride=1),
        arrays(pictures),
        arrays(pictures, x),
        arrays(x).map(lambda x: x + 1).cache(),
        Pipeline(Doubled(x)).map(lambda x: x + 1).cache(),
    ]
    fingerprints = [str(source_identity(pipeline.source)) for pipeline in built]
    assert len(set(fingerprints)) == len(fingerprints)
    list(arrays(x).cache("disk").batch(8))
    assert torch.equal(*Pipeline(Doubled(x)).cache("disk").batch(8), x * 2)


class UnserializableFingerprint(Bad):
    """Its fingerprint contains values that JSON cannot represent."""

    def fingerprint(self):
        kinds = {
            "n": numpy.int64(3),
            3: numpy.float32(0.5),
            "missing": float("nan"),
            "shape": torch.ones(2),
            "path": Path("x"),
            None: {1},
            (1, 2): {("nested",): 1},
        }
        return super().fingerprint() | kinds


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_may_contain_any_numbers(kind):
    pipeline = counting(Pipeline(UnserializableFingerprint([])))
    cached = pipeline.cache(kind).batch(BATCH)
    assert equal(list(cached), list(cached)) and pipeline.source.rows_read <= ROWS + 4
    again = counting(Pipeline(UnserializableFingerprint([])))
    list(again.cache(kind).batch(BATCH))
    assert (again.source.rows_read == 0) == (kind == "disk")


def test_identity_ignores_the_order_of_keys_in_a_fingerprint(monkeypatch):
    source = UnserializableFingerprint([])
    identity, content = source_identity(source), source.fingerprint()
    monkeypatch.setattr(source, "fingerprint", lambda: dict(reversed(content.items())))
    assert source_identity(source) == identity


def test_changed_function_or_file_makes_another_cache(tmp_path):
    def cached(data, by):
        return torch.cat(list(arrays(data).map(lambda x: x * by).cache("disk").batch(BATCH)))

    assert torch.equal(cached(NUMBERS, 2), NUMBERS * 2)
    assert torch.equal(cached(NUMBERS, 3), NUMBERS * 3)
    assert torch.equal(cached(NUMBERS + 1, 3), (NUMBERS + 1) * 3)
    assert torch.equal(cached(NUMBERS, 2), NUMBERS * 2)
    assert len([name for name in files(tmp_path) if name.endswith("cache.json")]) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_data_changed_while_caching_raise_and_leave_nothing(kind, tmp_path):
    file, new = tmp_path / "x.npy", tmp_path / "new.npy"
    numpy.save(file, NUMBERS.numpy())
    numpy.save(new, NUMBERS.numpy() + 1)

    def replace_file(sample):
        if new.exists():
            os.replace(new, file)
        return sample

    pipeline = arrays(file).map(replace_file).cache(kind).batch(ROWS)
    with pytest.raises(RunError, match="changed while the cache was filled"):
        list(pipeline)
    assert not (tmp_path / "cache").exists() or not files(tmp_path)
    for each in (pipeline, arrays(file).cache(kind).batch(ROWS)):
        assert torch.equal(*each, NUMBERS + 1)


def test_change_in_memory_is_detected_between_epochs():
    data = NUMBERS.clone()
    pipeline = arrays(data).cache().batch(ROWS)
    assert torch.equal(*pipeline, NUMBERS)
    data += 1
    assert torch.equal(*pipeline, NUMBERS + 1)


def test_repaired_rows_are_read_again():
    source = Bad([3, 50])
    pipeline = Pipeline(source).cache().skip_bad_rows(2).batch(ROWS)
    assert len(*pipeline) == ROWS - 2
    source.bad = {7}
    assert sorted(set(range(ROWS)) - set(*map(torch.Tensor.tolist, pipeline))) == [7] == list(pipeline.faults.found)


def test_cache_of_another_package_version_is_ignored(monkeypatch):
    for version, read in (("1.0", True), ("1.0", False), ("1.1", True)):
        monkeypatch.setattr("hasten.data.cache.cache_disk.__version__", version)
        pipeline = counting(arrays(NUMBERS))
        list(pipeline.cache("disk").batch(BATCH))
        assert (pipeline.source.rows_read > 0) == read


def test_changed_text_of_a_user_s_source_makes_another_cache(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = """
        import torch
        from hasten.data import Source

        class Own(Source):
            def __len__(self):
                return 8

            def read(self, rows):
                return torch.from_numpy(rows) * FACTOR

            def fingerprint(self):
                return {}
        """
    sums = []
    for number, factor in enumerate((2, 2, 30)):
        (tmp_path / "own_source.py").write_text(textwrap.dedent(text).replace("FACTOR", str(factor)))
        sys.modules.pop("own_source", None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        pipeline = counting(Pipeline(importlib.import_module("own_source").Own()))
        sums += [int(batch.sum()) for batch in pipeline.cache("disk").batch(8)]
        assert (pipeline.source.rows_read > 0) == (number != 1)
    assert sums == [56, 56, 840]


def test_cache_on_disk_has_the_key_of_the_function_that_filled_it():
    by = {"factor": 2}

    def built():
        return arrays(NUMBERS).map(lambda x: x * by["factor"]).cache("disk").batch(ROWS)

    early = built()
    by["factor"] = 3
    assert torch.equal(*early, NUMBERS * 3)
    by["factor"] = 2
    assert torch.equal(*built(), NUMBERS * 2)
