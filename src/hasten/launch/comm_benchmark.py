"""How fast the ranks of a job talk: latency and bandwidth of each collective, by size.

Times are those of the slowest rank, over several rounds in which the collectives and their sizes take turns. From them two numbers
follow for each collective, the latency and the bandwidth of the usual model, seconds = latency + bytes / bandwidth (Hockney 1994), fitted to the relative
error, so that small messages count as much as large ones. The bandwidth is the rate at which a rank's own bytes are dealt with; on the
wire an all-reduce by ring moves 2 (n - 1) / n of them (Patarasuk and Yuan 2009).
Gloo's own all-reduce is a ring, NCCL chooses; beside it stands a reduction to rank 0 with a broadcast from there, both along trees.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from hasten.core.errors import ConfigurationError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S, ProcessGroupInfo
from hasten.core.progress import ProgressCallback, no_progress
from hasten.distributed.process_group import init_process_group
from hasten.engine.devices import pick_device
from hasten.engine.train import device_of

SIZES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)  # bytes that each rank gives
ROUNDS = 5
SECONDS = 0.05  # of a reading, at least
TOO_LONG = 0.5  # seconds of a call, after which no larger one is tried
MOST = 1000  # calls of one


def bench_comm(
    device: str | None = None,
    sizes: tuple[int, ...] = SIZES,
    watch: ProgressCallback = no_progress,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> dict:
    """Measures the collectives among the ranks of the job that this process is in.

    Returns:
        processes, nodes, backend, collectives: name -> {"latency": seconds, "bandwidth": bytes/s, "sizes": [{"bytes", "seconds": {"median",
        "low", "high"}}]}, where low and high are the fastest and the slowest of the rounds. On a slow network the largest sizes are left out.

    Raises:
        Refusal: this process is alone.
    """
    device = pick_device(device)
    with init_process_group(device, timeout) as ranks:
        if ranks.is_single_process:
            raise ConfigurationError("one process has nobody to talk to; say --processes 2, or more")
        device_of(ranks, device)  # or one without a GPU of its own is refused
        return _measured(ranks, measure_link(ranks), sizes, watch)


def measure_link(ranks: ProcessGroupInfo) -> torch.device:
    """Where tensors have to be to be sent."""
    return torch.device("cuda", ranks.local_rank) if dist.get_backend() != "gloo" else torch.device("cpu")


def _measured(ranks: ProcessGroupInfo, device: torch.device, sizes: tuple[int, ...], watch: ProgressCallback) -> dict:
    calls, repeats = {}, {}
    for name, make in COLLECTIVES.items():
        for size in sizes:
            call = make(size, ranks, device)
            call()
            once = seconds_of(call, 1, ranks, device)
            calls[name, size], repeats[name, size] = call, min(MOST, max(1, round(SECONDS / once)))
            if once > TOO_LONG:
                break
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for number in range(ROUNDS):
        watch("talking", number / ROUNDS, None)
        for key, call in calls.items():
            taken[key].append(seconds_of(call, repeats[key], ranks, device))
    found = {}
    for name in COLLECTIVES:
        rows = [(size, seconds) for (of, size), seconds in taken.items() if of == name]
        latency, bandwidth = fit_alpha_beta([(size, median(seconds)) for size, seconds in rows])
        readings = [
            {"bytes": size, "seconds": {"median": median(s), "low": min(s), "high": max(s)}} for size, s in rows
        ]
        found[name] = {"latency": latency, "bandwidth": bandwidth, "sizes": readings}
    nodes = ranks.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    return {
        "processes": ranks.world_size,
        "nodes": nodes,
        "backend": dist.get_backend(),
        "device": str(device),
        "collectives": found,
    }


def fit_alpha_beta(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(latency in seconds, bandwidth in bytes/s) by least squares of the relative error."""
    sizes = torch.tensor([size for size, _ in points], dtype=torch.float64)
    seconds = torch.tensor([taken for _, taken in points], dtype=torch.float64)
    columns = torch.stack([1 / seconds, sizes / seconds], dim=1)
    latency, a_byte = (
        torch.linalg.lstsq(columns, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten().tolist()
    )
    return max(latency, 0.0), 1 / max(a_byte, 1e-15)


def neighbor_latency(size: int, ranks: ProcessGroupInfo, device: torch.device) -> list[float]:
    """Seconds that so many bytes take from each rank to the next one, and from the last to the first: one pair after the other."""
    given = _given(size, ranks, device)

    def call(sender: int) -> None:
        receiver = (sender + 1) % ranks.world_size
        if ranks.rank == sender:
            dist.send(given, receiver)
        elif ranks.rank == receiver:
            dist.recv(given, sender)

    pairs = range(ranks.world_size)
    rounds = [[seconds_of(partial(call, sender), 1, ranks, device) for sender in pairs] for _ in range(ROUNDS)]
    return [median(times) for times in zip(*rounds, strict=True)]


def seconds_of(call: Callable[[], None], repeats: int, ranks: ProcessGroupInfo, device: torch.device) -> float:
    """Of one call, on the slowest rank."""
    ranks.any(False)  # all begin together
    began = perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return ranks.all_reduce_max([(perf_counter() - began) / repeats])[0]


def _given(size: int, ranks: ProcessGroupInfo, device: torch.device) -> torch.Tensor:
    """So many bytes of float32, rounded up to a whole number of parts."""
    return torch.ones(-(-size // (4 * ranks.world_size)) * ranks.world_size, device=device)


def _all_reduce(size: int, ranks: ProcessGroupInfo, device: torch.device) -> Callable[[], None]:
    given = _given(size, ranks, device)
    return lambda: dist.all_reduce(given, dist.ReduceOp.MAX)


def _reduce_and_broadcast(size: int, ranks: ProcessGroupInfo, device: torch.device) -> Callable[[], None]:
    given = _given(size, ranks, device)

    def call() -> None:
        dist.reduce(given, 0, dist.ReduceOp.MAX)
        dist.broadcast(given, 0)

    return call


def _reduce_scatter(size: int, ranks: ProcessGroupInfo, device: torch.device) -> Callable[[], None]:
    given = _given(size, ranks, device)
    part = torch.empty(len(given) // ranks.world_size, device=device)
    return lambda: dist.reduce_scatter_tensor(part, given, dist.ReduceOp.MAX)


def _all_gather(size: int, ranks: ProcessGroupInfo, device: torch.device) -> Callable[[], None]:
    whole = _given(size, ranks, device)
    part = torch.ones(len(whole) // ranks.world_size, device=device)
    return lambda: dist.all_gather_into_tensor(whole, part)


def _all_to_all(size: int, ranks: ProcessGroupInfo, device: torch.device) -> Callable[[], None]:
    given = _given(size, ranks, device)
    came = torch.empty_like(given)
    return lambda: dist.all_to_all_single(came, given)


COLLECTIVES = {
    "all-reduce": _all_reduce,
    "all-reduce by tree": _reduce_and_broadcast,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
}
