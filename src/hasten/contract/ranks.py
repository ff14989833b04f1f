"""One process among those that train together.

A job's processes, its ranks, are numbered from 0. What they tell each other goes through the functions below, which every rank
has to call at the same point of the run; a process that trains alone answers them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

PATIENCE = 1800.0  # seconds for a rank that says nothing, and may be evaluating; one that died is noticed at once


def _own(answer: bytes) -> list[bytes]:
    return [answer]


@dataclass(frozen=True)
class Ranks:
    """Who this process is among the ranks of its job, and how it reaches the others.

    Attributes:
        rank: its number; rank 0 leads: it evaluates, writes the run's folder and shows progress.
        world: how many ranks there are.
        local: its number among those of its machine.
        total: ``(numbers) -> sums``: each number added up over all ranks, in float64.
        most: ``(numbers) -> numbers``: the greatest that any rank has.
        first: ``(bytes) -> bytes``: what rank 0 gave, whatever the others did.
        to_first: ``(bytes) -> list``: what each rank gave, by rank, on rank 0; nothing on the others.
        every: ``(bytes) -> list``: what each rank gave, by rank.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    total: Callable[[Sequence[float]], list[float]] = list
    most: Callable[[Sequence[float]], list[float]] = list
    first: Callable[[bytes], bytes] = bytes
    every: Callable[[bytes], list[bytes]] = _own
    to_first: Callable[[bytes], list[bytes]] = _own

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, yes: bool) -> bool:
        """Any rank's yes becomes every rank's yes."""
        return self.most([yes])[0] > 0

    def readers(self, replica: int) -> Ranks:
        """The same among those that read different samples, where so many ranks at a time hold one copy of the model between them."""
        return self if replica == 1 else replace(self, rank=self.rank // replica, world=self.world // replica)

    def part(self, samples: int) -> tuple[int, int]:
        """(first, end) of this rank's samples in a batch of so many: the parts of all ranks, one after the other, are the whole batch."""
        return samples * self.rank // self.world, samples * (self.rank + 1) // self.world


ALONE = Ranks()
