"""What came of each rank of a job, left in a folder that only the job knows, for whoever started it. Touches the standard library only."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
FOLDER = "HASTEN_JOB"  # the environment's name for the folder of the job
GOES_ON = "HASTEN_GOES_ON"  # and for that of the run, where the job goes on with it
_ours = os.environ.pop(FOLDER, None)  # a program that the task starts is no rank
_goes_on = os.environ.pop(GOES_ON, None)


@dataclass(frozen=True)
class Ending:
    """What came of one rank.

    Attributes:
        code: its exit code as a command.
        line: what it had to say, where something went wrong.
        aftermath: it failed because another did.
        when: seconds since the epoch.
    """

    code: int
    line: str | None = None
    aftermath: bool = False
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


def leave(ending: Ending) -> None:
    """What came of this rank, left for whoever started it."""
    path = Path(_ours, f"rank-{os.environ['RANK']}.json")
    path.with_suffix(".part").write_text(json.dumps({**vars(ending), "when": time.time()}))
    path.with_suffix(".part").rename(path)


def note_run(out: str) -> None:
    """That this rank is about to train into a folder, for those who may have to go on with it."""
    Path(_ours, "run").write_text(str(out))


def run_to_go_on_with() -> str | None:
    """The folder of the run, where the ranks of this job were started before and some were lost."""
    return _goes_on


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
