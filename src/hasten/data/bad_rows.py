"""Rows that cannot be read: the first one ends the run, or some of them are left out, counted and listed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy

from hasten.core.errors import RunError
from hasten.data.source import BadRow, Source


class BadRowPolicy:
    """The bad rows of a pipeline, each counted once however often it is met.

    Attributes:
        at_most: how many may be left out.
        found: the rows that were, by number.
    """

    def __init__(self, at_most: int = 0):
        self.max_rows, self.found = at_most, {}

    def readable(self, source: Source, rows: numpy.ndarray) -> tuple[Any, numpy.ndarray, list[BadRow]]:
        """(the columns of the rows that can be read, None where there are none; these rows; the bad ones).

        Raises:
            Failure: more are bad than may be left out.
        """
        bad = []
        if self.found:  # these are not met again: each would have the others read once more
            known = numpy.fromiter((row in self.found for row in rows.tolist()), bool, len(rows))
            bad, rows = [self.found[row] for row in rows[known].tolist()], rows[~known]
        while len(rows):
            try:
                return source.read(rows), rows, bad
            except BadRow as fault:
                lost = numpy.isin(rows, fault.rows)
                bad += [BadRow(row, fault.where, fault.why) for row in rows[lost].tolist()] or [fault]
                rows = rows[~lost]
                if len(bad) > self.max_rows:
                    raise self.failure(bad[self.max_rows]) from fault
        return None, rows, bad

    def record(self, fault: BadRow) -> None:
        """Counts a row that was left out.

        Raises:
            Failure: it is one too many.
        """
        self.found[fault.row] = fault
        if len(self.found) > self.max_rows:
            raise self.failure(fault)

    def listed(self) -> list[dict]:
        """The rows that were left out, in their order, as plain JSON: {"row", "where", "why"}."""
        return [{"row": row, "where": fault.where, "why": fault.why} for row, fault in sorted(self.found.items())]

    def restore(self, rows: Iterable[dict]) -> None:
        """The rows that were left out are these, as ``listed`` told them."""
        self.found = {row["row"]: BadRow(**row) for row in rows}

    def failure(self, fault: BadRow) -> RunError:
        """What is said about a row that may not be left out."""
        if not self.max_rows:
            how = ".skip_bad(10) in the pipeline, or --max-bad-rows 10 with hasten train and hasten data"
            return RunError(f"{fault}; mend it, or let some be left out: {how}")
        return RunError(f"{fault}; it is bad row number {self.max_rows + 1}, and {self.max_rows} may be left out")
