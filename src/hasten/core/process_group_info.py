"""The process group of a run as one of its ranks sees it: rank, world size and collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

DEFAULT_TIMEOUT_S = 1800.0  # to wait for a rank that does not answer: it may be evaluating; a dead one is seen at once


def _identity(value: Any) -> Any:
    return value


def _gather_one(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class ProcessGroupInfo:
    """Rank, world size and collectives. All ranks must call a collective at the same point of the run."""

    rank: int = 0  # of this process; rank 0, the main process, evaluates, writes the run directory and shows progress
    world_size: int = 1  # number of ranks
    all_reduce_sum: Callable[[Sequence[float]], list[float]] = list  # each number summed over all ranks, in float64
    all_reduce_max: Callable[[Sequence[float]], list[float]] = list  # the maximum of each number over all ranks
    broadcast: Callable[[Any], Any] = _identity  # the argument of rank 0, which must be picklable, as those below
    all_gather: Callable[[Any], list[Any]] = _gather_one  # the arguments of all ranks, by rank
    gather: Callable[[Any], list[Any]] = _gather_one  # the same on rank 0; an empty list on the others

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    def any(self, condition: bool) -> bool:
        """Whether the condition holds on at least one rank. All ranks must call it."""
        return self.all_reduce_max([condition])[0] > 0

    def data_parallel_view(self, model_parallel_size: int) -> ProcessGroupInfo:
        """A copy whose ``rank`` and ``world_size`` count model replicas (of consecutive ranks) instead of processes."""
        if model_parallel_size == 1:
            return self
        return replace(self, rank=self.rank // model_parallel_size, world_size=self.world_size // model_parallel_size)

    def shard_bounds(self, samples: int) -> tuple[int, int]:
        """(first, end) index of this rank's samples in a global batch of ``samples``; ``end`` is excluded."""
        return samples * self.rank // self.world_size, samples * (self.rank + 1) // self.world_size


SINGLE_PROCESS = ProcessGroupInfo()
