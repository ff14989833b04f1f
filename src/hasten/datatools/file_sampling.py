"""Selects some of the files of a format without an index, where opening all files would take long."""

import gzip
import zlib
from pathlib import Path

from hasten.core.errors import ConfigurationError, format_error
from hasten.data.io.paths import file_signature, open_file
from hasten.datatools.format_detection import StorageFormat

SAMPLED_BYTES = 256_000_000  # of files without an index
SAMPLED_CSV_BYTES = 16_000_000
MAX_QUOTED_BYTES = 1_000_000  # of a quoted string that contains line breaks


def sample_files(kind: StorageFormat, files: list[str], directory: Path) -> tuple[list[str], int | None]:
    """Selects the files to measure: all, unless opening them takes long. Returns (paths, number of bytes of the
    original files in them; None for all). The first lines of a large CSV file may be written to a file in
    ``directory``.
    """
    if kind.has_index:
        return files, None
    sample, size = [], 0
    for file in files:
        sample.append(file)
        size += file_signature(file)[1]
        if size > SAMPLED_BYTES:
            break
    if kind.name == "csv" and size > SAMPLED_CSV_BYTES:
        head, size = _head(files[0], directory)
        return [head], size
    return sample, None if sample == files else size


def _head(file: str, directory: Path) -> tuple[str, int]:
    """(path of a copy of the first lines, bytes that they take in the original); ConfigurationError if truncated."""
    with open_file(file) as raw, gzip.open(raw) if file.endswith(".gz") else raw as content:
        try:
            lines = content.read(SAMPLED_CSV_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigurationError(f"{file} is not a complete CSV file: {format_error(error)}") from None
        size = raw.tell()
    path = directory / Path(file).name.removesuffix(".gz")
    path.write_bytes(_complete_lines(lines))
    return str(path), size


def _complete_lines(lines: bytes) -> bytes:
    """Cuts CSV text behind its last line break outside quotes (quotes count for MAX_QUOTED_BYTES at most)."""
    last = end = lines.rfind(b"\n") + 1
    inside = lines.count(b'"', 0, end) % 2
    while inside and last - end < MAX_QUOTED_BYTES:
        begin = lines.rfind(b"\n", 0, end - 1) + 1
        inside ^= lines.count(b'"', begin, end) % 2
        end = begin
    return lines[: last if inside else end]
