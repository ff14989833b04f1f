"""What can be seen of batches and steps while a run goes on: who waits for whom, and how long both take together."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

import torch

from hasten.contract.batch import tensors
from hasten.contract.data import Crew

LEAST_BATCHES, LEAST_SECONDS = 4, 0.3  # of a look
ROUNDS = 2  # batches of each worker in a look: they come in bursts
UNSETTLED = 1  # batches that say little, beside the first of each worker, where a crew or a pass begins


@dataclass(frozen=True)
class Look:
    """What was seen of a crew over some batches in a row.

    Attributes:
        waited: seconds that a step waited for its batch, on average.
        step: seconds between getting a batch and asking for the next, the median: an evaluation in between is nobody's fault.
        size: bytes of the largest batch.
    """

    waited: float
    step: float
    size: int = 0

    @property
    def pace(self) -> float:
        """Seconds a batch, its step included."""
        return self.waited + self.step

    @property
    def share(self) -> float:
        """Of the time that is spent waiting."""
        return self.waited / self.pace if self.pace else 0.0


class Watch:
    """Notes batches and steps of a crew until there are enough for a look, in several passes where they are short."""

    def __init__(self, crew: Crew):
        self.crew, self.least = crew, max(LEAST_BATCHES, ROUNDS * crew.workers)
        self.waits, self.steps, self.size = [], [], 0
        self.seconds = self.waited = 0.0
        self.skip, self.before = 0, None

    def entered(self) -> None:
        """The crew begins, or a pass does. Its first batches are left out, unless the pass before had no others."""
        self.skip = 0 if self.before == len(self.steps) else UNSETTLED + self.crew.workers
        self.before = len(self.steps)

    def given(self, waited: float, batch) -> None:
        self.waited = waited
        self.size = max(self.size, sum(tensor.nbytes for tensor in tensors(batch)))

    def stepped(self, seconds: float) -> bool:
        """Whether it is enough."""
        if self.skip:
            self.skip -= 1
            return False
        self.waits.append(self.waited)
        self.steps.append(seconds)
        self.seconds += self.waited + seconds
        return len(self.steps) >= self.least and self.seconds >= LEAST_SECONDS

    def seen(self) -> Look:
        return Look(fmean(self.waits), median(self.steps), self.size)


def mark() -> torch.cuda.Event | None:
    """Behind everything that the GPU was given to do so far; None where there is no GPU in use."""
    if not torch.cuda.is_initialized():
        return None
    mark = torch.cuda.Event()
    mark.record(torch.cuda.default_stream())
    return mark


def still_at_work(mark: torch.cuda.Event | None) -> bool:
    """Whether the GPU is: then it has not waited for the batch that has just come, whatever the host did."""
    return mark is not None and not mark.query()
