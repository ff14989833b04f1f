"""A conversion in parts: which rows each part has, and what a storage format must implement.

Each part is written to a temporary name (``.part``) and read back. Parts get their final names only when all are
written, so a file with a final name is complete, and no reader takes half of the data for all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from hasten.datatools.content_hash import ContentHash
from hasten.datatools.row_reader import RowReader
from hasten.engine.error_messages import translate_disk_errors

PART = ".part"
Tell = Callable[[int], None]  # called with the number of rows written since the last call


@dataclass
class ShardPlan:
    """Rows that are written into a folder in several parts.

    Attributes:
        reading: the rows.
        folder: where they are written.
        parts: the number of parts.
        done: (number of rows, content hash) of each part that is written. Bad rows are not in it.
    """

    reading: RowReader
    folder: Path
    parts: int
    done: list[tuple[int, str]] = field(default_factory=list)

    def range(self, number: int) -> tuple[int, int]:
        """(first row, end) of a part; the end is exclusive."""
        rows = self.reading.rows
        return rows * number // self.parts, rows * (number + 1) // self.parts

    def rows_before(self, number: int) -> int:
        """Number of rows written in the parts before this one."""
        return sum(rows for rows, _ in self.done[:number])


class Storage(Protocol):
    """A storage format: writes the parts of a plan. Hashes are of the content, not of the files."""

    def write(self, number: int, tell: Tell) -> ContentHash:
        """Writes a part under its temporary name; returns the hash of what should be in it."""

    def read_back(self, number: int) -> ContentHash:
        """Reads the part that was written last; returns its hash."""

    def finish(self) -> dict:
        """Gives all parts their final names; returns ``{"files": names}`` and what else a reader must know."""


def fsync(file: IO) -> None:
    """Writes a file's content through to the disk, so that it survives a power failure."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def translate_write_errors(folder: Path, advice: str) -> Iterator[None]:
    """Translates errors of the file system while writing to ``folder`` into one line with ``advice``."""
    try:
        yield
    except OSError:
        with translate_disk_errors(folder, advice):
            raise
