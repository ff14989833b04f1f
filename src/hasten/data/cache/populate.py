"""Reads rows for a cache: all of one shape and dtype, bad rows as zeros."""

from __future__ import annotations

import warnings
from itertools import count
from time import perf_counter
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, ProgressWarning
from hasten.core.progress import ProgressCallback
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.formats.arrays import signed
from hasten.data.source import BadRow, Source, column_leaves, map_columns

PROBED_ROWS = 4  # read to find shape and dtype of all
NOTICE_INTERVAL_S, FIRST_NOTICE_S = 30.0, 3.0
ALIKE = (
    "a cache holds rows of one shape and type: make them so with .map() before .cache(), pictures with images(resize=)"
)


def read_first(source: Source, faults: BadRowPolicy) -> tuple[Any, list[int]]:
    """Reads the first rows that can be read, and counts the bad ones before them.

    Returns:
        (columns as tensors, numbers of the columns that the source gives as lists of rows).

    Raises:
        Failure: More rows are bad than allowed.
        Refusal: No row can be read, or the rows have no common shape.
    """
    for begin in range(0, len(source), PROBED_ROWS):
        columns, _, bad = faults.readable(source, numpy.arange(begin, min(begin + PROBED_ROWS, len(source))))
        for fault in bad:
            faults.record(fault)
        if columns is not None:
            lists = [number for number, column in enumerate(column_leaves(columns)) if isinstance(column, list)]
            return _as_tensors(columns), lists
    raise ConfigurationError("there is no row that could be kept: all are bad, or there are none")


def read_whole(source: Source, rows: numpy.ndarray, like, faults: BadRowPolicy) -> tuple[Any, list[BadRow]]:
    """Reads rows as columns of shape (rows, ...) with zeros for the bad ones, and the bad rows."""
    read, good, faulty = faults.readable(source, rows)
    if read is not None:
        read = _as_tensors(read)
        _refuse_others(read, like, rows)
    if read is not None and not faulty:
        return read, faulty
    whole = map_columns(lambda column: torch.zeros((len(rows), *column.shape[1:]), dtype=column.dtype), like)
    where = torch.from_numpy(numpy.searchsorted(rows, good))
    for into, part in zip(column_leaves(whole), column_leaves(read) if len(good) else (), strict=False):
        signed(into)[where] = signed(part)
    return whole, faulty


def bytes_of(columns, rows: int) -> int:
    """Returns the bytes of ``rows`` rows with the shapes and dtypes of these columns."""
    return sum(column[:1].nbytes for column in column_leaves(columns)) * rows


def paced(what: str, rows: float, seconds: float) -> str:
    """Returns a progress message with the rate in rows per second."""
    return f"{what}, {rows / max(seconds, 1e-9):,.0f} rows/s"


def noticing() -> ProgressCallback:
    """Returns a progress callback that warns every 30 s, first after 3 s."""
    last = perf_counter() - NOTICE_INTERVAL_S + FIRST_NOTICE_S

    def watch(what: str, done: float, seconds_left: float | None = None) -> None:
        nonlocal last
        if perf_counter() - last >= NOTICE_INTERVAL_S and seconds_left:
            last = perf_counter()
            warnings.warn(f"{what}: {done:.0%} done, {seconds_left:.0f} s left", ProgressWarning, stacklevel=2)

    return watch


def _refuse_others(columns, like, rows: numpy.ndarray) -> None:
    """Raises a Refusal if shape or dtype of a column differs from the first rows."""
    for number, (column, first) in enumerate(zip(column_leaves(columns), column_leaves(like), strict=True)):
        expected, got = _describe(first[0]), _describe(column[0])
        if got != expected:
            raise ConfigurationError(
                f"column {number} is {expected} in the first rows and {got} in rows {rows[0]} to {rows[-1]}; {ALIKE}"
            )


def _describe(row: torch.Tensor) -> str:
    return f"{row.dtype} {tuple(row.shape)}".removeprefix("torch.")


def _as_tensors(columns):
    """Stacks the columns that are lists of tensors.

    Raises:
        Refusal: A list holds something else, or tensors of several shapes or dtypes.
    """
    numbers = count()

    def stack(column):
        number = next(numbers)
        if isinstance(column, torch.Tensor):
            return column
        if odd := [row for row in column if not isinstance(row, torch.Tensor)]:
            raise ConfigurationError(f"column {number} of the samples holds {type(odd[0]).__name__}s; {ALIKE}")
        kinds = [*dict.fromkeys(map(_describe, column))]
        if len(kinds) > 1:
            raise ConfigurationError(
                f"column {number} of the samples holds rows of {kinds[0]} and of {kinds[1]}; {ALIKE}"
            )
        return torch.stack(column)

    return map_columns(stack, columns)
