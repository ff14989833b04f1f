"""How much memory a process may fill: what the machine has free, what its container allows, and what the other ranks want too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
FILES = {  # where control groups tell their limit, use, and statistics: of version 1, and of version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def free_memory() -> int:
    """Bytes that this process may still take: its part, where LOCAL_WORLD_SIZE tells that several ranks share the machine.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html beside it.
    """
    free = min([psutil.virtual_memory().available, *_left()])
    return max(0, free) // _ranks()


def _ranks() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdecimal() else 1


def _left() -> Iterator[int]:
    """What is left in each control group that this process is in; the system takes back what it keeps of files."""
    for controller, folder in _memberships():
        limit, use, kept = FILES[controller]
        top = GROUPS / controller
        inside = top / folder.lstrip("/")
        for group in (inside, *inside.parents):
            if group.is_relative_to(top):
                try:
                    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    taken = int((group / use).read_text()) - sum(int(statistics[name]) for name in kept)
                    yield int((group / limit).read_text()) - taken
                except (OSError, ValueError, KeyError):
                    continue  # no such group is seen from here, or it has no limit ("max")


def _memberships() -> Iterator[tuple[str, str]]:
    """(controller, group) of this process; the controller is empty in version 2."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, folder = line.split(":", 2)
        for controller in FILES:
            if controller in controllers.split(","):
                yield controller, folder
