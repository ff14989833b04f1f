"""Selects some of the files where opening all would take long, because their format has no index."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from hasten.core.errors import ConfigurationError, format_error
from hasten.data.io.paths import file_signature, open_file
from hasten.datatools.format_detection import StorageFormat

SAMPLED = 256_000_000  # bytes of files of a format without an index
SAMPLED_TEXT = 16_000_000  # bytes of CSV
LONGEST = 1_000_000  # bytes of a quoted text that contains line breaks


def some_of(kind: StorageFormat, files: list[str], folder: Path) -> tuple[list[str], int | None]:
    """Selects the files to measure: all, unless opening them takes long.

    Args:
        kind: their format.
        files: their paths.
        folder: where a file with the first lines of a large CSV file may be written.

    Returns:
        (paths, number of bytes of the original files in them; None for all).
    """
    if not kind.walked:
        return files, None
    some, taken = [], 0
    for file in files:
        some.append(file)
        taken += file_signature(file)[1]
        if taken > SAMPLED:
            break
    if kind.name == "csv" and taken > SAMPLED_TEXT:
        head, taken = _head(files[0], folder)
        return [head], taken
    return some, None if some == files else taken


def _head(file: str, folder: Path) -> tuple[str, int]:
    """(path of a file with the first lines, number of bytes that they take in the original).

    Raises:
        Refusal: the file cannot be decompressed.
    """
    with open_file(file) as raw, gzip.open(raw) if file.endswith(".gz") else raw as content:
        try:
            lines = content.read(SAMPLED_TEXT)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigurationError(f"{file} is no whole CSV file: {format_error(error)}") from None
        taken = raw.tell()
    path = folder / Path(file).name.removesuffix(".gz")
    path.write_bytes(_whole(lines))
    return str(path), taken


def _whole(lines: bytes) -> bytes:
    """The complete lines, up to the last line break outside quotes; beyond LONGEST, quotes are plain text."""
    last = end = lines.rfind(b"\n") + 1
    inside = lines.count(b'"', 0, end) % 2
    while inside and last - end < LONGEST:
        begin = lines.rfind(b"\n", 0, end - 1) + 1
        inside ^= lines.count(b'"', begin, end) % 2
        end = begin
    return lines[: last if inside else end]
