"""Which rows a batch holds: a function of (seed, epoch, number of the batch), never of who asks or when.

Two ways to shuffle: all rows at once, which takes four bytes of memory a row, or *windows* of neighbouring runs (row groups, shards)
for data that are too many, or too slow to be read in any order: the runs are put into a random order, and rows are mixed
among the runs of one window. Either way any batch can be had at once, without those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.utils.rng import derive_seed

MOST_AT_ONCE = 1 << 29  # rows that are shuffled all at once: two gigabytes of row numbers


@dataclass(frozen=True)
class DeterministicBatchSampler:
    """The order of ``rows`` rows in batches of ``batch_size``.

    Attributes:
        seed: of the shuffle; None leaves the rows as they are.
        window: how many runs are mixed at a time; None mixes all rows.
        edges: where the runs begin, and the end: int64, shape (runs + 1,); needed for a window.
    """

    rows: int
    batch_size: int
    seed: int | None = None
    drop_last: bool = False
    window: int | None = None
    edges: numpy.ndarray | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        """Batches a pass has."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def batches(self, epoch: int) -> Callable[[int], numpy.ndarray]:
        """``(number of a batch) -> its rows``, int64, of one pass.

        Raises:
            Refusal: too many rows to be shuffled all at once.
        """
        rows = self._rows(epoch)
        return lambda number: rows(number * self.batch_size, min((number + 1) * self.batch_size, self.rows))

    def number_at(self, position: int) -> int:
        """The number of the batch that begins after so many rows of a pass; after all of them, there is no more to come.

        Raises:
            Refusal: none begins there.
        """
        number, within = divmod(min(position, self.rows), self.batch_size)
        if position < 0 or (within and position < self.rows):
            raise ConfigurationError(
                f"no batch of {self.batch_size} rows begins at row {position} of a pass; go on in the batch size of that place"
            )
        return number + bool(within)

    def _rows(self, epoch: int) -> Callable[[int, int], numpy.ndarray]:
        """``(first, last) -> rows`` at these places of the pass."""
        if self.seed is None:
            return numpy.arange
        seed = derive_seed(self.seed, epoch)
        if self.window is not None:
            return _windows(seed, self.chunk_offsets, self.window)
        if self.rows > MOST_AT_ONCE:
            raise ConfigurationError(
                f"{self.rows} rows are too many to be shuffled all at once; mix some runs at a time: .shuffle(window=64)"
            )
        shuffled = _shuffled(seed, self.rows)
        return lambda first, last: shuffled[first:last].astype(numpy.int64)


def _windows(seed: int, edges: numpy.ndarray, window: int) -> Callable[[int, int], numpy.ndarray]:
    """As ``_rows``, where rows are mixed among ``window`` runs at a time; only the windows that are needed are held."""
    runs = _shuffled(seed, len(edges) - 1)
    ends = numpy.cumsum(numpy.diff(edges)[runs])[window - 1 :: window]  # of all whole windows
    begins = numpy.concatenate([[0], ends[: -(-len(runs) // window) - 1]])

    @lru_cache(maxsize=4)  # for a few threads that stand on both sides of an edge
    def mixed(number: int) -> numpy.ndarray:
        rows = [numpy.arange(edges[run], edges[run + 1]) for run in runs[number * window : (number + 1) * window]]
        rows = numpy.concatenate(rows)
        return rows[_shuffled(derive_seed(seed, number), len(rows))]

    def rows(first: int, last: int) -> numpy.ndarray:
        taken = []
        number = int(numpy.searchsorted(begins, first, side="right")) - 1
        while first < last:
            begin = int(begins[number])
            taken.append(mixed(number)[first - begin : last - begin])
            first += len(taken[-1])
            number += 1
        return numpy.concatenate(taken)

    return rows


def _shuffled(seed: int, count: int) -> numpy.ndarray:
    """The numbers below ``count`` in a random order."""
    kind = torch.int32 if count < 1 << 31 else torch.int64
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), dtype=kind).numpy()
