"""Some of the files, where opening all of them would take long: those whose contents have to be walked through."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from hasten.contract.errors import Refusal, one_line
from hasten.data.places.files import opened, stamp
from hasten.data.storing.kinds import Kind

SAMPLED = 256_000_000  # bytes of files that have to be walked through
SAMPLED_TEXT = 16_000_000  # bytes of CSV


def some_of(kind: Kind, files: list[str], folder: Path) -> tuple[list[str], int | None]:
    """(files to measure, how many bytes of the original they hold; None for all): all of them, unless opening them takes long.

    Args:
        folder: where a file of the first lines of a long text may be written.
    """
    if not kind.walked:
        return files, None
    some, taken = [], 0
    for file in files:
        some.append(file)
        taken += stamp(file)[1]
        if taken > SAMPLED:
            break
    if kind.name == "csv" and taken > SAMPLED_TEXT:
        head, taken = _head(files[0], folder)
        return [head], taken
    return some, None if some == files else taken


def _head(file: str, folder: Path) -> tuple[str, int]:
    """(a file of the first lines, how many bytes they take in the original).

    Raises:
        Refusal: it cannot be unpacked.
    """
    with opened(file) as raw, gzip.open(raw) if file.endswith(".gz") else raw as content:
        try:
            lines = content.read(SAMPLED_TEXT)
        except (OSError, EOFError, zlib.error) as error:
            raise Refusal(f"{file} is no whole CSV file: {one_line(error)}") from None
        taken = raw.tell()
    path = folder / Path(file).name.removesuffix(".gz")
    path.write_bytes(lines[: lines.rfind(b"\n") + 1])
    return str(path), taken
