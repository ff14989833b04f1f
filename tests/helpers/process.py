"""Processes for tests, forked from this one, which has imported torch: a new interpreter would take seconds."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import psutil

from hasten.cli.main import main
from hasten.launch.rank_results import PARENT

FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 300.0  # for a busy machine


def start_process(function, *args, **kwargs):
    """Starts a process that runs the function."""
    process = FORK.Process(target=function, args=args, kwargs=kwargs)
    process.start()
    return process


def join_process(process) -> int:
    """Waits for a process and returns its exit code. Fails if it still runs after TIMEOUT_S."""
    process.join(TIMEOUT_S)
    hangs = process.is_alive()
    process.kill()
    process.join()
    assert not hangs, f"the process still runs after {TIMEOUT_S:.0f} s"
    return process.exitcode


def run_script(script: str, *args) -> str:
    """Runs Python code in a process, which must succeed. Returns what it prints."""
    output = FORK.SimpleQueue()

    def run():
        sys.argv[1:] = map(str, args)
        with redirect_stdout(StringIO()) as stdout:
            exec(script, {"__name__": "__main__"})
        output.put(stdout.getvalue().strip())

    code = join_process(start_process(run))
    assert code == 0, f"exit code {code}"
    return output.get()


def start_hasten(*argv: str, cwd, out: int, err: int, prepare: Callable[[], object] = bool):
    """Starts ``hasten ARGV`` in a process, with the file descriptors ``out`` and ``err`` as its output."""

    def run():
        os.chdir(cwd)
        os.dup2(out, 1), os.dup2(err, 2)
        sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1) for descriptor in (1, 2))  # noqa: SIM115  open as long as the process
        sys.argv = ["hasten", *argv]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored by a job in the background
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored under nohup
        prepare()
        sys.exit(main())

    return start_process(run)


def run_hasten(*argv: str, cwd, prepare: Callable[[], object] = bool) -> subprocess.CompletedProcess:
    """Runs ``hasten ARGV`` in a process. Returns exit code and output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = join_process(start_hasten(*argv, cwd=cwd, out=out.fileno(), err=err.fileno(), prepare=prepare))
        texts = [file.seek(0) or file.read() for file in (out, err)]
    return subprocess.CompletedProcess(argv, code, *texts)


def wait_until_it_trains(process, out) -> None:
    """Waits until a run, which may have been resumed, has recorded the time of a step in this run directory."""
    times = out / "times.jsonl"
    before = times.stat().st_size if times.exists() else 0
    deadline = time.monotonic() + TIMEOUT_S
    while process.is_alive() and (not times.exists() or times.stat().st_size == before):
        assert time.monotonic() < deadline, "the run does not begin to train"
        time.sleep(0.001)


def train_command(task: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "hasten", "train", f"rank_tasks.py:{task}", "--processes", "2", *more]


def jobs_left() -> list[str]:
    """Returns the command lines of running ranks that this test started."""
    found = []
    test = os.environ["PYTEST_CURRENT_TEST"].split(" (")[0]
    ours = f"PYTEST_CURRENT_TEST={test}".encode()  # inherited by processes that a test starts
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            variables = (process / "environ").read_bytes()
        except OSError:
            continue
        if f"{PARENT}=".encode() in variables and ours in variables and "rank_tasks" in line:
            found.append(line)
    return found


class Job:
    """A Popen with the ``is_alive`` of a ``multiprocessing.Process``."""

    def __init__(self, process: subprocess.Popen):
        self.is_alive = lambda: process.poll() is None


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def environment(pid: int) -> dict[str, str]:
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {}


def live_children() -> list[psutil.Process]:
    """Returns child processes, without zombies and those meant to outlive a test: fork servers, pooled ranks."""
    pools = getattr(sys.modules.get("helpers.ranks"), "_pools", {}).values()
    pooled = {process.pid for pool in pools for process in pool.processes}
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            lives = child.status() != psutil.STATUS_ZOMBIE and child.pid not in pooled
            if lives and "hasten.benchmarking.worker_process" not in child.cmdline():
                found.append(child)
    return found
