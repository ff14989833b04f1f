"""Rows as they are read to be kept: all of one shape and type, bad ones as zeros."""

from __future__ import annotations

import warnings
from itertools import count
from time import perf_counter
from typing import Any

import numpy
import torch

from hasten.contract.errors import Progress, Refusal
from hasten.contract.watch import Watch
from hasten.data.faults import Faults
from hasten.data.formats.in_memory import signed
from hasten.data.source import BadRow, Source, leaves_of, mapped

PROBED = 4  # rows that are read to know the size of all
SECONDS_BETWEEN_NOTICES = 30.0
ALIKE = "a cache holds rows of one shape and type: make them so with .map() before .cache(), pictures with images(resize=)"


def read_first(source: Source, faults: Faults) -> tuple[Any, list[int]]:
    """The first few rows that can be read, as tensors; and which columns, counted through, are lists of rows.

    Raises:
        Failure: more are bad than may be.
        Refusal: none can be read, or they have no common shape.
    """
    columns = _first_columns(source, faults)
    return _as_tensors(columns), [number for number, each in enumerate(leaves_of(columns)) if isinstance(each, list)]


def read_whole(source: Source, rows: numpy.ndarray, like, faults: Faults) -> tuple[Any, list[BadRow]]:
    """The columns of all these rows, with zeros for the bad ones."""
    read, good, faulty = faults.readable(source, rows)
    if read is not None:
        read = _as_tensors(read)
        _refuse_others(read, like, rows)
    if read is not None and not faulty:
        return read, faulty
    whole = mapped(lambda column: torch.zeros((len(rows), *column.shape[1:]), dtype=column.dtype), like)
    where = torch.from_numpy(numpy.searchsorted(rows, good))
    for into, part in zip(leaves_of(whole), leaves_of(read) if len(good) else (), strict=False):
        signed(into)[where] = signed(part)
    return whole, faulty


def bytes_of(columns, rows: int) -> int:
    """Bytes that so many rows like these take."""
    return sum(column[:1].nbytes for column in leaves_of(columns)) * rows


def paced(what: str, rows: float, seconds: float) -> str:
    """What is being done, and how many rows of it a second."""
    return f"{what}, {rows / max(seconds, 1e-9):,.0f} rows/s"


def noticing() -> Watch:
    """A watch that gives a Notice now and then, if there is long to wait."""
    told = perf_counter() - SECONDS_BETWEEN_NOTICES + 3.0

    def watch(what: str, done: float, seconds_left: float | None = None) -> None:
        nonlocal told
        if perf_counter() - told >= SECONDS_BETWEEN_NOTICES and seconds_left:
            told = perf_counter()
            warnings.warn(f"{what}: {done:.0%} done, {seconds_left:.0f} s left", Progress, stacklevel=2)

    return watch


def _refuse_others(columns, like, rows: numpy.ndarray) -> None:
    """Raises a Refusal where rows are not like the first ones."""
    for number, (column, first) in enumerate(zip(leaves_of(columns), leaves_of(like), strict=True)):
        if _kind(column) != _kind(first):
            raise Refusal(
                f"column {number} is {_kind(first)} in the first rows and {_kind(column)} in rows {rows[0]} to {rows[-1]}; {ALIKE}"
            )


def _kind(column: torch.Tensor) -> str:
    return f"{column.dtype} {tuple(column.shape[1:])}".removeprefix("torch.")


def _first_columns(source: Source, faults: Faults):
    """Columns of the first few rows that can be read; the bad ones before them are counted.

    Raises:
        Failure: more are bad than may be.
        Refusal: none can be read.
    """
    for begin in range(0, len(source), PROBED):
        columns, _, bad = faults.readable(source, numpy.arange(begin, min(begin + PROBED, len(source))))
        for fault in bad:
            faults.note(fault)
        if columns is not None:
            return columns
    raise Refusal("there is no row that could be kept: all are bad, or there are none")


def _as_tensors(columns):
    """The columns, those that are lists of tensors stacked.

    Raises:
        Refusal: a list holds something else, or tensors of several shapes.
    """
    number = count()

    def whole(column):
        place = next(number)
        if isinstance(column, torch.Tensor):
            return column
        if odd := [row for row in column if not isinstance(row, torch.Tensor)]:
            raise Refusal(f"column {place} of the samples holds {type(odd[0]).__name__}s; {ALIKE}")
        kinds = [*dict.fromkeys(f"{row.dtype} {tuple(row.shape)}".removeprefix("torch.") for row in column)]
        if len(kinds) > 1:
            raise Refusal(f"column {place} of the samples holds rows of {kinds[0]} and of {kinds[1]}; {ALIKE}")
        return torch.stack(column)

    return mapped(whole, columns)
