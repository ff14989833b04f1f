"""Caches: the same batches, in the budget, never stale, never half, one for all processes."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy
import pytest
import torch
from pipelines import BATCH, ROWS, Bad, Runs, doubled, equal, scaled, shifted

from hasten import Failure, Refusal
from hasten.contract.errors import Notice
from hasten.data import Pipeline, arrays, augmented, tokens
from hasten.data.caching.cache import made_of
from hasten.data.caching.cache_disk import _locked, _Written, held, swept
from hasten.data.formats.in_memory import Arrays

KINDS = ["memory", "disk"]
NUMBERS = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def files(tmp_path):
    return sorted(str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*") if path.is_file())


def counting(pipeline):
    """The pipeline's source, counting the rows that are read from it."""
    source, pipeline.source.rows_read = pipeline.source, 0
    read = source.read

    def counted(rows):
        source.rows_read += len(rows)
        return read(rows)

    source.read = counted
    return pipeline


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [{"batches": 0}, {"threads": 2}, {"processes": 2}], ids=str)
def test_a_cache_changes_no_bit(kind, way):
    def built(*caches):
        pipeline = arrays(NUMBERS, torch.arange(ROWS)).shuffle(seed=1).map(doubled)
        for cache in caches:
            pipeline = pipeline.cache(cache)
        return pipeline.map(scaled).batch(BATCH).map(shifted).prefetch(**way)

    plain, cached = built(), built(kind)
    for _ in range(2):
        assert equal(list(cached), list(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_windowed_shuffle_keeps_its_order(kind):
    plain = Pipeline(Runs([0, 10, 35, 50]))
    orders = [list(p.shuffle(window=2).batch(7)) for p in (plain, plain.cache(kind), plain.map(lambda row: row).cache(kind))]
    assert equal(orders[0], orders[1]) and equal(orders[0], orders[2])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_once(kind):
    pipeline = counting(arrays(NUMBERS))
    cached = pipeline.cache(kind).shuffle().batch(BATCH)
    for _ in range(3):
        list(cached)
    assert ROWS <= pipeline.source.rows_read <= ROWS + 4, "all rows, and a few to know their size"
    again = counting(arrays(NUMBERS.clone()))
    list(again.cache(kind).batch(BATCH))
    assert again.source.rows_read == (0 if kind == "disk" else pipeline.source.rows_read)


@pytest.mark.parametrize("kind", KINDS)
def test_nestings_and_types(kind):
    columns = {"a": (NUMBERS.double(), torch.arange(ROWS) % 2 == 0), "b": NUMBERS.bfloat16(), "c": numpy.arange(ROWS, dtype=numpy.uint16)}
    for here, there in zip(arrays(columns).batch(BATCH), arrays(columns).cache(kind).batch(BATCH), strict=True):
        assert torch.equal(here["a"][0], there["a"][0]) and torch.equal(here["a"][1], there["a"][1])
        assert torch.equal(here["b"], there["b"]) and torch.equal(here["c"].int(), there["c"].int()) and there["c"].dtype == torch.uint16


@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_is_kept(kind, tmp_path):
    needed = NUMBERS.nbytes + ROWS * 8
    pipeline = counting(arrays(NUMBERS, torch.arange(ROWS)))
    with pytest.raises(Refusal, match=rf"{ROWS} rows needs {needed / 1e9:.3g} GB, and {(needed - 1) / 1e9:.3g} GB were allowed"):
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
    def identity(self): return {}

def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
pipeline = Pipeline(Zeros()).cache("memory", gigabytes=0.2).batch(100)
next(iter(Pipeline(Zeros()).batch(100)))
before = peak()
for batch in pipeline: pass
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell how much memory a process had at most")
def test_the_memory_taken_is_what_was_allowed():
    """0.2 GB of rows; chunks of 16 MB are read at a time."""
    at_once = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back to the system, as far as the C library is glibc
    asked = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, check=True, text=True, env=os.environ | at_once)
    assert 0.15e9 < int(asked.stdout) < 0.2e9 + 0.08e9


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_noticed_between_two_passes(kind, tmp_path):
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
    """Says of itself what Arrays does."""

    def read(self, rows):
        return super().read(rows) * 2


def test_what_must_not_share_a_cache_does_not(tmp_path):
    x, y = torch.arange(8), torch.arange(8)
    for name in ("x", "y"):
        numpy.save(tmp_path / f"{name}.npy", x.numpy())
    pictures = torch.zeros(8, 3, 4, 4, dtype=torch.uint8)
    built = [
        arrays(x), Pipeline(Doubled(x)), arrays(x, y), arrays({"x": x, "y": y}), arrays({"y": x, "x": y}), arrays({"x": (x, y)}),
        arrays(tmp_path / "x.npy"), arrays({"x": tmp_path / "x.npy"}), arrays({"y": tmp_path / "x.npy"}), arrays(tmp_path / "y.npy"),
        tokens(tmp_path / "x.npy", 2), tokens(tmp_path / "x.npy", 3), tokens(tmp_path / "x.npy", 2, stride=1),
        arrays(pictures), augmented(pictures), arrays(pictures, x), augmented(pictures, x),
        arrays(x).map(lambda x: x + 1).cache(), Pipeline(Doubled(x)).map(lambda x: x + 1).cache(),
    ]  # fmt: skip
    told = [str(made_of(pipeline.source)) for pipeline in built]
    assert len(set(told)) == len(told)
    list(arrays(x).cache("disk").batch(8))
    assert torch.equal(*Pipeline(Doubled(x)).cache("disk").batch(8), x * 2)


class Odd(Bad):
    """Says of itself what JSON does not know."""

    def identity(self):
        kinds = {"n": numpy.int64(3), 3: numpy.float32(0.5), "missing": float("nan"), "shape": torch.ones(2), "path": Path("x"), None: {1}}
        return super().identity() | kinds


@pytest.mark.parametrize("kind", KINDS)
def test_an_identity_may_hold_any_numbers(kind):
    pipeline = counting(Pipeline(Odd([])))
    cached = pipeline.cache(kind).batch(BATCH)
    assert equal(list(cached), list(cached)) and pipeline.source.rows_read <= ROWS + 4
    again = counting(Pipeline(Odd([])))
    list(again.cache(kind).batch(BATCH))
    assert (again.source.rows_read == 0) == (kind == "disk")


def test_a_changed_function_or_file_makes_another_cache(tmp_path):
    def cached(data, by):
        return torch.cat(list(arrays(data).map(lambda x: x * by).cache("disk").batch(BATCH)))

    assert torch.equal(cached(NUMBERS, 2), NUMBERS * 2)
    assert torch.equal(cached(NUMBERS, 3), NUMBERS * 3)
    assert torch.equal(cached(NUMBERS + 1, 3), (NUMBERS + 1) * 3)
    assert torch.equal(cached(NUMBERS, 2), NUMBERS * 2)
    assert len([name for name in files(tmp_path) if name.endswith("cache.json")]) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_change_while_they_are_kept_are_a_failure_that_leaves_nothing(kind, tmp_path):
    file, new = tmp_path / "x.npy", tmp_path / "new.npy"
    numpy.save(file, NUMBERS.numpy())
    numpy.save(new, NUMBERS.numpy() + 1)
    pipeline = arrays(file).cache(kind, watch=lambda *what: new.exists() and os.replace(new, file)).batch(ROWS)
    with pytest.raises(Failure, match="changed while the cache was being filled"):
        list(pipeline)
    assert not (tmp_path / "cache").exists() or not files(tmp_path)
    for each in (pipeline, arrays(file).cache(kind).batch(ROWS)):
        assert torch.equal(*each, NUMBERS + 1)


def test_a_change_in_memory_is_noticed_between_two_passes():
    data = NUMBERS.clone()
    pipeline = arrays(data).cache().batch(ROWS)
    assert torch.equal(*pipeline, NUMBERS)
    data += 1
    assert torch.equal(*pipeline, NUMBERS + 1)


def test_rows_that_were_mended_are_read_again():
    source = Bad([3, 50])
    pipeline = Pipeline(source).cache().skip_bad(2).batch(ROWS)
    assert len(*pipeline) == ROWS - 2
    source.bad = {7}
    assert sorted(set(range(ROWS)) - set(*map(torch.Tensor.tolist, pipeline))) == [7] == list(pipeline.faults.found)


@pytest.mark.parametrize(
    "damage",
    [
        lambda made: (made / "0.rows").write_bytes((made / "0.rows").read_bytes()[:-8]),
        lambda made: (made / "0.rows").unlink(),
        lambda made: (made / "cache.json").write_bytes((made / "cache.json").read_bytes()[:50]),
        lambda made: (made / "cache.json").write_bytes(b"\xff\x00"),
        lambda made: (made / "cache.json").write_text("{}"),
        lambda made: (made / "cache.json").write_text("[1]"),
        lambda made: (made / "cache.json").write_text((made / "cache.json").read_text().replace("float32", "float33")),
    ],
    ids=["short", "gone", "half", "no text", "empty", "a list", "no type"],
)
def test_a_damaged_cache_is_made_anew(tmp_path, damage):
    list(arrays(NUMBERS).cache("disk").batch(ROWS))
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    damage(made)
    pipeline = counting(arrays(NUMBERS))
    assert torch.equal(*pipeline.cache("disk").batch(ROWS), NUMBERS) and pipeline.source.rows_read >= ROWS
    assert torch.equal(*arrays(NUMBERS).cache("disk").batch(ROWS), NUMBERS)


def test_locks_that_nobody_holds_are_swept_and_one_that_cannot_be_had_is_one_line(tmp_path):
    list(arrays(NUMBERS).cache("disk").batch(ROWS))
    (made,) = (tmp_path / "cache").iterdir()
    shutil.rmtree(made)
    made.with_suffix(".lock").mkdir()  # as good as one that may not be opened
    with pytest.raises(Failure, match=r"cannot write .*\.lock: Is a directory; .*choose another folder") as told:
        list(arrays(NUMBERS).cache("disk").batch(ROWS))
    assert "\n" not in str(told.value)
    (tmp_path / "cache" / "left.lock").touch()
    list(arrays(NUMBERS + 1).cache("disk").batch(ROWS))
    assert not (tmp_path / "cache" / "left.lock").exists() and made.with_suffix(".lock").exists()


def test_a_lock_is_held_by_one_alone_also_when_it_was_removed_meanwhile(tmp_path):
    lock = tmp_path / "x.lock"
    with held(lock, "waiting"):
        assert _locked(lock) is None
        swept(tmp_path)
        assert lock.exists(), "it is in use"
        lock.unlink()
        with held(lock, "waiting"):  # another file of that name
            assert lock.exists()
    assert not lock.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_stay_bad(kind):
    with pytest.raises(Failure, match="row 3 "):
        list(Pipeline(Bad([3, 50])).cache(kind).batch(BATCH))
    for _ in range(2):  # the second time from the disk
        pipeline = Pipeline(Bad([3, 50])).cache(kind).skip_bad(2).shuffle(seed=1).batch(BATCH)
        plain = Pipeline(Bad([3, 50])).skip_bad(2).shuffle(seed=1).batch(BATCH)
        assert equal(list(pipeline), list(plain)) and sorted(pipeline.faults.found) == [3, 50]
        assert pipeline.faults.found[3].why == "no number"
    with pytest.raises(Failure, match="row "):
        list(Pipeline(Bad([3, 50])).cache(kind).skip_bad(1).batch(BATCH))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda p, kind: p.map(lambda x, chance: x).cache(kind), "wants random numbers"),
        (lambda p, kind: p.map(lambda x: x[: int(x[0]) % 2 + 1]).cache(kind), "cannot be stacked.*one shape"),
        (lambda p, kind: p.map(lambda x: x[: 1 + (x[0] > 200)]).cache(kind), r"float32 \(1,\) in the first rows|cannot be stacked"),
        (lambda p, kind: p.map(lambda x: "text").cache(kind), "holds strs"),
        (lambda p, kind: p.cache(kind, gigabytes=0), "gigabytes"),
        (lambda p, kind: p.cache("tape"), "'memory' or 'disk'"),
        (lambda p, kind: p.cache("memory", folder="x"), "folder"),
    ],
)
def test_what_cannot_be_cached_is_refused(kind, build, told):
    with pytest.raises(Refusal, match=told):
        list(build(arrays(NUMBERS), kind).batch(BATCH))


MAKE = """
import sys, time, warnings, torch
from pathlib import Path
from hasten.contract.errors import Failure
from hasten.data import Pipeline, Source

class Slow(Source):
    def __len__(self): return 40
    def read(self, rows):
        with open(sys.argv[1] + "/reads", "a") as file: file.write(f"{len(rows)}\\n")
        time.sleep(0.25)
        return torch.from_numpy(rows.copy())[:, None].repeat(1, 200_000)
    def identity(self): return {"slow": 1}

print("ready", flush=True)
try:
    total = sum(int(batch[:, 0].sum()) for batch in Pipeline(Slow()).cache("disk", folder=sys.argv[1] + "/cache").batch(8))
    print(total)
except Failure as failure:
    print(failure)
"""


def maker(tmp_path, before=""):
    """A process that makes a cache in four slow chunks."""
    command = [sys.executable, "-c", textwrap.dedent(before) + MAKE, str(tmp_path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_two_processes_share_one_making(tmp_path):
    makers = [maker(tmp_path) for _ in range(2)]
    told = [process.communicate(timeout=60) for process in makers]
    assert [out for out, _ in told] == [f"ready\n{sum(range(40))}\n"] * 2
    assert sum(map(int, (tmp_path / "reads").read_text().split())) == 40 + 4, "read by one of them only"
    assert sum("another process makes the cache" in err for _, err in told) <= 1  # none, if the first was done before
    assert [name.split("/")[-1] for name in files(tmp_path)] == ["0.rows", "cache.json"]


def test_a_killed_maker_leaves_nothing_that_counts(tmp_path):
    process = maker(tmp_path)
    until(lambda: list((tmp_path / "cache").glob("*.making/0.rows")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "cache").glob("*.making"))
    list(arrays(NUMBERS).cache("disk").batch(BATCH))  # of something else: it sweeps up
    assert not list((tmp_path / "cache").glob("*.making"))
    assert maker(tmp_path).communicate(timeout=60)[0].split() == ["ready", str(sum(range(40)))]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the disk: writing fails in the middle all the same."""
    process = maker(tmp_path, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))")
    out, _ = process.communicate(timeout=60)
    assert "cannot write" in out and "nothing is left of the cache" in out and len(out.splitlines()) == 2
    assert not list((tmp_path / "cache").glob("*.making")) and not list((tmp_path / "cache").rglob("*.rows"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_told_by_its_name(tmp_path):
    (tmp_path / "0.rows").symlink_to("/dev/full")
    written = _Written(tmp_path)
    with pytest.raises(Failure, match=r"cannot write .*: the disk is full; nothing is left .* make room, or choose another folder") as told:
        written.write(torch.zeros(1000, 100))
    written.abandon()
    assert "\n" not in str(told.value)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Failure, match="choose another folder"):
        list(arrays(NUMBERS).cache("disk", folder=tmp_path / "file" / "cache").batch(BATCH))


def test_a_cache_of_another_version_of_this_package_is_not_taken(monkeypatch):
    for version, read in (("1.0", True), ("1.0", False), ("1.1", True)):
        monkeypatch.setattr("hasten.data.caching.cache_disk.__version__", version)
        pipeline = counting(arrays(NUMBERS))
        list(pipeline.cache("disk").batch(BATCH))
        assert (pipeline.source.rows_read > 0) == read


def test_somebodys_own_source_is_another_when_its_text_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = """
        import torch
        from hasten.data import Source

        class Own(Source):
            def __len__(self):
                return 8

            def read(self, rows):
                return torch.from_numpy(rows) * FACTOR

            def identity(self):
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


def test_progress_is_told(recwarn, tmp_path):
    class Slow(Runs):
        def read(self, rows):
            time.sleep(0.01)
            return torch.zeros(len(rows), 4_000_000)

    told = []
    list(Pipeline(Slow([0, 5])).cache(watch=lambda *what: told.append(what)).batch(5))
    assert [done for _, done, _ in told] == [0.2, 0.4, 0.6, 0.8, 1.0] and told[-1][2] == 0 and "memory" in told[0][0]
    assert all(re.search(r", [\d,]+ rows/s$", what) for what, *_ in told)
    assert not [each for each in recwarn if each.category is Notice]
