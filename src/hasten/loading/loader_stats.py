"""Measures batches and steps while a run trains: how long steps wait for batches, and how long both take together."""

from dataclasses import dataclass
from statistics import fmean, median

import torch

from hasten.core.data import WorkerConfig
from hasten.core.types import Batch
from hasten.utils.batch import batch_tensors

MIN_BATCHES, MIN_SECONDS = 4, 0.3  # of a measurement
BATCHES_PER_WORKER = 2  # in a measurement: batches of one worker arrive in bursts
WARMUP_BATCHES = 1  # batches without meaning after a change of workers or epoch, besides the first of each worker


@dataclass(frozen=True)
class LoaderStats:
    """Wait, step time and size of several consecutive batches that one worker configuration computed."""

    wait_s: float  # mean seconds that a step waited for its batch
    step_s: float  # median seconds between receiving a batch and requesting the next one; evaluations do not change it
    size: int = 0  # bytes of the largest batch

    @property
    def seconds_per_batch(self) -> float:
        """Seconds per batch: waiting for it plus the step that uses it."""
        return self.wait_s + self.step_s

    @property
    def wait_fraction(self) -> float:
        """Fraction of the time, from 0 to 1, that steps wait for batches."""
        return self.wait_s / self.seconds_per_batch if self.seconds_per_batch else 0.0


class LoaderProfiler:
    """Records batches and steps until there are enough for ``LoaderStats``, over several epochs if these are short."""

    def __init__(self, workers: WorkerConfig) -> None:
        self.workers = workers
        self._min_batches = max(MIN_BATCHES, BATCHES_PER_WORKER * workers.num_workers)
        self._waits: list[float] = []
        self._steps: list[float] = []
        self._size, self._seconds, self._wait = 0, 0.0, 0.0
        self._skip, self._steps_before = 0, -1

    def on_enter(self) -> None:
        """Call it when an epoch or new workers start: skips warm-up batches, unless all of the last were skipped."""
        recorded_none = self._steps_before == len(self._steps)
        self._skip = 0 if recorded_none else WARMUP_BATCHES + self.workers.num_workers
        self._steps_before = len(self._steps)

    def on_batch(self, wait_s: float, batch: Batch) -> None:
        self._wait = wait_s
        self._size = max(self._size, sum(tensor.nbytes for tensor in batch_tensors(batch)))

    def on_step(self, seconds: float) -> bool:
        """Records the seconds of a step; returns whether there are enough measurements for ``stats``."""
        if self._skip:
            self._skip -= 1
            return False
        self._waits.append(self._wait)
        self._steps.append(seconds)
        self._seconds += self._wait + seconds
        return len(self._steps) >= self._min_batches and self._seconds >= MIN_SECONDS

    def stats(self) -> LoaderStats:
        return LoaderStats(fmean(self._waits), median(self._steps), self._size)


def record_cuda_event() -> torch.cuda.Event | None:
    """Records an event behind all work queued on the GPU so far; None if no GPU is in use."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream())
    return event


def gpu_is_busy(event: torch.cuda.Event | None) -> bool:
    """Whether the GPU has not reached ``event``: it was busy while the host waited. False for None."""
    return event is not None and not event.query()
