"""Reads rows for a cache: all of one shape and dtype, bad rows as zeros."""

from itertools import count
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.array_source import signed
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.source import BadRow, Source, column_leaves, map_columns

PROBED_ROWS = 4  # read to find the shape and dtype of all rows
UNIFORM_ROWS_HINT = "a cache requires rows of one shape and dtype: use images(resize=), or .map() before .cache()"


def read_first(source: Source, faults: BadRowPolicy) -> tuple[Any, list[int]]:
    """Returns the first readable rows as (columns as tensors, indices of the columns that the source returns as lists).

    Records the bad rows before them; RunError if these are more than allowed, ConfigurationError if no row can be read
    or the rows have no common shape.
    """
    for begin in range(0, len(source), PROBED_ROWS):
        columns, _, bad_rows = faults.readable(source, numpy.arange(begin, min(begin + PROBED_ROWS, len(source))))
        for bad_row in bad_rows:
            faults.record(bad_row)
        if columns is not None:
            lists = [index for index, column in enumerate(column_leaves(columns)) if isinstance(column, list)]
            return _as_tensors(columns), lists
    raise ConfigurationError("there is no row to cache: all rows are bad, or there are none")


def read_padded(source: Source, rows: numpy.ndarray, like: Any, faults: BadRowPolicy) -> tuple[Any, list[BadRow]]:
    """Reads rows as columns of shape (rows, ...) with zeros for the bad ones, and the bad rows."""
    columns, good, bad_rows = faults.readable(source, rows)
    if columns is not None:
        columns = _as_tensors(columns)
        _check_like(columns, like, rows)
        if not bad_rows:
            return columns, bad_rows
    padded = map_columns(lambda column: torch.zeros((len(rows), *column.shape[1:]), dtype=column.dtype), like)
    if columns is not None:
        index = torch.from_numpy(numpy.searchsorted(rows, good))
        targets: list[Any] = column_leaves(padded)
        tensors: list[Any] = column_leaves(columns)
        for target, column in zip(targets, tensors, strict=True):
            signed(target)[index] = signed(column)
    return padded, bad_rows


def bytes_of(columns: Any, rows: int) -> int:
    """Returns the bytes of ``rows`` rows with the shapes and dtypes of these columns, which are tensors."""
    leaves: list[Any] = column_leaves(columns)
    return sum(column[:1].nbytes for column in leaves) * rows


def _check_like(columns: Any, like: Any, rows: numpy.ndarray) -> None:
    """Raises ConfigurationError if the shape or dtype of a column differs from the first rows."""
    for index, (column, first) in enumerate(zip(column_leaves(columns), column_leaves(like), strict=True)):
        expected, actual = _describe(first[0]), _describe(column[0])
        if actual != expected:
            later = f"{actual} in rows {rows[0]} to {rows[-1]}; {UNIFORM_ROWS_HINT}"
            raise ConfigurationError(f"column {index} is {expected} in the first rows and {later}")


def _describe(row: torch.Tensor) -> str:
    return f"{row.dtype} {tuple(row.shape)}".removeprefix("torch.")


def _as_tensors(columns: Any) -> Any:
    """Stacks the columns that are lists of tensors; ConfigurationError for other lists, and for several shapes or
    dtypes.
    """
    indices = count()

    def stack(column: torch.Tensor | list) -> torch.Tensor:
        index = next(indices)
        if isinstance(column, torch.Tensor):
            return column
        others = [type(row).__name__ for row in column if not isinstance(row, torch.Tensor)]
        if others:
            raise ConfigurationError(f"column {index} of the samples holds {others[0]}s; {UNIFORM_ROWS_HINT}")
        kinds = [*dict.fromkeys(map(_describe, column))]
        if len(kinds) > 1:
            both = f"rows of {kinds[0]} and of {kinds[1]}"
            raise ConfigurationError(f"column {index} of the samples holds {both}; {UNIFORM_ROWS_HINT}")
        return torch.stack(column)

    return map_columns(stack, columns)
