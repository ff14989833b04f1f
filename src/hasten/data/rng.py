"""Random numbers that belong to places in a pass.

Augmentation must not depend on how rows fall into batches, workers or ranks, nor on where a run was taken up. So the numbers are not
drawn from a stream: each is a hash of (seed, epoch, which map asks, place in the pass, how many were asked for before), made by the
mixing function of SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195). A block of them is made at a time,
and kept for the batches that come next: to make those of a small batch takes as long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy
import torch

from hasten.utils.rng import derive_seed, seeded_rng

GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
APART = numpy.random.MT19937(0)  # stands in for NumPy's own
BLOCK = 1 << 13  # numbers: what is done to them stays in the processor's cache, and a resumed pass makes few in vain


class SampleRng:
    """The random numbers of some places in one pass, given in rising order; of one place where ``places`` is a single number."""

    def __init__(self, places: numpy.ndarray, *key: int):
        self._places, self._key, self._asked = places, _seed(*key), 0

    def __iter__(self):
        """One Chance for each place, with the numbers that the place has here; their tensors lack the first dimension."""
        for place in self._places:
            one = object.__new__(SampleRng)
            one._places, one._key, one._asked = place, self._key, self._asked
            yield one

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1), of shape (places, *shape)."""
        return self._numbers(shape, _fractions)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high), of shape (places, *shape); the range holds at most 2**32 numbers."""
        return self._numbers(shape, _whole, low, high)

    def bernoulli(self, probability: float = 0.5) -> torch.Tensor:
        """bool, of shape (places,); True with the given probability."""
        return self.uniform() < probability

    def _numbers(self, shape: tuple[int, ...], form: Callable, *limits: int) -> torch.Tensor:
        count = math.prod(shape)
        made = _drawn if self._places.ndim else _made  # for one place, a block would be made for a single use
        numbers = made(numpy.atleast_1d(self._places), self._key, self._asked, count, form, *limits)
        self._asked += count
        return torch.from_numpy(numbers.reshape((*self._places.shape, *shape)))


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Inside, the generators of torch, NumPy and Python start from ``seed``; outside nothing has happened.

    NumPy's is exchanged, as to save it takes longer than many a batch; the second of two normal numbers that it held back is lost.
    """
    of_python, of_numpy = random.getstate(), numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(APART)
    try:
        with seeded_rng(seed):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_bit_generator(of_numpy)


_seed = lru_cache(maxsize=64)(derive_seed)


def _drawn(places: numpy.ndarray, *what) -> numpy.ndarray:
    """What ``_made`` makes: from blocks, where these are larger."""
    size = BLOCK // max(1, what[2])
    if 2 * len(places) > size:
        return _made(places, *what)
    first, last = int(places[0]), int(places[-1])
    begin = first // size * size
    if last < begin + size and last - first == len(places) - 1:
        return _block(begin, size, *what)[first - begin : last - begin + 1].copy()
    return numpy.concatenate([_block(each, size, *what) for each in range(begin, last + 1, size)])[places - begin]


@lru_cache(maxsize=64)
def _block(begin: int, size: int, *what) -> numpy.ndarray:
    return _made(numpy.arange(begin, begin + size), *what)


def _made(places: numpy.ndarray, key: int, asked: int, count: int, form: Callable, *limits: int) -> numpy.ndarray:
    """``count`` numbers for each place, after ``asked`` others, shape (places, count), in a form: ``(64 random bits, *limits) -> number``."""
    of_places = _mixed(places.astype(numpy.uint64) * GOLDEN + numpy.uint64(key))
    return form(
        _mixed(of_places[:, None] + numpy.arange(asked + 1, asked + 1 + count, dtype=numpy.uint64) * GOLDEN), *limits
    )


def _fractions(bits: numpy.ndarray) -> numpy.ndarray:
    return (bits >> numpy.uint64(40)).astype(numpy.float32) * numpy.float32(2**-24)


def _whole(bits: numpy.ndarray, low: int, high: int) -> numpy.ndarray:
    return ((bits >> numpy.uint64(32)) * numpy.uint64(high - low) >> numpy.uint64(32)).astype(numpy.int64) + low


def _mixed(x: numpy.ndarray) -> numpy.ndarray:
    """SplitMix64's finaliser: every bit of the input touches every bit of the output."""
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))
