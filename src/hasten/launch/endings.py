"""What came of each rank of a job, left in a folder that only the job knows, for whoever started it. Touches the standard library only."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hasten-job-"  # of the folders of jobs
NEW = 60.0  # seconds; a folder that has just been made may not be locked yet
LAST_MOMENT = 60.0  # seconds that a rank which is done gives the others to be done, too
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
FOLDER = "HASTEN_JOB"  # the environment's name for the folder of the job
GOES_ON = "HASTEN_GOES_ON"  # and for that of the run, where the job goes on with it
PARENT = "HASTEN_PARENT"  # and for the number of the process that has started the ranks
_ours = os.environ.pop(FOLDER, None)  # a program that the task starts is no rank
_goes_on = os.environ.pop(GOES_ON, None)
_parent = int(os.environ.pop(PARENT, 0))


@dataclass(frozen=True)
class Ending:
    """What came of one rank.

    Attributes:
        code: its exit code as a command.
        line: what it had to say, where something went wrong.
        aftermath: it failed because another did.
        stopped: it was asked to end, and has saved.
        waited: seconds, in vain, for another that said nothing.
        silent: seconds that others have waited for this one, in vain.
        when: seconds since the epoch.
    """

    code: int
    line: str | None = None
    aftermath: bool = False
    stopped: bool = False
    waited: float = 0.0
    silent: float = 0.0
    when: float = 0.0


def is_rank() -> bool:
    """Whether this process is one of a job that ``start`` has started."""
    return _ours is not None


def in_job() -> bool:
    """Whether this process is one of several, whoever started them."""
    return is_rank() or os.environ.get("WORLD_SIZE", "1") != "1"


def speaks() -> bool:
    """Whether this process has the word: it is alone, or rank 0, whoever started it."""
    return not in_job() or os.environ.get("RANK", "0") == "0"


def end_with_the_parent() -> None:
    """Asks the system for SIGTERM when whoever started this rank is gone: nobody would be left to tell, or to end it."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != _parent:  # it was gone before we could ask
        os._exit(1)


def leave(ending: Ending) -> None:
    """What came of this rank, left for whoever started it."""
    leave_of(int(os.environ["RANK"]), ending, _ours)


def leave_of(rank: int, ending: Ending, folder: str) -> None:
    """The same of a rank that cannot speak, by who has seen it end."""
    path = Path(folder, f"rank-{rank}.json")
    unfinished = path.with_suffix(f".{os.getpid()}")  # the rank may come to itself while another writes for it
    unfinished.write_text(json.dumps({**vars(ending), "when": time.time()}))
    unfinished.rename(path)


def trouble_of_the_others() -> str | None:
    """What another rank of this machine has to say that could not go on, as soon as all of them have ended, or none of them well."""
    others, until = int(os.environ["LOCAL_WORLD_SIZE"]) - 1, time.monotonic() + LAST_MOMENT
    while time.monotonic() < until:
        endings = left(_ours)
        if lines := [ending.line for ending in endings.values() if ending.line]:
            return lines[0]
        if len(endings) >= others:
            break
        time.sleep(0.01)
    return None


def note_run(out: str) -> None:
    """That this rank is about to train into a folder, for those who may have to go on with it."""
    Path(_ours, "run").write_text(str(out))


def run_to_go_on_with() -> str | None:
    """The folder of the run, where the ranks of this job were started before and some were lost."""
    return _goes_on


@contextmanager
def folder_of_a_job() -> Iterator[str]:
    """A folder for what ranks leave, which we have as long as we live. Those of jobs that were killed are taken away."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > NEW and _is_nobodys(path):
                shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)  # gone with the process, however it ends
            yield folder
        finally:
            os.close(held)


def _is_nobodys(path: Path) -> bool:
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(held)
    return True


def folder_of_the_run(folder: str) -> str | None:
    """What ``note_run`` has noted."""
    path = Path(folder, "run")
    return path.read_text() if path.exists() else None


def forget(folder: str) -> None:
    """What the ranks have left, before they are started again."""
    for path in Path(folder).glob("rank-*"):
        path.unlink()


def left(folder: str) -> dict[int, Ending]:
    """What the ranks have left, by rank."""
    return {int(path.stem.partition("-")[2]): Ending(**json.loads(path.read_text())) for path in Path(folder).glob("rank-*.json")}
