"""What a process may fill and keep busy: the machine, less what its container allows and what the other ranks want too.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html and scheduler/sched-bwc.html beside it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from hasten.core.errors import HastenWarning
from hasten.engine.environment import cores

OUR_THREADS = "HASTEN_THREADS"  # the environment's name for OMP_NUM_THREADS where we have said it, and not the user
MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
FILES = {  # where control groups tell their limit, use, and statistics: of version 1, and of version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def free_memory() -> int:
    """Bytes that this process may still take: its part, where LOCAL_WORLD_SIZE tells that several ranks share the machine."""
    free = min([psutil.virtual_memory().available, *_left()])
    return max(0, free) // _ranks()


def available_cpus() -> int:
    """Processors that this process may keep busy: its part of them, as with the memory; at least one."""
    return max(1, math.floor(min([cores(), *_quotas()])) // _ranks())


def warn_oversubscribed(processes: int) -> None:
    """Says so where a machine has fewer cores than a job has processes on it."""
    if processes > (there := available_cpus()):
        warnings.warn(f"{processes} processes share {there} cores: they take turns", HastenWarning, stacklevel=3)


def single_process_threads() -> int:
    """Threads that this process would have if it trained alone: as many as the user says, or all cores; torch asks no control group."""
    return cores() if OUR_THREADS in os.environ else torch.get_num_threads()


def _ranks() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdecimal() else 1


def _left() -> Iterator[int]:
    """What is left in each control group that this process is in; the system takes back what it keeps of files."""
    for controller, group in _groups("memory"):
        limit, use, kept = FILES[controller]
        try:
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken = int((group / use).read_text()) - sum(int(statistics[name]) for name in kept)
            yield int((group / limit).read_text()) - taken
        except (OSError, ValueError, KeyError):
            continue  # no such group is seen from here, or it has no limit ("max")


def _quotas() -> Iterator[float]:
    """Processors' worth of time that each control group may use."""
    for controller, group in _groups("cpu"):
        try:
            if controller:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:
                quota, period = map(int, (group / "cpu.max").read_text().split())
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            yield max(1.0, quota / period)


def _groups(controller: str) -> Iterator[tuple[str, Path]]:
    """(controller, folder) of the groups that this process is in, and of those around them; the controller is empty in version 2."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, folder = line.split(":", 2)
        for name in {controller, ""}.intersection(controllers.split(",")):
            top = GROUPS / name
            inside = top / folder.lstrip("/")
            yield from ((name, group) for group in (inside, *inside.parents) if group.is_relative_to(top))
