"""Two nodes for tests: network namespaces joined by a veth pair, with limited bandwidth (tbf) or disconnected."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import cache

NAMES = tuple(f"hasten-{os.getpid()}-{letter}" for letter in "ab")  # unique, for parallel tests
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ENDS = tuple(f"ha{os.getpid()}{letter}" for letter in "ab")  # of the veth pair


@cache
def missing() -> str | None:
    """Why network namespaces cannot be used here; None if they can."""
    if not shutil.which("ip"):
        return "iproute2 is not installed: no network namespaces"
    try:
        with two_nodes():
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"


@contextmanager
def two_nodes(megabits: int | None = None):
    """Creates two namespaces that reach each other at ADDRESSES; kills their processes at the end."""
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
        for node, name in enumerate(NAMES):
            lose(node)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_on(node: int, *argv: str, cwd, launch: tuple[str, ...] = ("--nnodes", "2")) -> subprocess.Popen:
    """Starts ``hasten launch --nnodes 2 ... -- ARGV`` on one of the nodes."""
    options = ["--rdzv-endpoint", f"{ADDRESSES[0]}:29531", "--nproc-per-node", "1", "--quiet"]
    command = [
        "ip",
        "netns",
        "exec",
        NAMES[node],
        sys.executable,
        "-m",
        "hasten",
        "launch",
        *options,
        *launch,
        "--",
        *argv,
    ]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def processes_on(node: int) -> list[int]:
    """Process IDs on a node."""
    return [
        int(pid)
        for pid in subprocess.run(["ip", "netns", "pids", NAMES[node]], capture_output=True, text=True).stdout.split()
    ]


def lose(node: int) -> None:
    """Kills all processes of a node at once, as a power cut does, except that their connections are closed."""
    for pid in processes_on(node):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def disconnect() -> None:
    _ip("-n", NAMES[0], "link", "set", ENDS[0], "down")


def reconnect() -> None:
    _ip("-n", NAMES[0], "link", "set", ENDS[0], "up")


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def run_on_both(directory, *argv: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of the command on each node."""
    jobs = [start_on(node, *argv, cwd=directory) for node in (0, 1)]
    try:
        outputs = [job.communicate(timeout=150) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, *texts) for job, texts in zip(jobs, outputs, strict=True)]
