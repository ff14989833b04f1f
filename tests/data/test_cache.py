"""Caches: the same batches, within the budget, every row read once, bad rows as without a cache."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch

from hasten import ConfigurationError, RunError
from hasten.core.errors import ProgressWarning
from hasten.data import Pipeline, arrays, progress
from helpers.caches import KINDS, NUMBERS, counting, files
from helpers.pipelines import BATCH, ROWS, Bad, Runs, doubled, equal, scaled, shifted


@pytest.fixture(autouse=True)
def own_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [{"batches": 0}, {"threads": 2}, {"processes": 2}], ids=str)
def test_cache_changes_no_bit(kind, way):
    def built(*caches):
        pipeline = arrays(NUMBERS, torch.arange(ROWS)).shuffle(seed=1).map(doubled)
        for cache in caches:
            pipeline = pipeline.cache(cache)
        return pipeline.map(scaled).batch(BATCH).map(shifted).prefetch(**way)

    plain, cached = built(), built(kind)
    for _ in range(2):
        assert equal(list(cached), list(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_cache_windowed_shuffle_keeps_its_order(kind):
    plain = Pipeline(Runs([0, 10, 35, 50]))
    orders = [
        list(p.shuffle(window=2).batch(7)) for p in (plain, plain.cache(kind), plain.map(lambda row: row).cache(kind))
    ]
    assert equal(orders[0], orders[1]) and equal(orders[0], orders[2])


@pytest.mark.parametrize("kind", KINDS)
def test_cache_reads_each_row_once(kind):
    pipeline = counting(arrays(NUMBERS))
    cached = pipeline.cache(kind).shuffle().batch(BATCH)
    for _ in range(3):
        list(cached)
    assert ROWS <= pipeline.source.rows_read <= ROWS + 4, "all rows, and a few to know their size"
    again = counting(arrays(NUMBERS.clone()))
    list(again.cache(kind).batch(BATCH))
    assert again.source.rows_read == (0 if kind == "disk" else pipeline.source.rows_read)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_nested_rows_of_all_dtypes(kind):
    columns = {
        "a": (NUMBERS.double(), torch.arange(ROWS) % 2 == 0),
        "b": NUMBERS.bfloat16(),
        "c": numpy.arange(ROWS, dtype=numpy.uint16),
    }
    for direct, cached in zip(arrays(columns).batch(BATCH), arrays(columns).cache(kind).batch(BATCH), strict=True):
        assert torch.equal(direct["a"][0], cached["a"][0]) and torch.equal(direct["a"][1], cached["a"][1])
        assert (
            torch.equal(direct["b"], cached["b"])
            and torch.equal(direct["c"].int(), cached["c"].int())
            and cached["c"].dtype == torch.uint16
        )


@pytest.mark.parametrize("kind", KINDS)
def test_cache_beyond_the_budget_raises(kind, tmp_path):
    needed = NUMBERS.nbytes + ROWS * 8
    pipeline = counting(arrays(NUMBERS, torch.arange(ROWS)))
    with pytest.raises(
        ConfigurationError,
        match=rf"{ROWS} rows needs {needed / 1e9:.3g} GB, and {(needed - 1) / 1e9:.3g} GB were allowed",
    ):
        list(pipeline.cache(kind, gigabytes=(needed - 1) / 1e9).batch(BATCH))
    assert pipeline.source.rows_read <= 4, "refused before it is filled"
    assert not (tmp_path / "cache").exists() or not any(name.endswith(".rows") for name in files(tmp_path))
    list(pipeline.cache(kind, gigabytes=needed / 1e9).batch(BATCH))


MEASURE = """
import re, torch
from hasten.data import Source, Pipeline

class Zeros(Source):
    def __len__(self): return 50_000
    def read(self, rows): return torch.zeros(len(rows), 1000)
    def fingerprint(self): return {}

def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
pipeline = Pipeline(Zeros()).cache("memory", gigabytes=0.2).batch(100)
next(iter(Pipeline(Zeros()).batch(100)))
before = peak()
for batch in pipeline: pass
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not report the peak memory of a process"
)
def test_cache_takes_no_more_memory_than_allowed():
    """0.2 GB of rows, read in chunks of 16 MB."""
    at_once = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # freed memory is returned to the system if the C library is glibc
    asked = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, check=True, text=True, env=os.environ | at_once
    )
    assert 0.15e9 < int(asked.stdout) < 0.2e9 + 0.08e9


@pytest.mark.parametrize("kind", KINDS)
def test_cache_keeps_bad_rows_bad(kind):
    with pytest.raises(RunError, match="row 3 "):
        list(Pipeline(Bad([3, 50])).cache(kind).batch(BATCH))
    for _ in range(2):  # the second time from the disk
        pipeline = Pipeline(Bad([3, 50])).cache(kind).skip_bad_rows(2).shuffle(seed=1).batch(BATCH)
        plain = Pipeline(Bad([3, 50])).skip_bad_rows(2).shuffle(seed=1).batch(BATCH)
        assert equal(list(pipeline), list(plain)) and sorted(pipeline.faults.found) == [3, 50]
        assert pipeline.faults.found[3].why == "no number"
    with pytest.raises(RunError, match="row "):
        list(Pipeline(Bad([3, 50])).cache(kind).skip_bad_rows(1).batch(BATCH))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p, kind: p.map(lambda x, rng: x).cache(kind), "map with random numbers before cache"),
        (lambda p, kind: p.map(lambda x: x + torch.rand(())).cache(kind), "map with random numbers before cache"),
        (lambda p, kind: p.map(lambda x: x[: int(x[0]) % 2 + 1]).cache(kind), "cannot be stacked.*one shape"),
        (
            lambda p, kind: p.map(lambda x: x[: 1 + (x[0] > 200)]).cache(kind),
            r"float32 \(1,\) in the first rows|cannot be stacked",
        ),
        (lambda p, kind: p.map(lambda x: "text").cache(kind), "holds strs"),
        (lambda p, kind: p.cache(kind, gigabytes=0), "gigabytes"),
        (lambda p, kind: p.cache("tape"), "'memory' or 'disk'"),
        (lambda p, kind: p.cache("memory", directory="x"), "directory"),
    ],
)
def test_cache_of_uncacheable_source_raises(kind, build, message):
    with pytest.raises(ConfigurationError, match=message):
        list(build(arrays(NUMBERS), kind).batch(BATCH))


def test_cache_reports_progress(monkeypatch):
    class Slow(Runs):
        def read(self, rows):
            time.sleep(0.01)
            return torch.zeros(len(rows), 4_000_000)

    monkeypatch.setattr(progress, "PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(progress, "FIRST_PROGRESS_S", 0.0)
    with pytest.warns(ProgressWarning) as warned:
        list(Pipeline(Slow([0, 5])).cache().batch(5))
    for done, warning in zip((20, 40, 60, 80), warned, strict=True):
        expected = rf"filling the cache in memory, [\d,]+ rows/s: {done}% done, 0 s left"
        assert re.fullmatch(expected, str(warning.message))


class ImageAndLabel(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


def paired(sample):
    return ImageAndLabel(*sample)


def test_cache_named_tuples_keep_their_names():
    data = arrays(NUMBERS, torch.arange(ROWS)).map(paired)
    for pipeline in (data, data.cache(), data.map(lambda pair: pair), data.cache().map(lambda pair: pair)):
        batch = next(iter(pipeline.batch(BATCH)))
        assert type(batch) is ImageAndLabel and torch.equal(batch.image, NUMBERS[:BATCH])
    assert torch.equal(next(iter(data.cache().map(lambda pair: pair.label).batch(BATCH))), torch.arange(BATCH))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (paired, r"cannot store named tuples such as ImageAndLabel; .*cache\('memory'\)"),
        (lambda sample: {"deep": paired(sample)}, "cannot store named tuples such as ImageAndLabel"),
        (lambda sample: {(0, 1): sample[0]}, r"cannot store samples with the key \(0, 1\); use strings"),
    ],
)
def test_cache_on_disk_refuses_what_a_file_cannot_restore(tmp_path, function, message):
    pipeline = counting(arrays(NUMBERS, torch.arange(ROWS)))
    with pytest.raises(ConfigurationError, match=message):
        list(pipeline.map(function).cache("disk").batch(BATCH))
    assert pipeline.source.rows_read <= 4 and not files(tmp_path), "refused before all rows are read"


@pytest.mark.parametrize("kind", KINDS)
def test_cache_keeps_keys_that_are_no_strings(kind):
    for _ in range(2):  # the second time from the disk
        pipeline = arrays({0: NUMBERS, "0": (NUMBERS + 1,), None: {True: NUMBERS + 2}}).cache(kind).batch(ROWS)
        (batch,) = pipeline
        assert list(batch) == [0, "0", None] and list(batch[None]) == [True]
        assert all(map(torch.equal, (batch[0], batch["0"][0], batch[None][True]), (NUMBERS, NUMBERS + 1, NUMBERS + 2)))


@pytest.mark.parametrize("directory", [None, "~/cache"])
def test_cache_directory_may_be_in_the_home_directory(tmp_path, monkeypatch, directory):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HASTEN_CACHE", "~/other" if directory else "~/cache")
    monkeypatch.chdir(tmp_path)
    list(arrays(NUMBERS).cache("disk", directory=directory).batch(ROWS))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
