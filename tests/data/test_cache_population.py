"""Disk caches are complete or absent, and shared by processes: damage, locks, killed writers, failing disks."""

import resource
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch

from hasten import RunError
from hasten.data import Pipeline, Source, arrays
from hasten.data.cache.cache_disk import _ColumnWriter, _try_lock, file_lock, remove_partial
from helpers.caches import NUMBERS, counting, files
from helpers.pipelines import BATCH, ROWS
from helpers.process import FORK, join_process, start_process


@pytest.fixture(autouse=True)
def own_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


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
def test_damaged_cache_is_rebuilt(tmp_path, damage):
    list(arrays(NUMBERS).cache("disk").batch(ROWS))
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    damage(made)
    pipeline = counting(arrays(NUMBERS))
    assert torch.equal(*pipeline.cache("disk").batch(ROWS), NUMBERS) and pipeline.source.rows_read >= ROWS
    assert torch.equal(*arrays(NUMBERS).cache("disk").batch(ROWS), NUMBERS)


def test_unheld_locks_are_removed_and_an_unusable_lock_is_one_line(tmp_path):
    list(arrays(NUMBERS).cache("disk").batch(ROWS))
    (made,) = (tmp_path / "cache").iterdir()
    shutil.rmtree(made)
    made.with_suffix(".lock").mkdir()  # equivalent to a lock file that may not be opened
    with pytest.raises(RunError, match=r"cannot write .*\.lock: Is a directory; .*choose another directory") as error:
        list(arrays(NUMBERS).cache("disk").batch(ROWS))
    assert "\n" not in str(error.value)
    (tmp_path / "cache" / "left.lock").touch()
    list(arrays(NUMBERS + 1).cache("disk").batch(ROWS))
    assert not (tmp_path / "cache" / "left.lock").exists() and made.with_suffix(".lock").exists()


def test_lock_removed_meanwhile_is_held_by_one_process(tmp_path):
    lock = tmp_path / "x.lock"
    with file_lock(lock, "waiting"):
        assert _try_lock(lock) is None
        remove_partial(tmp_path)
        assert lock.exists(), "it is in use"
        lock.unlink()
        with file_lock(lock, "waiting"):  # another file of that name
            assert lock.exists()
    assert not lock.exists()


TIMEOUT_S = 120  # seconds, for a busy machine; mostly unused


class Slow(Source):
    """Forty rows of 1.6 MB; reading pauses before each chunk but the first."""

    def __init__(self, directory, pause):
        self.directory, self.pause = directory, pause

    def __len__(self):
        return 40

    def read(self, rows):
        with open(self.directory / "reads", "a") as file:
            file.write(f"{len(rows)}\n")
        time.sleep(self.pause if any(self.directory.glob("cache/*.making/0.rows")) else 0.0)
        return torch.from_numpy(rows.copy())[:, None].repeat(1, 200_000)

    def fingerprint(self):
        return {"slow": 1}


def build_cache(directory, pause, limit, results):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        try:
            batches = Pipeline(Slow(directory, pause)).cache("disk", directory=directory / "cache").batch(8)
            outcome = sum(int(batch[:, 0].sum()) for batch in batches)
        except RunError as failure:
            outcome = str(failure)
    results.put((outcome, [str(notice.message) for notice in notices]))


def start_maker(directory, pause=0.25, limit=None):
    """A process that writes a cache in four chunks, and the queue of its result."""
    results = FORK.SimpleQueue()
    return start_process(build_cache, directory, pause, limit, results), results


def join_maker(process, results):
    assert join_process(process) == 0
    return results.get()


def until(condition, process):
    while not condition():
        assert process.is_alive()
        time.sleep(0.005)


def test_two_processes_build_a_cache_once(tmp_path):
    outcomes = [join_maker(*each) for each in [start_maker(tmp_path) for _ in range(2)]]
    assert [total for total, _ in outcomes] == [sum(range(40))] * 2
    assert sum(map(int, (tmp_path / "reads").read_text().split())) == 40 + 4, "read by one of them only"
    # nothing is read if the first process was done
    assert sum("another process is filling the cache" in notice for _, notices in outcomes for notice in notices) <= 1
    assert [name.split("/")[-1] for name in files(tmp_path)] == ["0.rows", "cache.json"]


def test_killed_builder_leaves_no_valid_cache(tmp_path):
    process, _ = start_maker(tmp_path, pause=TIMEOUT_S)  # in the middle, however late the signal is
    until(lambda: list((tmp_path / "cache").glob("*.making/0.rows")), process)
    process.kill()
    process.join()
    assert list((tmp_path / "cache").glob("*.making"))
    list(arrays(NUMBERS).cache("disk").batch(BATCH))  # a cache of other data: it removes partial files
    assert not list((tmp_path / "cache").glob("*.making"))
    assert join_maker(*start_maker(tmp_path))[0] == sum(range(40))


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """A limit on file sizes stands in for the full disk: writing fails in the middle as well."""
    message, _ = join_maker(*start_maker(tmp_path, limit=20_000_000))
    assert "cannot write" in message and "incomplete cache was removed" in message and "\n" not in message
    assert not list((tmp_path / "cache").glob("*.making")) and not list((tmp_path / "cache").rglob("*.rows"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_full_disk_is_named_in_the_error(tmp_path):
    (tmp_path / "0.rows").symlink_to("/dev/full")
    written = _ColumnWriter(tmp_path)
    with pytest.raises(
        RunError,
        match=r"cannot write .*: the disk is full; the incomplete cache was removed; free some space, or choose "
        r"another directory",
    ) as error:
        written.write(torch.zeros(1000, 100))
    written.abandon()
    assert "\n" not in str(error.value)


def test_read_only_directory_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="choose another directory"):
        list(arrays(NUMBERS).cache("disk", directory=tmp_path / "file" / "cache").batch(BATCH))
