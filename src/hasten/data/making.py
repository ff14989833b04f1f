"""How one batch is made of its number: rows, their columns, the samples' maps, the batch's maps.

All that has a say is here, as plain values; so any thread, process, rank or later run makes the same batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from torch.utils.data import default_collate

from hasten.contract.errors import Failure
from hasten.data.chance import Chance
from hasten.data.faults import Faults
from hasten.data.source import BadRow, Source, rows_of


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
    """``(number of the batch) -> batch, rows that had to be left out of it`` in one pass."""

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

    def __call__(self, number: int) -> tuple[Any, list[BadRow]]:
        columns, rows, bad = self._read(self._own(self.rows(number)))
        if not len(rows):
            raise Failure(f"nothing is left of batch {number} of the pass: all its rows are bad, the first is {bad[0]}")
        batch = self._collated(columns, rows) if self.sample_maps or self.collate else columns
        for each in self.batch_maps:
            batch = each.function(batch) if each.stage is None else each.function(batch, self._chance(rows, each))
        return batch, bad

    def _own(self, rows: numpy.ndarray) -> numpy.ndarray:
        """This rank's part of a batch's rows."""
        return rows[len(rows) * self.rank // self.world : len(rows) * (self.rank + 1) // self.world]

    def _read(self, rows: numpy.ndarray) -> tuple[Any, numpy.ndarray, list[BadRow]]:
        bad = []
        while True:
            try:
                return self.source.read(rows), rows, bad
            except BadRow as fault:
                bad.append(fault)
                rows = rows[rows != fault.row]
                if len(bad) > self.faults.at_most:
                    raise self.faults.failure(fault) from fault

    def _collated(self, columns, rows: numpy.ndarray):
        samples = rows_of(columns)
        for each in self.sample_maps:
            if each.stage is None:
                samples = [each.function(sample) for sample in samples]
            else:
                samples = [each.function(sample, chance) for sample, chance in zip(samples, self._chance(rows, each), strict=True)]
        return (self.collate or default_collate)(samples)

    def _chance(self, rows: numpy.ndarray, each: Map) -> Chance:
        return Chance(rows, self.seed, self.epoch, each.stage)


def wants_chance(function: Callable) -> bool:
    """Whether a function has a second parameter that must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 2
