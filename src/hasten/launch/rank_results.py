"""How each rank of a job ended, in torchrun's error file. Imports the standard library only.

torchrun names a file for each rank and each attempt (``TORCHELASTIC_ERROR_FILE``), in which a failed rank leaves JSON:
``{"message": {"message": ..., "extraInfo": {"timestamp": ...}}}`` (torch.distributed.elastic.multiprocessing.errors).
``record`` would write it only for an exception that leaves ``main()``, with nothing but its text; here ``extraInfo`` holds
the fields of ``Ending`` as well, and a rank that succeeds writes one, too:

- ``aftermath`` names the root cause: the first rank that failed by its own fault is reported, not those that failed after it.
- ``stopped`` and ``waited`` decide whether the ranks are started again (tests/launch/test_elastic.py, test_patience.py).
- ``code`` is a result that is a "no" (exit code 1 of the command), which torchrun would take for a crash.

The folder of the files is this module's own, because torchrun never removes its log folder: a launcher that was killed
leaves nothing behind that the next one does not remove (tests/launch/test_endings.py).
"""

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

ERROR_FILES = "*/attempt_*/*/error.json"  # in the folder of a job, as torch's DefaultLogsSpecs lays it out
PREFIX = "hasten-job-"  # of the folders of jobs
NEW = 60.0  # seconds; a folder that has just been made may not be locked yet
LAST_MOMENT = 60.0  # seconds that a rank which is done gives the others to be done, too
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun's agent
GOES_ON = "HASTEN_GOES_ON"  # the folder of the run to resume after a restart; a rank that joins late gets it, too
PARENT = "HASTEN_PARENT"  # the process number of the launcher; says that hasten, not torchrun, has started this rank
_goes_on = os.environ.pop(GOES_ON, None)
_parent = int(os.environ.pop(PARENT, 0))  # removed: a program that the task starts is no rank
_error_file = os.environ.pop(ERROR_FILE, None) if _parent else None


@dataclass(frozen=True)
class RankResult:
    """What came of one rank.

    Attributes:
        code: its exit code as a command.
        line: what it had to say, where something went wrong.
        aftermath: it failed because another did.
        stopped: it was asked to end, and has saved.
        waited: seconds, in vain, for another that said nothing.
        when: seconds since the epoch.
    """

    code: int
    line: str | None = None
    aftermath: bool = False
    stopped: bool = False
    waited: float = 0.0
    when: float = 0.0


def is_managed_rank() -> bool:
    """Whether this process is one of a job that ``start`` has started."""
    return _error_file is not None


def in_job() -> bool:
    """Whether this process is one of several, whoever started them."""
    return is_managed_rank() or os.environ.get("WORLD_SIZE", "1") != "1"


def is_main_process() -> bool:
    """Whether this process has the word: it is alone, or rank 0, whoever started it."""
    return not in_job() or os.environ.get("RANK", "0") == "0"


def die_with_parent() -> None:
    """Asks the system for SIGTERM when whoever started this rank is gone: nobody would be left to tell, or to end it."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != _parent:  # it was gone before we could ask
        os._exit(1)


def write_result(ending: RankResult) -> None:
    """Writes how this rank has ended into its error file."""
    write_ending(Path(_error_file), int(os.environ["RANK"]), ending)


def write_ending(error_file: Path, rank: int, ending: RankResult) -> None:
    """Writes an error file of torchrun, all at once: the agent and other ranks may read it at any time."""
    extra = {**vars(ending), "when": time.time(), "rank": rank}
    unfinished = error_file.with_suffix(".unfinished")
    message = {"message": ending.line or "", "extraInfo": {"timestamp": extra["when"], "ending": extra}}
    unfinished.write_text(json.dumps({"message": message}))
    unfinished.rename(error_file)


def peer_error() -> str | None:
    """What another rank of this machine has to say that could not go on, as soon as all of them have ended, or none of them well."""
    job = _job_folder()
    others, until = int(os.environ["LOCAL_WORLD_SIZE"]) - 1, time.monotonic() + LAST_MOMENT
    while time.monotonic() < until:
        endings = read_results(job)
        if lines := [ending.line for ending in endings.values() if ending.line]:
            return lines[0]
        if len(endings) >= others:
            break
        time.sleep(0.01)
    return None


def note_run(out: str) -> None:
    """That this rank is about to train into a folder, for those who may have to go on with it."""
    Path(_job_folder(), "run").write_text(str(out))


def resume_directory() -> str | None:
    """The folder of the run, where the ranks of this job were started before and some were lost."""
    return _goes_on


@contextmanager
def job_directory() -> Iterator[str]:
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


def run_directory(folder: str) -> str | None:
    """What ``note_run`` has noted."""
    path = Path(folder, "run")
    return path.read_text() if path.exists() else None


def forget(folder: str) -> None:
    """Removes the error files, before the ranks are started again: torch does so only where the attempt has the same number."""
    for path in Path(folder).glob(ERROR_FILES):
        path.unlink()


def read_results(folder: str) -> dict[int, RankResult]:
    """How the ranks of this machine have ended, by rank; those that are missing still run, or ended without a word."""
    texts = [path.read_text() for path in Path(folder).glob(ERROR_FILES)]
    found = [json.loads(text)["message"]["extraInfo"]["ending"] for text in texts]
    return {ending.pop("rank"): RankResult(**ending) for ending in found}


def _job_folder() -> Path:
    """Of a rank: FOLDER/RUN/attempt_N/LOCAL_RANK/error.json is its error file."""
    return Path(_error_file).parents[3]
