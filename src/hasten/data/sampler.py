"""Which rows a batch holds: a function of (seed, epoch, index of the batch).

There are two ways to shuffle. Without a window all rows are permuted, which takes 4 bytes of memory per row. With a
window, for data that are too large or too slow to read in random order, the chunks (row groups, shards) are permuted,
and rows are mixed among ``window`` successive chunks of that permutation. Either way any batch can be computed without
those before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.utils.rng import derive_seed

MAX_PERMUTED_ROWS = 1 << 29  # 2 GB of row indices


@dataclass(frozen=True)
class DeterministicBatchSampler:
    """The rows of each batch, as a function of (seed, epoch, index of the batch)."""

    rows: int  # rows of an epoch
    batch_size: int  # rows of a batch
    seed: int | None = None  # seed of the shuffle; None keeps the order of the rows
    drop_last: bool = False  # whether a shorter last batch is left out
    window: int | None = None  # number of chunks that are mixed at a time; None mixes all rows
    # first row of every chunk, and the end: int64, shape (chunks + 1,). Required with a window.
    chunk_offsets: numpy.ndarray | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        """Returns the number of batches per epoch."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def batches(self, epoch: int) -> Callable[[int], numpy.ndarray]:
        """Returns a function from the index of a batch in this epoch to its row indices, int64. ConfigurationError if
        there are too many rows to permute all of them.
        """
        rows = self._rows(epoch)
        return lambda index: rows(index * self.batch_size, min((index + 1) * self.batch_size, self.rows))

    def index_at(self, position: int) -> int:
        """Returns the index of the batch that begins after ``position`` rows of an epoch; ``len`` after all rows.
        ConfigurationError if no batch begins there.
        """
        index, rest = divmod(min(position, self.rows), self.batch_size)
        if position < 0 or (rest and position < self.rows):
            hint = "continue with the batch size with which this position was saved"
            raise ConfigurationError(f"no batch of {self.batch_size} rows begins at row {position} of an epoch; {hint}")
        return index + bool(rest)

    def _rows(self, epoch: int) -> Callable[[int, int], numpy.ndarray]:
        """Returns a function ``(first, last)`` -> the row indices at these positions of the epoch."""
        if self.seed is None:
            return numpy.arange
        seed = derive_seed(self.seed, epoch)
        if self.window is not None:
            assert self.chunk_offsets is not None
            return _shuffle_in_windows(seed, self.chunk_offsets, self.window)
        if self.rows > MAX_PERMUTED_ROWS:
            limit = f"at most {MAX_PERMUTED_ROWS}; mix some chunks at a time: .shuffle(window=64)"
            raise ConfigurationError(f"{self.rows} rows are too many to be shuffled all at once, {limit}")
        permutation = _permutation(seed, self.rows)
        return lambda first, last: permutation[first:last].astype(numpy.int64)


def _shuffle_in_windows(seed: int, offsets: numpy.ndarray, window: int) -> Callable[[int, int], numpy.ndarray]:
    """Returns ``(first, last) -> row indices`` with chunks mixed ``window`` at a time; caches the last 4 windows."""
    chunks = _permutation(seed, len(offsets) - 1)
    ends = numpy.cumsum(numpy.diff(offsets)[chunks])[window - 1 :: window]  # of all full windows
    begins = numpy.concatenate([[0], ends[: -(-len(chunks) // window) - 1]])

    @lru_cache(maxsize=4)  # for threads that are on both sides of a window's end
    def mixed(index: int) -> numpy.ndarray:
        members = chunks[index * window : (index + 1) * window]
        bounds = [(int(offsets[chunk]), int(offsets[chunk + 1])) for chunk in members]
        rows = numpy.concatenate([numpy.arange(begin, end) for begin, end in bounds])
        return rows[_permutation(derive_seed(seed, index), len(rows))]

    def rows(first: int, last: int) -> numpy.ndarray:
        parts = []
        index = int(numpy.searchsorted(begins, first, side="right")) - 1
        while first < last:
            begin = int(begins[index])
            parts.append(mixed(index)[first - begin : last - begin])
            first += len(parts[-1])
            index += 1
        return numpy.concatenate(parts)

    return rows


def _permutation(seed: int, count: int) -> numpy.ndarray:
    """Returns the integers below ``count`` in random order: int32, or int64 from 2**31 on."""
    dtype = torch.int32 if count < 1 << 31 else torch.int64
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), dtype=dtype).numpy()
