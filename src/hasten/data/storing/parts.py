"""A conversion in parts: which rows each has, and what a storage has to do with it.

Each part is written beside (``.part``) and read back. Only when all are there do they get their names, so that whatever has its own
name is whole, and nobody reads half of the data by mistake.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from hasten.data.storing.digests import Digest
from hasten.data.storing.readings import Reading
from hasten.engine.failures import disk_trouble

PART = ".part"
Tell = Callable[[int], None]  # told how many rows more are written


@dataclass
class Plan:
    """Rows that go into a folder, in so many parts.

    Attributes:
        done: the parts that are written, each by the number of its rows and their hash. Bad rows were left out of them.
    """

    reading: Reading
    folder: Path
    parts: int
    done: list[tuple[int, str]] = field(default_factory=list)

    def range(self, number: int) -> tuple[int, int]:
        """The first row of a part, and the first after it."""
        rows = self.reading.rows
        return rows * number // self.parts, rows * (number + 1) // self.parts

    def rows_before(self, number: int) -> int:
        """The rows that were written of the parts before this one."""
        return sum(rows for rows, _ in self.done[:number])


class Storage(Protocol):
    """How the parts of a plan are stored. The hashes are of the content."""

    def write(self, number: int, tell: Tell) -> Digest:
        """Writes a part beside; the hash of what was to be written."""

    def read_back(self, number: int) -> Digest:
        """The hash of the part that was written last."""

    def finish(self) -> dict:
        """All parts are good and get their names; {"files": these, and what a reader has to be told about them}."""


def synced(file: BinaryIO) -> None:
    """What was written outlives a power cut."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def into(folder: Path, advice: str) -> Iterator[None]:
    """What the system refuses while something is written, in one line."""
    try:
        yield
    except OSError:
        with disk_trouble(folder, advice):
            raise
