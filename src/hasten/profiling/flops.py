"""Floating-point operations of a training step, and the peak rate that the machine reaches in a matrix product."""

import math
import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from hasten.engine.devices import synchronize
from hasten.engine.plan import Program
from hasten.utils.batch import batch_size

PEAK_SECONDS = 0.3
FORMATS = ("bfloat16", "float16")
COPY_BYTES = {"cpu": 2**26, "cuda": 2**29}  # beyond the caches
PEAK_LENGTHS = {"cpu": (256, 512, 1024), "cuda": (1024, 4096, 8192)}  # growing: a format without hardware stops early


def flops_per_sample(program: Program) -> float:
    """Floating-point operations (matrix products, convolutions, attention) of forward and backward per sample.

    Runs one batch without an update. The program must have no methods: a compiled or captured step hides operations.
    """
    batch = program.to_device(next(iter(program.train.epoch(0, 0))))
    with FlopCounterMode(display=False) as counter:
        program.forward_backward(batch)
    program.zero_grad()
    return counter.get_total_flops() / batch_size(batch)


@cache
def peak_flops(device: str, dtype: torch.dtype) -> float:
    """The best rate of a square matrix product with all threads, in operations per second."""
    best, began = 0.0, time.perf_counter()
    for length in PEAK_LENGTHS[torch.device(device).type]:
        # random numbers: a GPU that multiplies ones draws less power, and clocks higher than in any training
        a, b = (torch.randn(length, length, device=device).to(dtype) for _ in range(2))
        best = max(best, 2 * length**3 / fastest_call(partial(torch.mm, a, b), a.device))
        if time.perf_counter() - began > 2 * PEAK_SECONDS:
            break
    return best


def best_format(device: str, facts: frozenset[str]) -> tuple[str, float]:
    """(number format with the highest peak, that peak) among float32 and those that the hardware has units for."""
    formats = ["float32", *(name for name in FORMATS if f"{name}_hardware" in facts)]
    return max(((name, peak_flops(device, getattr(torch, name))) for name in formats), key=lambda entry: entry[1])


@cache
def copy_bytes_per_second(device: str) -> float:
    """The best rate of copying within the memory of a device, bytes read and written."""
    source = torch.zeros(COPY_BYTES[torch.device(device).type], dtype=torch.uint8, device=device)
    return 2 * source.nbytes / fastest_call(partial(source.clone().copy_, source), source.device)


def fastest_call(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest call of ``work``, which is called for a third of PEAK_SECONDS, and at least once."""
    best, end = math.inf, time.perf_counter() + PEAK_SECONDS / 3
    while best == math.inf or time.perf_counter() < end:
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
