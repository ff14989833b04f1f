"""A conversion in parts: which rows each part has, and the interface of the writers of storage formats.

Each part is written under a temporary name (``.part``) and read back. Parts get their final names when all are written:
a file with a final name is complete, and no reader mistakes a part of the data for all of it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from hasten.datatools.content_hash import ContentHash
from hasten.datatools.row_reader import RowReader

PART = ".part"
ReportRows = Callable[[int], None]  # called with the number of rows written since the last call


@dataclass
class ShardPlan:
    """Rows that are written into a directory in several parts."""

    reader: RowReader  # reads the rows
    directory: Path  # where they are written
    parts: int  # number of parts
    # (number of rows, content hash) of each part that is written; skipped rows are not counted
    done: list[tuple[int, str]] = field(default_factory=list)

    def range(self, part: int) -> tuple[int, int]:
        """Returns (first row, end) of a part; the end is exclusive."""
        rows = self.reader.rows
        return rows * part // self.parts, rows * (part + 1) // self.parts

    def rows_before(self, part: int) -> int:
        """Returns the number of rows written in the parts before this one."""
        return sum(rows for rows, _ in self.done[:part])


class Writer(Protocol):
    """Writes the parts of a plan in one storage format. Hashes are of the content, not of the files."""

    def write(self, part: int, report: ReportRows) -> ContentHash:
        """Writes a part under its temporary name; returns the hash of what it should contain."""
        ...

    def read_back(self, part: int) -> ContentHash:
        """Reads back ``part``, which was written last; returns the hash of its content."""
        ...

    def finish(self) -> dict:
        """Gives all parts their final names; returns ``{"files": names}`` and what else a reader requires."""
        ...


def fsync(file: IO) -> None:
    """Flushes a file to the disk, so that its content survives a power failure."""
    file.flush()
    os.fsync(file.fileno())
