"""Rows that cannot be read: the first one ends the run, or up to a limit they are skipped and listed."""

from collections.abc import Iterable
from typing import Any

import numpy

from hasten.core.errors import RunError
from hasten.data.source import BadRow, Source


class BadRowPolicy:
    """Counts the bad rows of a pipeline, each row once, however often it is read."""

    def __init__(self, max_rows: int = 0) -> None:
        self.max_rows = max_rows  # how many rows may be skipped; 0 makes the first bad row an error
        self.found: dict[int, BadRow] = {}  # index of a skipped row -> its error

    def readable(self, source: Source, rows: numpy.ndarray) -> tuple[Any, numpy.ndarray, list[BadRow]]:
        """Returns (columns of the readable rows, None if there are none; their indices; errors of the bad rows).
        RunError if more than ``max_rows`` of these rows are bad.
        """
        bad: list[BadRow] = []
        if self.found:  # do not read known bad rows: each error would make the good rows be read once more
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
        """Counts a skipped row, once however often it is read; RunError if they are more than ``max_rows``."""
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
        return RunError(f"{fault}; {limit}")
