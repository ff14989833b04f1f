"""Peak memory of the processes of a run, and what follows from it: do two runs fit together, how large may a batch be?

On a GPU it is what PyTorch's allocator has handed out ("allocated") and what it holds ("reserved"), on the CPU the
resident set of the process ("resident"), without that of its loader workers. The decisions are functions of the
figures alone.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from hasten.core.process_group_info import ProcessGroupInfo
from hasten.engine.resources import free_memory, peak_memory

USABLE = 0.95  # of the memory of a device: the rest is for contexts and for what the allocator cannot use
RESET_PEAK = "5"  # proc_pid_clear_refs(5)

MemoryPeak = dict[str, Any]  # bytes by name and, as "device", the name of the device, of one rank


def reset_peak_memory(device: torch.device) -> None:
    """Resets the peaks of GPU and host memory of this process to what it holds now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # not Linux, or not allowed: the peak of the whole process remains
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def memory_peak(device: torch.device) -> MemoryPeak:
    """Bytes of this process: the peak as "resident" (CPU), or "allocated" and "reserved" (GPU).

    "current" is what it holds now, "available" what it holds or could still get on the device; "device" names that.
    """
    if device.type != "cuda":
        held = psutil.Process().memory_info().rss
        return {"device": "cpu", "resident": peak_memory(), "current": held, "available": held + free_memory()}
    free, _ = torch.cuda.mem_get_info(device)
    return {
        "device": f"cuda:{device.index or 0}",
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "current": torch.cuda.memory_allocated(device),
        "available": torch.cuda.memory_reserved(device) + free,
    }


def memory_peaks(ranks: ProcessGroupInfo, device: torch.device) -> list[MemoryPeak]:
    """``memory_peak`` of all ranks. All ranks must call it."""
    return ranks.all_gather(memory_peak(device))


def held_bytes(peak: MemoryPeak) -> int:
    """The bytes that the process of ``peak`` held at its peak: reserved on a GPU, resident on the CPU."""
    return peak["reserved"] if "reserved" in peak else peak["resident"]


def fit_together(*runs: Sequence[MemoryPeak]) -> bool:
    """Whether all processes of all ``runs`` (each the peaks of its ranks) fit into 95 % of every device at once."""
    needed, available = Counter[str](), Counter[str]()
    for run in runs:
        free = Counter[str]()  # by this run's account; the others may have been there already
        for peak in run:
            needed[peak["device"]] += held_bytes(peak)
            free[peak["device"]] += peak["available"]
        available |= free  # the larger of both
    return all(size <= USABLE * available[device] for device, size in needed.items())


def largest_batch(batch_size: int, peaks: Sequence[MemoryPeak]) -> int | None:
    """Estimates the largest batch that fits, from the peaks of a run with another ``batch_size``, read between steps.

    What a step needs beyond the memory between steps (weights, optimizer) is taken as proportional to the batch. A part
    of it is not, so the true limit is rather higher. None on the CPU, where freed memory may stay resident.
    """
    if any("allocated" not in peak for peak in peaks) or not batch_size:
        return None
    share = batch_size / len(peaks)  # of a rank
    limits: list[float] = []
    for peak in peaks:
        per_sample = max(1.0, (peak["allocated"] - peak["current"]) / share)
        limits.append((USABLE * peak["available"] - peak["current"]) / per_sample)
    return max(batch_size, int(min(limits) * len(peaks)))  # the one that ran does fit
