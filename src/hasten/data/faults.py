"""Rows that cannot be read: the first one ends the run, or some of them are left out, counted and listed."""

from __future__ import annotations

from hasten.contract.errors import Failure
from hasten.data.source import BadRow


class Faults:
    """The bad rows of a pipeline, each counted once however often it is met.

    Attributes:
        at_most: how many may be left out.
        found: the rows that were, by number.
    """

    def __init__(self, at_most: int = 0):
        self.at_most, self.found = at_most, {}

    def note(self, fault: BadRow) -> None:
        """Counts a row that was left out.

        Raises:
            Failure: it is one too many.
        """
        self.found[fault.row] = fault
        if len(self.found) > self.at_most:
            raise self.failure(fault)

    def failure(self, fault: BadRow) -> Failure:
        """What is said about a row that may not be left out."""
        if not self.at_most:
            return Failure(f"{fault}; mend it, or let some be left out: .skip_bad(10), or --skip-bad 10")
        return Failure(f"{fault}; it is bad row number {self.at_most + 1}, and {self.at_most} may be left out")
