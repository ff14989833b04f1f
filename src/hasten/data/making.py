"""How one batch is made of its number: rows, their columns, the samples' maps, the batch's maps.

All that has a say is here, as plain values; so any thread, process, rank or later run makes the same batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
from torch.utils.data import default_collate

from hasten.contract.errors import Failure, Refusal
from hasten.data.chance import Chance, drawing_apart
from hasten.data.faults import Faults
from hasten.data.source import BadRow, Source, rows_of
from hasten.engine.seeds import derived


@dataclass(frozen=True)
class Map:
    """A function that is applied to every sample, or to every batch.

    Attributes:
        stage: for one that wants random numbers, how many such come before it: each draws numbers of its own.
    """

    function: Callable
    stage: int | None = None


@dataclass(frozen=True)
class Making:
    """``(number of the batch) -> batch, rows that had to be left out of it`` in one pass.

    Attributes:
        seeded: the generators of torch, NumPy and Python start each batch from a seed of its own; not where threads share them.
    """

    source: Source
    rows: Callable[[int], numpy.ndarray]
    seed: int
    epoch: int
    sample_maps: tuple[Map, ...]
    batch_maps: tuple[Map, ...]
    collate: Callable[[list], Any] | None
    rank: int
    world: int
    faults: Faults
    seeded: bool

    def __call__(self, number: int) -> tuple[Any, list[BadRow]]:
        with self._drawing(number):
            columns, rows, bad = self.faults.readable(self.source, self._own(self.rows(number)))
            if not len(rows):
                raise Failure(f"nothing is left of batch {number} of the pass: all its rows are bad, the first is {bad[0]}")
            batch = self._collated(columns, rows) if self.sample_maps or self.collate else columns
            for each in self.batch_maps:
                batch = each.function(batch) if each.stage is None else each.function(batch, chance=self._chance(rows, each))
            return batch, bad

    def _own(self, rows: numpy.ndarray) -> numpy.ndarray:
        """This rank's part of a batch's rows."""
        return rows[len(rows) * self.rank // self.world : len(rows) * (self.rank + 1) // self.world]

    def _collated(self, columns, rows: numpy.ndarray):
        samples = rows_of(columns)
        for each in self.sample_maps:
            if each.stage is None:
                samples = [each.function(sample) for sample in samples]
            else:
                samples = [each.function(sample, chance=chance) for sample, chance in zip(samples, self._chance(rows, each), strict=True)]
        return (self.collate or stacked)(samples)

    def _chance(self, rows: numpy.ndarray, each: Map) -> Chance:
        return Chance(rows, self.seed, self.epoch, each.stage)

    def _drawing(self, number: int) -> AbstractContextManager:
        """Where functions of the user's own may draw from generators that belong to the process; ours never do."""
        functions = (each.function for each in (*self.sample_maps, *self.batch_maps))
        if self.seeded and not all(map(_is_ours, (self.source, self.collate, *functions))):
            return drawing_apart(derived(self.seed, self.epoch, number, self.rank))
        return nullcontext()


def stacked(samples: list):
    """Samples as columns, in their own nesting: tensors and numbers as one tensor, text as a list."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: stacked([sample[name] for sample in samples]) for name in first}
    if isinstance(first, (tuple, list)):
        columns = [stacked(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return samples if isinstance(first, (str, bytes)) else default_collate(samples)


def wants_chance(function: Callable) -> bool:
    """Whether a function has a parameter of the name ``chance``.

    Raises:
        Refusal: two others must be given, as for tf.data's ``lambda image, label: ...``.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    others = [p for name, p in parameters.items() if name != "chance" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in others if p.default is p.empty]
    if len(needed) > 1:
        wants = f"map() gives its function one thing, the sample or the batch, and this one wants {', '.join(needed)}"
        raise Refusal(f"{wants}; take a tuple apart inside, and call the parameter for random numbers chance")
    return "chance" in parameters


def _is_ours(thing) -> bool:
    """Whether a source or a function is of this package, and so draws from its ``Chance`` alone."""
    return thing is None or (getattr(getattr(thing, "func", thing), "__module__", None) or "").startswith("hasten.")
