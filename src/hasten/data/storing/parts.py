"""A conversion in parts: which rows each has, and what a storage has to do with it.

Each part is written beside (``.part``), read back, and only then gets its name, so that whatever has its own name is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from hasten.data.storing.digests import Digest
from hasten.data.storing.readings import Reading
from hasten.engine.failures import disk_trouble

PART = ".part"
Tell = Callable[[int], None]  # told how many rows more are written


@dataclass
class Plan:
    """Rows that go into a folder, in so many parts."""

    reading: Reading
    folder: Path
    parts: int

    def range(self, number: int) -> tuple[int, int]:
        """The first row of a part, and the first after it."""
        rows = self.reading.rows
        return rows * number // self.parts, rows * (number + 1) // self.parts


class Storage(Protocol):
    """How the parts of a plan are stored. The hashes are of the content."""

    def write(self, number: int, tell: Tell) -> Digest:
        """Writes a part beside; the hash of what was to be written."""

    def read_back(self, number: int) -> Digest:
        """The hash of what was written."""

    def keep(self, number: int) -> None:
        """The part is good."""

    def finish(self) -> dict:
        """All parts are good; {"files": their names, and what a reader has to be told about them}."""


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
