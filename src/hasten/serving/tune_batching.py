"""``--tune-batching``: the largest batch that still pays and the time to wait for it, measured with the model."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from hasten.deploy.signature import Signature
from hasten.serving.inputs import zero_inputs

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAYS = 1.05  # ratio of the samples per second of two sizes, below which the larger one does not pay
SECONDS = 0.15  # for each size
MAX_WAIT_S = 0.01


@dataclass(frozen=True)
class BatchRate:
    """Seconds of a batch of ``size`` samples."""

    size: int
    seconds: float


def measure_batches(compute: Callable[[tuple[numpy.ndarray, ...]], object], signature: Signature) -> list[BatchRate]:
    """The median time of batches of each size, of zeros."""
    rates = []
    for size in SIZES:
        inputs = zero_inputs(signature, size, free=16)
        compute(inputs)
        times, began = list[float](), time.perf_counter()
        while len(times) < 5 or time.perf_counter() - began < SECONDS:
            start = time.perf_counter()
            compute(inputs)
            times.append(time.perf_counter() - start)
        rates.append(BatchRate(size, sorted(times)[len(times) // 2]))
    return rates


def best_batching(rates: list[BatchRate]) -> tuple[int, float]:
    """(max_batch, max_wait): the smallest size from which no larger one pays, and half of the seconds of its batch.

    While one batch is computed the next one collects, so that a long wait helps only at the start of a burst.
    """
    best = rates[0]
    for rate in rates[1:]:
        if rate.size / rate.seconds > PAYS * best.size / best.seconds:
            best = rate
    return best.size, min(MAX_WAIT_S, best.seconds / 2)
