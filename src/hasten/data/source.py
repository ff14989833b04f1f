"""What a source is: rows that can be read by number, many at a time.

Everything that the pipeline promises (the same batches for any number of workers or ranks, resumption at any
batch, caches that can be trusted) follows from this one shape: a batch is a function of row numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch

from hasten.utils.tree import tree_leaves, tree_map


class Source(ABC):
    """Rows that are read by number.

    A row is one sample. ``read`` gives many of them at once as *columns*: a tensor, or a tuple or dict of tensors,
    whose first dimension is the row. A column whose rows have unequal shapes, or hold text or bytes, is a list.
    """

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def read(self, rows: numpy.ndarray) -> Any:
        """The columns of the given rows, in the order asked for. Safe to call from several threads at once.

        Args:
            rows: int64, shape (n,), each in [0, len).

        Raises:
            BadRow: a row that cannot be read.
        """

    @abstractmethod
    def fingerprint(self) -> dict:
        """What the rows are made of, as plain JSON: files with their sizes and times, columns, settings. Keys the caches."""

    def chunk_offsets(self) -> numpy.ndarray:
        """Where the runs of rows that are read best together begin, and the end: int64, shape (runs + 1,)."""
        return numpy.array([0, len(self)])

    def known_bad_rows(self) -> list[BadRow]:
        """The rows of which it is known, before they are read, that they cannot be."""
        return []

    def prepare(self, runner: Callable, faults) -> None:
        """Called before every pass, in the process that iterates: the moment to fill a cache, or to open anew what has changed.

        Args:
            runner: shares the work among threads or processes.
            faults: how many rows may be bad.
        """
        return


class BadRow(Exception):
    """A row that cannot be read: its number, where it is, and why. The pipeline turns it into a Failure, or skips it.

    Attributes:
        rows: all rows of those asked for of which the same is known, this one among them.
    """

    def __init__(self, row: int, where: str, why: str, rows: Iterable[int] = ()):
        super().__init__(f"row {row} ({where}): {why}")
        self.row, self.where, self.why = int(row), where, why
        self.rows = list(map(int, rows)) or [self.row]

    def __reduce__(self):
        return type(self), (self.row, self.where, self.why, self.rows)  # travels between processes


def refuse_bad(rows: numpy.ndarray, bad: Mapping[int, tuple[str, str]]) -> None:
    """Raises a BadRow for the first of these rows that is known to be one: {row: (where, why)}."""
    for row in rows.tolist() if bad else ():
        if row in bad:
            raise BadRow(row, *bad[row])


def unbatch(columns) -> list:
    """The samples of a batch of columns, one by one."""
    if isinstance(columns, Mapping):
        return [dict(zip(columns, values, strict=True)) for values in zip(*map(unbatch, columns.values()), strict=True)]
    if isinstance(columns, tuple):
        return list(zip(*map(unbatch, columns), strict=True))
    return list(columns)


def length_of(columns) -> int:
    """Returns the number of rows that the columns hold."""
    return len(column_leaves(columns)[0])


def column_leaves(columns) -> list[torch.Tensor | list]:
    """Returns every column, in order."""
    return tree_leaves(columns, _is_column)


def column_spec(columns) -> str:
    """Returns how the columns are nested and named, in order, as text: ``{'a': (0, 0), 'b': 0}``."""
    return str(map_columns(lambda column: 0, columns))


def map_columns(function: Callable[[Any], Any], columns):
    """Returns ``columns`` with ``function`` applied to every column, nested in the same way."""
    return tree_map(function, columns, _is_column)


def _is_column(node) -> bool:
    """A list is a column (of rows that no tensor holds), not a container of columns."""
    return not isinstance(node, (tuple, Mapping))
