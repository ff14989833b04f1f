"""Random numbers that belong to rows.

Augmentation must not depend on how rows fall into batches, workers or ranks. So the numbers are not drawn from a
stream: each is a hash of (seed, epoch, which map asks, row, how many were asked for before), made by the mixing function of
SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195), for a whole batch at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from hasten.engine.seeds import derived, drawing_from

GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
APART = numpy.random.MT19937(0)  # stands in for NumPy's own


class Chance:
    """The random numbers of some rows in one pass; of one row where ``rows`` is a single number."""

    def __init__(self, rows: numpy.ndarray, *key: int):
        with numpy.errstate(over="ignore"):
            self._keys = _mixed(numpy.asarray(rows).astype(numpy.uint64) * GOLDEN + numpy.uint64(derived(*key)))
        self._asked = 0

    def __iter__(self):
        """One Chance for each row, with the numbers that the row has here; their tensors lack the first dimension."""
        for key in self._keys:
            one = object.__new__(Chance)
            one._keys, one._asked = key, self._asked
            yield one

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1), of shape (rows, *shape)."""
        return _tensor((self._bits(shape) >> numpy.uint64(40)).astype(numpy.float32) * numpy.float32(2**-24))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high), of shape (rows, *shape); the range holds at most 2**32 numbers."""
        wide = self._bits(shape) >> numpy.uint64(32)
        return _tensor((wide * numpy.uint64(high - low) >> numpy.uint64(32)).astype(numpy.int64) + low)

    def coins(self, probability: float = 0.5) -> torch.Tensor:
        """bool, of shape (rows,); True with the given probability."""
        return self.uniform() < probability

    def _bits(self, shape: tuple[int, ...]) -> numpy.ndarray:
        count = math.prod(shape)
        with numpy.errstate(over="ignore"):
            asked = numpy.arange(self._asked + 1, self._asked + 1 + count, dtype=numpy.uint64) * GOLDEN
            bits = _mixed(self._keys[..., None] + asked)
        self._asked += count
        return bits.reshape((*self._keys.shape, *shape))


@contextmanager
def drawing_apart(seed: int) -> Iterator[None]:
    """Inside, the generators of torch, NumPy and Python start from ``seed``; outside nothing has happened.

    NumPy's is exchanged, as to save it takes longer than many a batch; the second of two normal numbers that it held back is lost.
    """
    of_python, of_numpy = random.getstate(), numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(APART)
    try:
        with drawing_from(seed):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_bit_generator(of_numpy)


def _mixed(x: numpy.ndarray) -> numpy.ndarray:
    """SplitMix64's finaliser: every bit of the input touches every bit of the output."""
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))


def _tensor(numbers: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(numpy.asarray(numbers))
