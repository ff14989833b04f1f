"""Random numbers that belong to positions in an epoch: a counter-based generator.

Augmentation must not depend on batch size, workers, ranks or where a run was resumed. So random numbers do not come
from a stream: each is a hash of (seed, epoch, index of the random map, position in the epoch, count of numbers drawn
before), computed by the mixing function of SplitMix64 (Steele, Lea, Flood 2014,
https://doi.org/10.1145/2660193.2660195).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.validation import check_int
from hasten.utils.rng import derive_seed, seeded_rng

GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
NUMPY_RANDOM: Any = numpy.random  # its stubs lack set_bit_generator
TEMPORARY_BIT_GENERATOR = numpy.random.MT19937(0)  # replaces NumPy's own inside isolated_rng


class SampleRng:
    """Random numbers of some positions in one epoch.

    Args:
        positions: int64, ascending, shape (positions,); or a single position.
        key: Integers that distinguish this generator: seed, epoch, index of the random map.
    """

    def __init__(self, positions: numpy.ndarray, *key: int) -> None:
        self._positions, self._key, self._drawn = positions, _derive_seed(*key), 0

    def __iter__(self) -> Iterator[SampleRng]:
        """Yields a SampleRng per position: it draws the same numbers, in tensors without the first dimension."""
        for position in self._positions:
            rng = object.__new__(SampleRng)
            rng._positions, rng._key, rng._drawn = position, self._key, self._drawn
            yield rng

    def uniform(self, *shape: int) -> torch.Tensor:
        """Returns float32 in [0, 1), shape (positions, *shape)."""
        fractions = (self._bits(shape) >> numpy.uint64(40)).astype(numpy.float32) * numpy.float32(2**-24)
        return self._shaped(fractions, shape)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Returns random int64 values in [low, high), shape (positions, *shape). ConfigurationError unless both are
        integers and ``high - low`` is from 1 to 2**32.
        """
        low, high = check_int("integers(low)", low), check_int("integers(high)", high)
        if not 0 < high - low <= 1 << 32:
            raise ConfigurationError(f"integers(low, high) requires high - low from 1 to 2**32, not {low} and {high}")
        scaled = (self._bits(shape) >> numpy.uint64(32)) * numpy.uint64(high - low) >> numpy.uint64(32)
        return self._shaped(scaled.astype(numpy.int64) + low, shape)

    def bernoulli(self, probability: float = 0.5) -> torch.Tensor:
        """Returns bool, shape (positions,); True with the given probability."""
        return self.uniform() < probability

    def _bits(self, shape: tuple[int, ...]) -> numpy.ndarray:
        """Returns 64 random bits for each number of ``shape``, uint64, shape (positions, numbers)."""
        count = math.prod(shape)
        steps = numpy.arange(self._drawn + 1, self._drawn + 1 + count, dtype=numpy.uint64)
        self._drawn += count
        positions = numpy.atleast_1d(self._positions).astype(numpy.uint64)
        bases = _mix(positions * GOLDEN + numpy.uint64(self._key))
        return _mix(bases[:, None] + steps * GOLDEN)

    def _shaped(self, numbers: numpy.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(numbers.reshape((*self._positions.shape, *shape)))


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Context manager: seeds the global CPU generators of torch, NumPy and Python for the block, then restores them.

    NumPy's generator is replaced instead of saved, because saving takes longer than some batches.
    """
    python_state, numpy_generator = random.getstate(), NUMPY_RANDOM.get_bit_generator()
    NUMPY_RANDOM.set_bit_generator(TEMPORARY_BIT_GENERATOR)
    try:
        with seeded_rng(seed):
            yield
    finally:
        random.setstate(python_state)
        NUMPY_RANDOM.set_bit_generator(numpy_generator)


_derive_seed = lru_cache(maxsize=64)(derive_seed)


def _mix(x: numpy.ndarray) -> numpy.ndarray:
    """The finalizer of SplitMix64: every bit of the input changes every bit of the output with probability 1/2."""
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))
