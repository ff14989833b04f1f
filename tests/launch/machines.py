"""Machines for tests: network namespaces, joined by a cable (veth), whose speed can be limited (tbf)."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

NAMES = tuple(f"hasten-{os.getpid()}-{letter}" for letter in "ab")  # others may be testing, too
ADDRESSES = ("10.77.0.1", "10.77.0.2")


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
    """Two namespaces that reach each other at ADDRESSES."""
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", "hasten-a0", "netns", NAMES[0], "type", "veth", "peer", "name", "hasten-b0", "netns", NAMES[1])
        for name, address, end in zip(NAMES, ADDRESSES, ("hasten-a0", "hasten-b0"), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")
            if megabits:
                limit = ["rate", f"{megabits}mbit", "burst", "32kb", "latency", "100ms"]
                subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf", *limit], check=True)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def begun_on(machine: int, *words: str, cwd) -> subprocess.Popen:
    """``hasten launch --nodes 2 ...`` on one of the machines."""
    launch = [
        sys.executable,
        "-m",
        "hasten",
        "launch",
        "--processes",
        "1",
        "--nodes",
        "2",
        "--rendezvous",
        f"{ADDRESSES[0]}:29531",
        "--quiet",
        "--",
    ]
    command = ["ip", "netns", "exec", NAMES[machine], *launch, *words]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
