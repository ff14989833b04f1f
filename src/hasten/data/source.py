"""The interface of a source: rows that are read by index, many at a time, as columns.

All promises of a pipeline (the same batches for any number of workers and ranks, resume at any batch, valid caches)
follow from it: a batch is a function of row indices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch

from hasten.core.errors import RunError
from hasten.utils.tree import tree_leaves, tree_map


class Source(ABC):
    """Rows that are read by index; a row is one sample.

    ``read`` returns *columns*: a tensor whose first dimension is the row, or a tuple or dict of columns. A column whose
    rows have different shapes, or hold text or bytes, is a list.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows, bad ones included."""

    @abstractmethod
    def read(self, rows: numpy.ndarray) -> Any:
        """Returns the columns of the given rows (int64, shape (n,), each in [0, len)), in the given order; BadRow if
        one cannot be read. Several threads may call this at once.
        """

    @abstractmethod
    def fingerprint(self) -> dict:
        """Returns JSON values that change when the rows change (files with sizes and times, columns, options): the key
        of a cache of the rows.
        """

    def chunk_offsets(self) -> numpy.ndarray:
        """Returns the first row, int64, of every chunk of rows read together (row group, shard), and the end."""
        return numpy.array([0, len(self)])

    def known_bad_rows(self) -> list[BadRow]:
        """Returns rows that are known to be unreadable without reading them, such as those of a missing file."""
        return []

    def prepare(self, runner: Callable, faults: BadRowPolicy) -> None:
        """Called before every epoch in the process that iterates, to fill a cache or to reopen changed files.

        ``runner`` computes work items in threads or processes (``workers/runners.py``); ``faults`` counts bad rows.
        """
        return


class WrappedSource(Source):
    """A source around another one with the same rows: forwards everything but ``read`` and ``fingerprint``."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def chunk_offsets(self) -> numpy.ndarray:
        return self.source.chunk_offsets()

    def known_bad_rows(self) -> list[BadRow]:
        return self.source.known_bad_rows()

    def prepare(self, runner: Callable, faults: BadRowPolicy) -> None:
        self.source.prepare(runner, faults)


class BadRow(Exception):  # noqa: N818  # skipping it is no error
    """Row ``row`` cannot be read. The pipeline turns it into a RunError, or skips the row.

    ``where`` is the file and the position in it, ``why`` the reason, ``rows`` all of the requested rows that cannot be
    read for this reason, including ``row``.
    """

    def __init__(self, row: int, where: str, why: str, rows: Iterable[int] = ()) -> None:
        super().__init__(f"row {row} ({where}): {why}")
        self.row, self.where, self.why = int(row), where, why
        self.rows = list(map(int, rows)) or [self.row]

    def __reduce__(self) -> tuple:
        return type(self), (self.row, self.where, self.why, self.rows)  # worker processes pickle it


class BadRowPolicy:
    """Counts the bad rows of a pipeline, each once however often it is read, and refuses more than ``max_rows``."""

    def __init__(self, max_rows: int = 0) -> None:
        self.max_rows = max_rows  # how many rows may be skipped; 0 makes the first bad row an error
        self.found: dict[int, BadRow] = {}  # index of a skipped row -> its error

    def readable(self, source: Source, rows: numpy.ndarray) -> tuple[Any, numpy.ndarray, list[BadRow]]:
        """Returns (columns of the readable rows, None if there are none; indices of these rows; errors of the bad
        rows), without counting them. RunError if more than ``max_rows`` of the given rows are bad.
        """
        bad: list[BadRow] = []
        if self.found:  # do not read known bad rows: each error would make the good rows be read once more
            known = numpy.fromiter((row in self.found for row in rows.tolist()), bool, len(rows))
            bad, rows = [self.found[row] for row in rows[known].tolist()], rows[~known]
        while len(rows):
            try:
                return read_rows(source, rows), rows, bad
            except BadRow as fault:
                lost = numpy.isin(rows, fault.rows)
                bad += [BadRow(row, fault.where, fault.why) for row in rows[lost].tolist()] or [fault]
                rows = rows[~lost]
                if len(bad) > self.max_rows:
                    raise self.failure(bad[self.max_rows]) from fault
        return None, rows, bad

    def record(self, *faults: BadRow) -> None:
        """Counts skipped rows, each once however often it is read; RunError if they are more than ``max_rows``."""
        for fault in faults:
            self.found[fault.row] = fault
            if len(self.found) > self.max_rows:
                raise self.failure(fault)

    def listed(self) -> list[dict]:
        """Returns the skipped rows in ascending order as JSON values: {"row", "where", "why"}."""
        return [{"row": row, "where": fault.where, "why": fault.why} for row, fault in sorted(self.found.items())]

    def restore(self, rows: Iterable[dict]) -> None:
        """Replaces the skipped rows by those that ``listed`` returned in an earlier run."""
        self.found = {row["row"]: BadRow(**row) for row in rows}

    def failure(self, fault: BadRow) -> RunError:
        """Returns the error for the bad row with which the limit ``max_rows`` is exceeded."""
        if not self.max_rows:
            how = ".skip_bad_rows(max_rows=10) in the pipeline, or --max-bad-rows 10 with hasten train and hasten data"
            return RunError(f"{fault}; repair it, or allow bad rows to be skipped: {how}")
        limit = f"it is bad row number {self.max_rows + 1}, and max_rows={self.max_rows} may be skipped"
        return RunError(f"{fault}; {limit}; repair it, or allow more")


def read_rows(source: Source, rows: numpy.ndarray) -> Any:
    """Returns ``source.read(rows)``. RunError if a source of the user's returns another number of rows."""
    columns = source.read(rows)
    if not type(source).__module__.startswith("hasten."):
        for column in column_leaves(columns):
            if len(column) != len(rows):
                problem = f"{type(source).__name__}.read returned {len(column)} rows for the {len(rows)} asked for"
                raise RunError(f"{problem}; raise BadRow for a row that cannot be read")
    return columns


def refuse_bad(rows: numpy.ndarray, bad: Mapping[int, tuple[str, str]]) -> None:
    """Raises BadRow for the first of ``rows`` that is a key of ``bad``: {row: (where, why)}."""
    for row in rows.tolist() if bad else ():
        if row in bad:
            raise BadRow(row, *bad[row])


def split_target(columns: dict, target: str | None) -> Any:
    """Returns ``columns``; with a target, which it removes from them, the tuple (other columns in order, target)."""
    if target is None:
        return columns
    last = columns.pop(target)
    return *columns.values(), last


def unbatch(columns: Any) -> list:
    """Splits columns (nested tensors and lists) into a list with one sample per row."""
    if isinstance(columns, Mapping):
        return [dict(zip(columns, values, strict=True)) for values in zip(*map(unbatch, columns.values()), strict=True)]
    if isinstance(columns, tuple):
        rows, kind = zip(*map(unbatch, columns), strict=True), type(columns)
        return [kind(*row) for row in rows] if hasattr(columns, "_fields") else list(rows)
    return list(columns)


def length_of(columns: Any) -> int:
    """Returns the number of rows of nested columns."""
    return len(column_leaves(columns)[0])


def column_leaves(columns: Any) -> list[torch.Tensor | list]:
    """Returns the tensors and lists in nested columns (tuples, dicts), in order."""
    return tree_leaves(columns, _is_column)


def map_columns(function: Callable[[Any], Any], columns: Any) -> Any:
    """Returns ``columns`` with ``function`` applied to every column, nested in the same way."""
    return tree_map(function, columns, _is_column)


def _is_column(node: Any) -> bool:
    """Whether a node of nested columns is a column; a list is one: it holds rows that fit into no tensor."""
    return not isinstance(node, (tuple, Mapping))
