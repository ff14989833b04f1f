"""Processes for tests, forked from this one: it has imported torch, for which a fresh one takes seconds."""

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

from hasten.cli.main import main

FORK = multiprocessing.get_context("fork")
PATIENCE = 300.0  # seconds, on a busy machine; most of it is never used


def forked(function, *arguments, **named):
    """A process that has begun to run the function."""
    process = FORK.Process(target=function, args=arguments, kwargs=named)
    process.start()
    return process


def ended(process) -> int:
    """The exit code of a process that is waited for."""
    process.join(PATIENCE)
    hangs = process.is_alive()
    process.kill()
    process.join()
    assert not hangs, f"it hangs after {PATIENCE:.0f} s"
    return process.exitcode


def said_by(script: str, *arguments) -> str:
    """What a text of Python prints; its process has to end well."""
    told = FORK.SimpleQueue()

    def run():
        sys.argv[1:] = map(str, arguments)
        with redirect_stdout(StringIO()) as said:
            exec(script, {"__name__": "__main__"})
        told.put(said.getvalue().strip())

    code = ended(forked(run))
    assert code == 0, f"exit code {code}"
    return told.get()


def begun(*words: str, cwd, out: int, err: int, prepare: Callable[[], object] = bool):
    """The program, as ``hasten`` with these words, which says what it says to these file numbers."""

    def run():
        os.chdir(cwd)
        os.dup2(out, 1), os.dup2(err, 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115  open as long as the process
        sys.argv = ["hasten", *words]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored,
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one after nohup this
        prepare()
        sys.exit(main())

    return forked(run)


def program(*words: str, cwd, prepare: Callable[[], object] = bool) -> subprocess.CompletedProcess:
    """The program at its end, and what it has said."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = ended(begun(*words, cwd=cwd, out=out.fileno(), err=err.fileno(), prepare=prepare))
        said = [file.seek(0) or file.read() for file in (out, err)]
    return subprocess.CompletedProcess(words, code, *said)


def wait_until_it_trains(process, out) -> None:
    """Until a run into this folder, which may have been taken up, has noted the time of a step."""
    times = out / "times.jsonl"
    before = times.stat().st_size if times.exists() else 0
    until = time.monotonic() + PATIENCE
    while process.is_alive() and (not times.exists() or times.stat().st_size == before):
        assert time.monotonic() < until, "it does not begin to train"
        time.sleep(0.001)


def train_command(task: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "hasten", "train", f"rank_tasks.py:{task}", "--processes", "2", *more]


def jobs_left() -> list[str]:
    """Command lines of ranks that this test has started and that still run."""
    found, ours = (
        [],
        f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST'].split(' (')[0]}".encode(),
    )  # inherited by what a test starts
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            about = (process / "environ").read_bytes()
        except OSError:
            continue
        if b"HASTEN_PARENT=" in about and ours in about and "rank_tasks" in line:
            found.append(line)
    return found


class Job:
    """As what a test has forked."""

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
