"""The result of each rank of a job, in torchrun's error files. Imports the standard library only.

torchrun names one file per rank and attempt (``TORCHELASTIC_ERROR_FILE``), in which a failed rank leaves JSON:
``{"message": {"message": ..., "extraInfo": {"timestamp": ...}}}`` (torch.distributed.elastic.multiprocessing.errors).
``record`` would write it only for an exception that leaves ``main()``, with nothing but its text. Here every rank
writes one, and ``extraInfo`` also holds the fields of ``RankResult``:

- ``is_peer_failure`` separates the root cause, which is reported, from the ranks that failed because of it.
- ``stopped`` and ``waited`` decide whether the ranks are restarted (tests/launch/test_elastic.py, test_timeout.py).
- ``code`` may be 1 for a negative result (a missed target), which torchrun would take for a crash.
"""

import ctypes
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ERROR_FILES = "*/attempt_*/*/error.json"  # in the job directory, as torch's DefaultLogsSpecs lays it out
PEER_RESULT_TIMEOUT_S = 60.0  # how long a finished rank waits for the results of the others
PR_SET_PDEATHSIG = 1  # prctl(2)
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun's agent
RESUME_DIR = "HASTEN_RESUME_DIR"  # the run directory to resume after a restart, also on a node that joins late
PARENT = "HASTEN_PARENT"  # process ID of the launcher; set if hasten, not torchrun, has started this rank
_resume_dir = os.environ.pop(RESUME_DIR, None)
_parent = int(os.environ.pop(PARENT, 0))  # removed, because a program that the task starts is not a rank
_error_file = os.environ.pop(ERROR_FILE, None) if _parent else None


@dataclass(frozen=True)
class RankResult:
    """How one rank ended: exit code, error message and cause."""

    code: int  # exit code of the command
    message: str | None = None  # one-line error message; None after a success
    is_peer_failure: bool = False  # the rank failed only because another rank did
    stopped: bool = False  # the rank was asked to end, and has saved a checkpoint
    waited: float = 0.0  # seconds that it waited for a silent rank until the timeout; 0 if it did not
    timestamp: float = 0.0  # seconds since the epoch


def is_managed_rank() -> bool:
    """Whether ``launch`` has started this process as a rank."""
    return _error_file is not None


def in_job() -> bool:
    """Whether this process is one of several ranks, started by hasten or by torchrun."""
    return is_managed_rank() or os.environ.get("WORLD_SIZE", "1") != "1"


def is_main_process() -> bool:
    """Whether this process prints the command's output: a single process, or rank 0."""
    return not in_job() or os.environ.get("RANK", "0") == "0"


def die_with_parent() -> None:
    """Lets the kernel send SIGTERM to this rank when its launcher ends. Exits with code 1 if that has ended already."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != _parent:
        os._exit(1)


def write_result(result: RankResult, error_file: Path | None = None, rank: int | None = None) -> None:
    """Writes the result of ``rank`` to its error file, by default those of this process. Atomic: others may read it."""
    error_file, rank = error_file or _this_error_file(), int(os.environ["RANK"]) if rank is None else rank
    fields = {**vars(result), "timestamp": time.time(), "rank": rank}
    content = {"message": result.message or "", "extraInfo": {"timestamp": fields["timestamp"], "result": fields}}
    unfinished = error_file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"message": content}))
    unfinished.rename(error_file)


def peer_error() -> str | None:
    """The error message of another rank of this node, once there is one; None if all end without, or after 60 s."""
    num_peers, deadline = int(os.environ["LOCAL_WORLD_SIZE"]) - 1, time.monotonic() + PEER_RESULT_TIMEOUT_S
    while time.monotonic() < deadline:
        results = read_results(_job_directory())
        if messages := [result.message for result in results.values() if result.message]:
            return messages[0]
        if len(results) >= num_peers:
            break
        time.sleep(0.01)
    return None


def note_run(out: str) -> None:
    """Records the run directory of this rank, for ranks that resume the run after a restart."""
    (_job_directory() / "run").write_text(str(out))


def run_directory(job: str) -> str | None:
    """The run directory that a rank of the job recorded with ``note_run``; None if there is none."""
    path = Path(job, "run")
    return path.read_text() if path.exists() else None


def resume_directory() -> str | None:
    """The run directory to resume, if the ranks of this job were restarted after some were lost."""
    return _resume_dir


def remove_results(job: str) -> None:
    """Removes the ranks' error files before a restart; torch leaves those of earlier attempts."""
    for path in Path(job).glob(ERROR_FILES):
        path.unlink()


def read_results(job: str | Path) -> dict[int, RankResult]:
    """Results of the ranks of this node, by rank. Missing ranks are still running or ended without writing one."""
    texts = [path.read_text() for path in Path(job).glob(ERROR_FILES)]
    results = [json.loads(text)["message"]["extraInfo"]["result"] for text in texts]
    return {fields.pop("rank"): RankResult(**fields) for fields in results}


def _job_directory() -> Path:
    """The job directory, from the path JOB/RUN/attempt_N/LOCAL_RANK/error.json of this rank's error file."""
    return _this_error_file().parents[3]


def _this_error_file() -> Path:
    assert _error_file is not None, "only a rank that hasten has started has an error file"
    return Path(_error_file)
