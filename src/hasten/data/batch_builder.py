"""How one batch is made of its number: rows, their columns, the samples' maps, the batch's maps.

All that has a say is here, as plain values; so any thread, process, rank or later run makes the same batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from numbers import Number
from operator import is_
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.rng import SampleRng, isolated_rng
from hasten.data.source import BadRow, Source, column_leaves, unbatch
from hasten.utils.rng import derive_seed, get_rng_state, preserve_rng_state
from hasten.utils.tree import bitwise_equal


@dataclass(frozen=True)
class Map:
    """A function that is applied to every sample, or to every batch.

    Attributes:
        stage: for one that wants random numbers, how many such come before it: each draws numbers of its own.
    """

    function: Callable
    stage: int | None = None


@dataclass(frozen=True)
class BatchBuilder:
    """``(number of the batch) -> batch, rows that had to be left out of it`` in one pass.

    Attributes:
        size: of a batch, for all ranks together.
        seeded: the generators of torch, NumPy and Python start each batch from a seed of its own; not where threads share them.
    """

    source: Source
    rows: Callable[[int], numpy.ndarray]
    size: int
    seed: int
    epoch: int
    sample_maps: tuple[Map, ...]
    batch_maps: tuple[Map, ...]
    collate: Callable[[list], Any] | None
    rank: int
    world: int
    faults: BadRowPolicy
    seeded: bool

    def __call__(self, number: int) -> tuple[Any, list[BadRow]]:
        with self._drawing(number):
            own, places = self._own(number)
            columns, rows, bad = self.faults.readable(self.source, own)
            if bad:
                places = places[numpy.isin(own, rows)]
            if not len(rows):
                raise RunError(
                    f"nothing is left of batch {number} of the pass: all its rows are bad, the first is {bad[0]}"
                )
            batch = self._collated(columns, places) if self.sample_maps or self.collate else columns
            for each in self.batch_maps:
                batch = (
                    each.function(batch) if each.stage is None else each.function(batch, rng=self._chance(places, each))
                )
            return batch, bad

    def draws(self, number: int) -> bool:
        """Whether the generators of the process are drawn from where a batch is made; it is made for that alone, and they stay as they are."""
        with preserve_rng_state():
            before = get_rng_state()
            self(number)
            return not bitwise_equal(get_rng_state(), before)

    def _own(self, number: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """This rank's part of a batch's rows, and their places in the pass."""
        rows = self.rows(number)
        first, last = (len(rows) * rank // self.world for rank in (self.rank, self.rank + 1))
        return rows[first:last], numpy.arange(number * self.size + first, number * self.size + last)

    def _collated(self, columns, places: numpy.ndarray):
        samples, lists = self._mapped(unbatch(columns), places), lists_of(columns)
        if self.collate is not None:
            return self.collate(samples)
        try:
            return collate_nested(samples, lists, self._handed_on if lists else frozenset())
        except CollateError as error:
            raise ConfigurationError(
                f"{error}; make them alike in .map(), or say how they become a batch: .batch(size, collate=...)"
            ) from None

    def _mapped(self, samples: list, places: numpy.ndarray) -> list:
        for each in self.sample_maps:
            if each.stage is None:
                samples = [each.function(sample) for sample in samples]
            else:
                samples = [
                    each.function(sample, rng=rng)
                    for sample, rng in zip(samples, self._chance(places, each), strict=True)
                ]
        return samples

    @cached_property
    def _handed_on(self) -> frozenset[tuple]:
        """Found out in the middle of a batch, whose own random numbers stay what they are."""
        with preserve_rng_state() if self.seeded else nullcontext(), self._drawing(0):
            return passthrough_paths(self.source, self._mapped)

    def _chance(self, places: numpy.ndarray, each: Map) -> SampleRng:
        return SampleRng(places, self.seed, self.epoch, each.stage)

    def _drawing(self, number: int) -> AbstractContextManager:
        """Functions of the user's own may draw from generators that belong to the process."""
        return isolated_rng(derive_seed(self.seed, self.epoch, number, self.rank)) if self._apart else nullcontext()

    @cached_property
    def _apart(self) -> bool:
        functions = (each.function for each in (*self.sample_maps, *self.batch_maps))
        return self.seeded and not all(
            map(is_builtin, (self.source, self.collate, *functions))
        )  # ours never draw from those


class CollateError(ValueError):
    """Samples that cannot be stacked, and which part of them differs."""


def passthrough_paths(source: Source, maps: Callable[[list, numpy.ndarray], list]) -> frozenset[tuple]:
    """The places in a sample at which ``maps(samples, rows)`` hands on rows of lists as they are, as it does with the first good row.

    So it does not depend on which rows come together whether a part of a batch is a list or a tensor.
    """
    for row in range(len(source)):
        rows = numpy.array([row])
        try:
            columns = source.read(rows)
        except BadRow:
            continue
        sample = maps(unbatch(columns), rows)[0]
        return frozenset(_places(sample, [column[0] for column in lists_of(columns)]))
    return frozenset()


def _places(sample, originals: list, place: tuple = ()) -> Iterator[tuple]:
    if isinstance(sample, Number):  # Python has each small one once
        return
    if any(sample is original for original in originals):
        yield place
    elif isinstance(sample, (Mapping, tuple, list)):
        for name, part in sample.items() if isinstance(sample, Mapping) else enumerate(sample):
            yield from _places(part, originals, (*place, name))


def collate_nested(samples: list, lists: list[list] = (), kept: frozenset[tuple] = frozenset(), place: tuple = ()):
    """Samples as columns, in their own nesting: tensors and numbers as one tensor, text as a list.

    What maps hand on as it was, from a column that was a list (rows of unequal length, pictures of any size), is a list again,
    whatever it holds; numbers alone are always one tensor.

    Args:
        lists: the columns that were lists before the maps.
        kept: the places at which maps hand on rows of these, all of them; elsewhere they hand on none.
        place: where in the samples these are.

    Raises:
        Unlike: shapes or names differ, something is in them that no tensor holds, or maps hand on some rows only.
    """
    first = samples[0]
    if isinstance(first, (str, bytes)) or _are_rows(samples, lists, place in kept, place):
        return samples
    try:
        if isinstance(first, Mapping):
            if any(sample.keys() != first.keys() for sample in samples if isinstance(sample, Mapping)):
                raise ValueError("they have other names")
            parts = {name: [sample[name] for sample in samples] for name in first}
            return {name: collate_nested(part, lists, kept, (*place, name)) for name, part in parts.items()}
        if isinstance(first, (tuple, list)):
            parts = list(zip(*samples, strict=True))
            columns = [collate_nested(list(part), lists, kept, (*place, number)) for number, part in enumerate(parts)]
            return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
        return default_collate(samples)
    except CollateError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, OverflowError) as error:
        kinds = " and ".join([*dict.fromkeys(map(_kind, samples))][:2])
        raise CollateError(
            f"the samples cannot be stacked: {_told(place)} is {kinds} ({format_error(error, 100)})"
        ) from None


def _are_rows(samples: list, lists: list[list], expected: bool, place: tuple) -> bool:
    """Whether all samples are rows of a list, as they were.

    Raises:
        Unlike: some are, or all against what was expected.
    """
    if isinstance(samples[0], Number) and not expected:
        return False
    as_they_were = max((sum(map(is_, samples, column)) for column in lists), default=0)
    if as_they_were != (len(samples) if expected else 0):
        what = f"the map hands on {_told(place)} of some rows as it is, and makes it for others"
        raise CollateError(f"{what}; copy those that stay as they are, as with .clone()")
    return expected


def _told(place: tuple) -> str:
    return "sample" + "".join(f"[{part!r}]" for part in place)


def lists_of(columns) -> list[list]:
    """The columns that are no tensors."""
    return [column for column in column_leaves(columns) if isinstance(column, list)]


def _kind(value) -> str:
    """``float32 (3, 4)``, ``tuple of 2``, ``NoneType``."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {', '.join(map(str, value))}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__


def wants_rng(function: Callable) -> bool:
    """Whether a function has a parameter of the name ``chance``.

    Raises:
        Refusal: two others must be given, as for tf.data's ``lambda image, label: ...``.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    others = [p for name, p in parameters.items() if name != "rng" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in others if p.default is p.empty]
    if len(needed) > 1:
        wants = f"map() gives its function one thing, the sample or the batch, and this one wants {', '.join(needed)}"
        raise ConfigurationError(
            f"{wants}; take a tuple apart inside, and call the parameter for random numbers chance"
        )
    return "rng" in parameters


def is_builtin(thing) -> bool:
    """Whether a source or a function is of this package, and so draws from its ``Chance`` alone."""
    return thing is None or (getattr(getattr(thing, "func", thing), "__module__", None) or "").startswith("hasten.")
