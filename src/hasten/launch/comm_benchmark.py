"""Latency and bandwidth of each collective between the ranks of a job, by message size (``hasten bench-comm``).

A time is that of the slowest rank, over several rounds that interleave the collectives and their sizes. Two numbers
summarize each collective: latency and bandwidth of the alpha-beta model, seconds = latency + bytes / bandwidth (Hockney
1994), fitted to the relative error, so that small messages count as much as large ones. The bandwidth refers to the
bytes that each rank contributes; a ring all-reduce moves 2 (n - 1) / n of them over the wire (Patarasuk and Yuan 2009).
Gloo's all-reduce is a ring, NCCL chooses; the all-reduce by tree is a reduction to rank 0 and a broadcast from there.
"""

import os
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hasten.core.errors import ConfigurationError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S, ProcessGroupInfo
from hasten.core.progress import ProgressCallback, no_progress
from hasten.distributed.process_group import init_process_group
from hasten.engine.devices import pick_device
from hasten.engine.train import device_of

SIZES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)  # bytes that each rank contributes
ROUNDS = 5
MIN_SAMPLE_S = 0.05  # a timed sample repeats the call until it takes about this long
MAX_CALL_S = 0.5  # after a call that takes longer, no larger size is tried
MAX_CALLS = 1000  # per sample

Call: TypeAlias = Callable[[], object]

# torch 2.13 deprecates the older names
all_gather_single: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def bench_comm(
    device: str | None = None,
    sizes: tuple[int, ...] = SIZES,
    on_progress: ProgressCallback = no_progress,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Measures the collectives among the ranks of the job that this process belongs to. All ranks must call it.

    Returns:
        processes, nodes, backend, device, and collectives: name -> {"latency": seconds, "bandwidth": bytes/s, "sizes":
        [{"bytes", "seconds": {"median", "low", "high"}}]}; low and high are the fastest and the slowest round. Sizes
        (bytes that each rank contributes) that would take long on a slow network are missing.

    Raises:
        ConfigurationError: there is only one process.
    """
    device = pick_device(device)
    with init_process_group(device, timeout) as ranks:
        if ranks.is_single_process:
            raise ConfigurationError("bench-comm needs 2 processes or more; pass --processes N with N >= 2")
        own = torch.device(device_of(ranks, device))
        return _measure(ranks, communication_device(own), sizes, on_progress)


def communication_device(own: torch.device) -> torch.device:
    """The device from which the default process group sends tensors: the CPU for gloo, else ``own``, this rank's."""
    return own if dist.get_backend() != "gloo" else torch.device("cpu")


def _measure(
    ranks: ProcessGroupInfo, device: torch.device, sizes: tuple[int, ...], on_progress: ProgressCallback
) -> dict[str, Any]:
    calls: dict[tuple[str, int], tuple[Call, int]] = {}  # (collective, size) -> (call, repeats)
    slow: set[str] = set()
    for size in sizes:
        for name, call in _collectives(size, ranks, device).items():
            if name in slow:
                continue
            call()
            seconds = seconds_per_call(call, 1, ranks, device)
            calls[name, size] = call, min(MAX_CALLS, max(1, round(MIN_SAMPLE_S / seconds)))
            slow |= {name} if seconds > MAX_CALL_S else set()
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for index in range(ROUNDS):
        on_progress("communicating", index / ROUNDS, None)
        for key, (call, repeats) in calls.items():
            times[key].append(seconds_per_call(call, repeats, ranks, device))
    return {
        "processes": ranks.world_size,
        "nodes": ranks.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)),
        "backend": dist.get_backend(),
        "device": str(device),
        "collectives": {
            name: _summary({size: samples for (other, size), samples in times.items() if other == name})
            for name in dict.fromkeys(name for name, _ in calls)
        },
    }


def _summary(times: dict[int, list[float]]) -> dict[str, Any]:
    """Latency, bandwidth and times of one collective, from the seconds of each round by size."""
    ranges = {size: {"median": median(each), "low": min(each), "high": max(each)} for size, each in times.items()}
    latency, bandwidth = fit_alpha_beta([(size, seconds["median"]) for size, seconds in ranges.items()])
    rows = [{"bytes": size, "seconds": seconds} for size, seconds in ranges.items()]
    return {"latency": latency, "bandwidth": bandwidth, "sizes": rows}


def fit_alpha_beta(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(latency in seconds, bandwidth in bytes/s) of (bytes, seconds) points: least squares of the relative error."""
    sizes = torch.tensor([size for size, _ in points], dtype=torch.float64)
    seconds = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
    columns = torch.stack([1 / seconds, sizes / seconds], dim=1)
    ones = torch.ones(len(points), 1, dtype=torch.float64)
    latency, seconds_per_byte = torch.linalg.lstsq(columns, ones).solution.flatten().tolist()
    return max(latency, 0.0), 1 / max(seconds_per_byte, 1e-15)


def neighbor_latency(size: int, ranks: ProcessGroupInfo, device: torch.device) -> list[float]:
    """Seconds to send ``size`` bytes from each rank to the next (last to 0), one pair at a time; one per rank."""
    tensor = _tensor(size, ranks, device)

    def send(sender: int) -> None:
        receiver = (sender + 1) % ranks.world_size
        if ranks.rank == sender:
            dist.send(tensor, receiver)
        elif ranks.rank == receiver:
            dist.recv(tensor, sender)

    senders = range(ranks.world_size)
    rounds = [[seconds_per_call(partial(send, rank), 1, ranks, device) for rank in senders] for _ in range(ROUNDS)]
    return [median(times) for times in zip(*rounds, strict=True)]


def seconds_per_call(call: Call, repeats: int, ranks: ProcessGroupInfo, device: torch.device) -> float:
    """Seconds of one call on the slowest rank, averaged over ``repeats`` calls."""
    ranks.any(False)  # all ranks begin together
    began = perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return ranks.all_reduce_max([(perf_counter() - began) / repeats])[0]


def _tensor(size: int, ranks: ProcessGroupInfo, device: torch.device) -> torch.Tensor:
    """``size`` bytes of float32 ones, rounded up to a multiple of the world size."""
    return torch.ones(-(-size // (4 * ranks.world_size)) * ranks.world_size, device=device)


def _collectives(size: int, ranks: ProcessGroupInfo, device: torch.device) -> dict[str, Call]:
    """Name -> a call of each collective in which this rank contributes ``size`` bytes."""
    tensor = _tensor(size, ranks, device)
    received, shard = torch.empty_like(tensor), tensor[: len(tensor) // ranks.world_size].clone()
    return {
        "all-reduce": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
        "all-reduce by tree": lambda: (dist.reduce(tensor, 0, dist.ReduceOp.MAX), dist.broadcast(tensor, 0)),
        "reduce-scatter": lambda: reduce_scatter_single(shard, tensor, dist.ReduceOp.MAX),
        "all-gather": lambda: all_gather_single(received, shard),
        "all-to-all": lambda: dist.all_to_all_single(received, tensor),
    }
