"""Measures batches and steps while a run trains: how long steps wait for batches, and how long both take together.

On a GPU the host only queues the work of a step. Its own times would take launching for the step, and count as waiting
what the GPU still computes. There CUDA events are recorded where a batch arrives and where its step is queued; the GPU
reaches them when it has the batch, and when it has finished the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
        self._events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[]]  # of consecutive steps
        self._waits: list[float] = []
        self._steps: list[float] = []
        self._size, self._seconds, self._wait = 0, 0.0, 0.0
        self._skip, self._steps_before = 0, -1

    def on_cuda_events(self, arrival: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Records the events behind the arrival of the last batch, and behind its step; call it before ``on_step``."""
        self._events[-1].append((arrival, end))

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
            self._events.append([])
            return False
        self._waits.append(self._wait)
        self._steps.append(seconds)
        self._seconds += self._wait + seconds
        return len(self._steps) >= self._min_batches and self._seconds >= MIN_SECONDS

    def stats(self) -> LoaderStats:
        waits, steps = self._waits, self._steps
        if on_device := [device_times(_marks_of(events)) for events in self._events if len(events) > 1]:
            waits = [wait for waits, _ in on_device for wait in waits]
            steps = [step for _, steps in on_device for step in steps]
        return LoaderStats(fmean(waits), median(steps), self._size)


def _marks_of(events: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[tuple[float, float]]:
    """Returns when the GPU reached each (arrival, end), in seconds since the first arrival; waits for the last end."""
    first, last = events[0][0], events[-1][1]
    last.synchronize()
    return [(first.elapsed_time(arrival) / 1e3, first.elapsed_time(end) / 1e3) for arrival, end in events]


def device_times(marks: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """(seconds that the GPU was idle before each batch but the first, seconds of each step).

    ``marks`` are the seconds at which the GPU had reached the arrival of a batch, and the end of its step.
    """
    waits = [max(0.0, arrival - end) for (_, end), (arrival, _) in pairwise(marks)]
    return waits, [end - arrival for arrival, end in marks]


def record_cuda_event() -> torch.cuda.Event | None:
    """Records an event, with its time, behind all work queued on the GPU so far; None if no GPU is in use."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.default_stream())
    return event
