"""What can be seen of batches and steps while a run goes on: who waits for whom, and how long both take together."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

import torch

from hasten.core.data import WorkerConfig
from hasten.utils.batch import batch_tensors

MIN_BATCHES, MIN_SECONDS = 4, 0.3  # of a look
BATCHES_PER_WORKER = 2  # batches of each worker in a look: they come in bursts
WARMUP_BATCHES = 1  # batches that say little, beside the first of each worker, where a crew or a pass begins


@dataclass(frozen=True)
class LoaderStats:
    """What was seen of a crew over some batches in a row.

    Attributes:
        waited: seconds that a step waited for its batch, on average.
        step: seconds between getting a batch and asking for the next, the median: an evaluation in between is nobody's fault.
        size: bytes of the largest batch.
    """

    wait_s: float
    step_s: float
    size: int = 0

    @property
    def seconds_per_batch(self) -> float:
        """Seconds a batch, its step included."""
        return self.wait_s + self.step_s

    @property
    def wait_fraction(self) -> float:
        """Of the time that is spent waiting."""
        return self.wait_s / self.seconds_per_batch if self.seconds_per_batch else 0.0


class LoaderProfiler:
    """Notes batches and steps of a crew until there are enough for a look, in several passes where they are short."""

    def __init__(self, workers: WorkerConfig):
        self.workers, self.least = workers, max(MIN_BATCHES, BATCHES_PER_WORKER * workers.num_workers)
        self.wait_fraction, self.steps, self.size = [], [], 0
        self.seconds = self.waited = 0.0
        self.skip, self.before = 0, None

    def on_enter(self) -> None:
        """The crew begins, or a pass does. Its first batches are left out, unless the pass before had no others."""
        self.skip = 0 if self.before == len(self.steps) else WARMUP_BATCHES + self.workers.num_workers
        self.before = len(self.steps)

    def on_batch(self, waited: float, batch) -> None:
        self.waited = waited
        self.size = max(self.size, sum(tensor.nbytes for tensor in batch_tensors(batch)))

    def on_step(self, seconds: float) -> bool:
        """Whether it is enough."""
        if self.skip:
            self.skip -= 1
            return False
        self.wait_fraction.append(self.waited)
        self.steps.append(seconds)
        self.seconds += self.waited + seconds
        return len(self.steps) >= self.least and self.seconds >= MIN_SECONDS

    def stats(self) -> LoaderStats:
        return LoaderStats(fmean(self.wait_fraction), median(self.steps), self.size)


def record_cuda_event() -> torch.cuda.Event | None:
    """Behind everything that the GPU was given to do so far; None where there is no GPU in use."""
    if not torch.cuda.is_initialized():
        return None
    mark = torch.cuda.Event()
    mark.record(torch.cuda.default_stream())
    return mark


def gpu_is_busy(mark: torch.cuda.Event | None) -> bool:
    """Whether the GPU is: then it has not waited for the batch that has just come, whatever the host did."""
    return mark is not None and not mark.query()
