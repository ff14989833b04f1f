"""What came of each rank of a job, left in a folder that only the job knows, for whoever started it. Touches the standard library only."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "HASTEN_JOB"  # the environment's name for the folder of the job
_ours = os.environ.pop(FOLDER, None)  # a program that the task starts is no rank


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


def leave(ending: Ending) -> None:
    """What came of this rank, left for whoever started it."""
    path = Path(_ours, f"rank-{os.environ['RANK']}.json")
    path.with_suffix(".part").write_text(json.dumps({**vars(ending), "when": time.time()}))
    path.with_suffix(".part").rename(path)


def left(folder: str) -> dict[int, Ending]:
    """What the ranks have left, by rank."""
    return {int(path.stem.partition("-")[2]): Ending(**json.loads(path.read_text())) for path in Path(folder).glob("rank-*.json")}
