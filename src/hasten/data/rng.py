"""Random numbers that belong to positions in an epoch: a counter-based generator.

Augmentation must not depend on batch size, workers, ranks or where a run was resumed. So random numbers do not come
from a stream: each is a hash of (seed, epoch, index of the random map, position in the epoch, count of numbers drawn
before), computed by the mixing function of SplitMix64 (Steele, Lea, Flood 2014,
https://doi.org/10.1145/2660193.2660195). Numbers are computed and cached in blocks of positions, because a block takes
as long as a small batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy
import torch

from hasten.utils.rng import derive_seed, seeded_rng

GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
NUMPY_RANDOM: Any = numpy.random  # its stubs lack set_bit_generator
TEMPORARY_BIT_GENERATOR = numpy.random.MT19937(0)  # replaces NumPy's own inside isolated_rng
BLOCK = 1 << 13  # numbers; a block fits into the processor's cache, and a resumed epoch computes few in excess


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
        return self._numbers(shape, _to_fractions)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Returns random int64 values in [low, high), shape (positions, *shape); ``high - low`` is at most 2**32."""
        return self._numbers(shape, _to_integers, low, high)

    def bernoulli(self, probability: float = 0.5) -> torch.Tensor:
        """Returns bool, shape (positions,); True with the given probability."""
        return self.uniform() < probability

    def _numbers(self, shape: tuple[int, ...], convert: Callable, *limits: int) -> torch.Tensor:
        count = math.prod(shape)
        compute = _from_blocks if self._positions.ndim else _compute  # a block for a single position would be wasted
        numbers = compute(numpy.atleast_1d(self._positions), self._key, self._drawn, count, convert, *limits)
        self._drawn += count
        return torch.from_numpy(numbers.reshape((*self._positions.shape, *shape)))


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Seeds the global generators of torch, NumPy and Python with ``seed`` for the block, and restores them after it.

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


def _from_blocks(positions: numpy.ndarray, *key: Any) -> numpy.ndarray:
    """``_compute`` for few positions: computes and caches the whole blocks of positions that contain them."""
    size = BLOCK // max(1, key[2])
    if 2 * len(positions) > size:
        return _compute(positions, *key)
    first, last = int(positions[0]), int(positions[-1])
    begin = first // size * size
    if last < begin + size and last - first == len(positions) - 1:
        return _block(begin, size, *key)[first - begin : last - begin + 1].copy()
    return numpy.concatenate([_block(at, size, *key) for at in range(begin, last + 1, size)])[positions - begin]


@lru_cache(maxsize=64)
def _block(begin: int, size: int, *key: Any) -> numpy.ndarray:
    return _compute(numpy.arange(begin, begin + size), *key)


def _compute(
    positions: numpy.ndarray, key: int, drawn: int, count: int, convert: Callable, *limits: int
) -> numpy.ndarray:
    """Returns ``convert(64 random bits, *limits)``, ``count`` for each position after ``drawn`` others. ``positions``
    is int64, shape (positions,); the result has the shape (positions, count).
    """
    bases = _mix(positions.astype(numpy.uint64) * GOLDEN + numpy.uint64(key))
    steps = numpy.arange(drawn + 1, drawn + 1 + count, dtype=numpy.uint64)
    return convert(_mix(bases[:, None] + steps * GOLDEN), *limits)


def _to_fractions(bits: numpy.ndarray) -> numpy.ndarray:
    return (bits >> numpy.uint64(40)).astype(numpy.float32) * numpy.float32(2**-24)


def _to_integers(bits: numpy.ndarray, low: int, high: int) -> numpy.ndarray:
    return ((bits >> numpy.uint64(32)) * numpy.uint64(high - low) >> numpy.uint64(32)).astype(numpy.int64) + low


def _mix(x: numpy.ndarray) -> numpy.ndarray:
    """The finalizer of SplitMix64: every bit of the input changes every bit of the output with probability 1/2."""
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))
