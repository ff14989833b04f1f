"""Caches on disk are never half, and one for all processes: damage, locks, deaths while they are made, disks that fail."""

import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from caches import NUMBERS, counting, files
from pipelines import BATCH, ROWS

from hasten import Failure
from hasten.data import arrays
from hasten.data.caching.cache_disk import _locked, _Written, held, swept


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
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


PATIENCE = 120  # seconds, on a busy machine; none of it is used

MAKE = """
import sys, time, warnings, torch
from pathlib import Path
from hasten.contract.errors import Failure
from hasten.data import Pipeline, Source

class Slow(Source):
    def __len__(self): return 40
    def read(self, rows):
        with open(sys.argv[1] + "/reads", "a") as file: file.write(f"{len(rows)}\\n")
        time.sleep(float(sys.argv[2]) if any(Path(sys.argv[1]).glob("cache/*.making/0.rows")) else 0.0)
        return torch.from_numpy(rows.copy())[:, None].repeat(1, 200_000)
    def identity(self): return {"slow": 1}

print("ready", flush=True)
try:
    total = sum(int(batch[:, 0].sum()) for batch in Pipeline(Slow()).cache("disk", folder=sys.argv[1] + "/cache").batch(8))
    print(total)
except Failure as failure:
    print(failure)
"""


def maker(tmp_path, before="", pause=0.25):
    """A process that makes a cache in four chunks, and pauses before each but the first."""
    command = [sys.executable, "-c", textwrap.dedent(before) + MAKE, str(tmp_path), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_two_processes_share_one_making(tmp_path):
    makers = [maker(tmp_path) for _ in range(2)]
    told = [process.communicate(timeout=PATIENCE) for process in makers]
    assert [out for out, _ in told] == [f"ready\n{sum(range(40))}\n"] * 2
    assert sum(map(int, (tmp_path / "reads").read_text().split())) == 40 + 4, "read by one of them only"
    assert sum("another process makes the cache" in err for _, err in told) <= 1  # none, if the first was done before
    assert [name.split("/")[-1] for name in files(tmp_path)] == ["0.rows", "cache.json"]


def test_a_killed_maker_leaves_nothing_that_counts(tmp_path):
    process = maker(tmp_path, pause=PATIENCE)  # in the middle, however late the signal is
    until(lambda: list((tmp_path / "cache").glob("*.making/0.rows")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "cache").glob("*.making"))
    list(arrays(NUMBERS).cache("disk").batch(BATCH))  # of something else: it sweeps up
    assert not list((tmp_path / "cache").glob("*.making"))
    assert maker(tmp_path).communicate(timeout=PATIENCE)[0].split() == ["ready", str(sum(range(40)))]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the disk: writing fails in the middle all the same."""
    process = maker(tmp_path, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))")
    out, _ = process.communicate(timeout=PATIENCE)
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
