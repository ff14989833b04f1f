"""Machines for tests: network namespaces, joined by a cable (veth), whose speed can be limited (tbf), which can be cut, and which can be lost."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import cache

NAMES = tuple(f"hasten-{os.getpid()}-{letter}" for letter in "ab")  # others may be testing, too
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ENDS = tuple(f"ha{os.getpid()}{letter}" for letter in "ab")  # of the cable


@cache
def missing() -> str | None:
    """Why there can be no such machines here."""
    if not shutil.which("ip"):
        return "iproute2 is not installed: no network namespaces"
    try:
        with two_machines():
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"


@contextmanager
def two_machines(megabits: int | None = None):
    """Two namespaces that reach each other at ADDRESSES; what still runs there ends with them."""
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", ENDS[0], "netns", NAMES[0], "type", "veth", "peer", "name", ENDS[1], "netns", NAMES[1])
        for name, address, end in zip(NAMES, ADDRESSES, ENDS, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")
            if megabits:
                limit = ["rate", f"{megabits}mbit", "burst", "32kb", "latency", "100ms"]
                subprocess.run(
                    ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf", *limit], check=True
                )
        yield
    finally:
        for machine, name in enumerate(NAMES):
            lose(machine)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def begun_on(machine: int, *words: str, cwd, launch: tuple[str, ...] = ("--nnodes", "2")) -> subprocess.Popen:
    """``hasten launch --nnodes 2 ...`` on one of the machines."""
    meeting = ["--rdzv-endpoint", f"{ADDRESSES[0]}:29531", "--nproc-per-node", "1", "--quiet"]
    command = [
        "ip",
        "netns",
        "exec",
        NAMES[machine],
        sys.executable,
        "-m",
        "hasten",
        "launch",
        *meeting,
        *launch,
        "--",
        *words,
    ]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def processes_on(machine: int) -> list[int]:
    """All that run there."""
    return [
        int(pid)
        for pid in subprocess.run(
            ["ip", "netns", "pids", NAMES[machine]], capture_output=True, text=True
        ).stdout.split()
    ]


def lose(machine: int) -> None:
    """Ends all that runs there at once, as a power cut does, except that the connections are closed."""
    for pid in processes_on(machine):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut_the_cable() -> None:
    _ip("-n", NAMES[0], "link", "set", ENDS[0], "down")


def mend_the_cable() -> None:
    _ip("-n", NAMES[0], "link", "set", ENDS[0], "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def on_both(folder, *words: str) -> list[tuple[int, str, str]]:
    """(exit code, answer, what was said) of the command on each machine."""
    jobs = [begun_on(machine, *words, cwd=folder) for machine in (0, 1)]
    try:
        said = [job.communicate(timeout=150) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, *texts) for job, texts in zip(jobs, said, strict=True)]
