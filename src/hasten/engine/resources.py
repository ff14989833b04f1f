"""Memory and CPUs that this process may use: those of the machine and its control groups, divided by local ranks.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, cgroup-v1/memory.html and scheduler/sched-bwc.html.
"""

import math
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from hasten.core.errors import HastenWarning
from hasten.engine.environment import cores

OUR_THREADS = "HASTEN_THREADS"  # set where the launcher, not the user, set OMP_NUM_THREADS
MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
HARDWARE_THREADS = Path("/sys/devices/system/cpu/smt/active")  # whether cores compute with two of them
MEMORY_FILES = {  # limit, usage, and the statistics of reclaimable file cache: of version 1, and of version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def free_memory() -> int:
    """Bytes of host memory that this process may still allocate; an equal share for each of LOCAL_WORLD_SIZE ranks."""
    return max(0, min([psutil.virtual_memory().available, *_free_in_groups()])) // local_world_size()


def peak_memory() -> int:
    """The most bytes of host memory resident in this process so far; ``getrusage`` includes those of its parent."""
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(peak.group(1)) if peak else psutil.Process().memory_info().rss


def available_cpus() -> int:
    """CPUs that this process may keep busy; an equal share for each of LOCAL_WORLD_SIZE ranks, at least 1."""
    return max(1, math.floor(min([cores(), *_cpu_quotas()])) // local_world_size())


def has_idle_cores() -> bool:
    """Whether PyTorch computes with fewer threads than ``available_cores``, and no other rank may need them."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    is_shared = ranks > 1 and "LOCAL_WORLD_SIZE" not in os.environ
    return torch.get_num_threads() < available_cores() and not is_shared


def available_cores() -> int:
    """As ``available_cpus``, but the two hardware threads of a core count once, as in PyTorch's number of threads.

    Where the system does not say whether a core has two, it is taken to have them.
    """
    try:
        hardware_threads = 2 if HARDWARE_THREADS.read_text().strip() == "1" else 1
    except OSError:
        hardware_threads = 2
    return max(1, math.floor(min([cores() / hardware_threads, *_cpu_quotas()])) // local_world_size())


def warn_oversubscribed(processes: int) -> None:
    """Warns if a machine has fewer CPUs than a job has processes on it."""
    if processes > (cpus := available_cpus()):
        warnings.warn(f"{processes} processes share {cpus} cores: they take turns", HastenWarning, stacklevel=3)


def single_process_threads() -> int:
    """Threads for one process: all its CPUs if hasten had limited them for ranks, else torch's present number."""
    return cores() if OUR_THREADS in os.environ else torch.get_num_threads()


def local_world_size() -> int:
    """Number of ranks on this machine, by LOCAL_WORLD_SIZE; 1 without it."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdecimal() else 1


def _free_in_groups() -> Iterator[int]:
    """Bytes left below the memory limit of each control group of this process; file cache counts as free."""
    for controller, group in _control_groups("memory"):
        limit, usage, reclaimable = MEMORY_FILES[controller]
        try:
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / usage).read_text()) - sum(int(statistics[name]) for name in reclaimable)
            yield int((group / limit).read_text()) - used
        except (OSError, ValueError, KeyError):
            continue  # the group is not visible, or has no limit ("max")


def _cpu_quotas() -> Iterator[float]:
    """Yields the CPU quota of each control group that limits this process, in CPUs."""
    for controller, group in _control_groups("cpu"):
        try:
            if controller:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:
                quota, period = map(int, (group / "cpu.max").read_text().split())
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            yield max(1.0, quota / period)


def _control_groups(controller: str) -> Iterator[tuple[str, Path]]:
    """(controller, directory) of this process's control groups and their ancestors; version 2 has controller ""."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, directory = line.split(":", 2)
        for name in {controller, ""}.intersection(controllers.split(",")):
            root = GROUPS / name
            group = root / directory.lstrip("/")
            yield from ((name, path) for path in (group, *group.parents) if path.is_relative_to(root))
