"""``hasten data inspect``: what is stored at a path, how fast it is read, and which format would be faster.

Everything is measured on these data: some of them are read from the disk, decoded, copied into batches, stored in other
formats and read back. No file is left behind; the page cache of the measured files is dropped once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy
import psutil
import torch

from hasten.core.errors import ConfigurationError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.formats.table_source import MEMORY_FRACTION
from hasten.data.formats.webdataset import IMAGE_TYPES
from hasten.data.io.paths import is_remote
from hasten.data.source import BadRow
from hasten.data.validation import at_least
from hasten.datatools.advice import better_storages, side_of, slower_of, workplace
from hasten.datatools.file_sampling import some_of
from hasten.datatools.format_detection import classes_of, counted, kinds_at, named, openable
from hasten.datatools.row_reader import CHUNK, RowReader, stamped
from hasten.datatools.stage_throughput import paces, reading_pace

SIDE = 256  # pixels; larger images are measured resized to squares of this side
LOOKED_AT = 16  # images that are examined to find out whether all have one size
COUNTED = 10_000  # files whose sizes are added up; of more files, a sample is extrapolated
SHARES = {"disk": 0.1, "pace": 0.2, "storages": 0.6}  # of the budget


def inspect(
    path: str | Path,
    *,
    target: str | None = None,
    max_bad_rows: int | None = None,
    budget: float = 20.0,
    watch: ProgressCallback = no_progress,
) -> dict:
    """Inspects stored data: what they are, how fast they are read into batches, and which format would be faster.

    Args:
        path: a folder, a file or a pattern; of several formats, the one with the most files is inspected.
        target: the column of a table to predict; the others are then one matrix, if they are numbers, as in training.
        skip_bad: skip up to this many unreadable rows or files, as in ``convert``; None: the first one is "trouble".
        budget: seconds to spend, about.
        watch: progress.

    Returns:
        "kind", "title", "files", "bytes", "others" (files of other forms, by form), "rows" ("rows_exact": False where
        they were counted in some of the files), "columns" ({name: type}), "classes" (their words in the order of their
        numbers, or None), "target", "resize" (what pictures were resized to, to be measured), "speed" ({"disk",
        "page_cache", "network": bytes a second; "decode", "copy", "batches": rows a second on one core}: medians, None
        for what is not there), "ranges" ({name: [low, high]} of the readings, where there were several), "in_memory"
        (the files fit there, so that the disk counts in the first pass alone), "limit" ("disk", "network", "decode" or
        "copy"), "passes" ("first" where later ones take decoded rows from memory, else "every"), "storages" (what would
        be faster here, as ``better_storages`` gives it), "max_bad_rows", "skipped_rows" ({"row", "where", "why"} of what could
        not be read, of all that was looked at; a file has no row), "trouble" (why rows could not be measured),
        "seconds".

    Raises:
        Refusal: nothing is there, or a file that cannot be opened.
        Failure: more cannot be read than may be left out.
    """
    began = perf_counter()
    at_least("max_bad_rows", max_bad_rows, 1, optional=True)
    watch("opening", 0.0, budget)
    (kind, files), *others = kinds_at(path)
    files, lost = openable(kind, files, max_bad_rows or 0)
    faults = BadRowPolicy((max_bad_rows or 0) - len(lost))
    size, remote = _bytes_of(files, faults), is_remote(files[0])
    with workplace() as folder:
        some, taken = some_of(kind, files, folder)
        share = 1.0 if taken is None else taken / size
        fill = 0 if kind.is_table else None  # which numbers are missing does not change the speed
        reading = _in_one_size(
            RowReader(kind, str(path) if kind.name == "images" else some, some, target, fill, faults=faults)
        )
        try:
            if not reading.rows:
                raise ConfigurationError(f"{path} holds no rows")
        except ConfigurationError as refused:
            raise ConfigurationError(
                str(refused).replace(some[0], files[0])
            ) from None  # not the temporary file with its first lines
        rows, memory = round(reading.rows / share), psutil.virtual_memory().available
        result = {
            "path": str(path),
            "kind": kind.name,
            "title": kind.title,
            "files": len(files),
            "bytes": size,
            "rows": rows,
            "rows_exact": share == 1.0,
            "target": target,
            "resize": side_of(reading.resize),
            "in_memory": size < memory / 2 and not remote,
            "others": counted(others),
            "classes": None,
            "columns": {},
            "passes": "every",
            "limit": None,
            "storages": [],
            "trouble": None,
            "max_bad_rows": max_bad_rows,
        }
        watch("reading", 0.05, budget)
        readings = reading_pace(files, SHARES["disk"] * budget)
        watch("decoding", 0.2, 0.8 * budget)
        try:
            result["columns"] = {name: _type(column) for name, column in reading.like.items()}
            readings |= paces(reading, SHARES["pace"] * budget)
            result["classes"] = classes_of(reading.source, files)
        except (BadRow, ConfigurationError) as error:
            readings |= dict.fromkeys(("decode", "copy", "batches"))
            result["trouble"] = str(error).replace(some[0], files[0])
        speed = result["speed"] = {name: each and median(each) for name, each in readings.items()}
        result["ranges"] = {name: [min(each), max(each)] for name, each in readings.items() if each and len(each) > 1}
        if speed["batches"]:
            disk = None if result["in_memory"] else speed["disk"] or speed["network"]
            if kind.is_table and rows * CHUNK / reading.chunk < memory * MEMORY_FRACTION:
                result["passes"] = "first"
            result["limit"] = _limit(speed, size / rows, {"network" if remote else "disk": disk})
            before = [slower_of(each, size / rows, disk) for each in readings["batches"]]
            left = began + budget - perf_counter()
            here = None if remote else disk  # a converted copy would be on this machine
            result["storages"] = better_storages(
                reading, before, rows, here, min(left, SHARES["storages"] * budget), watch
            )
    return result | {"skipped_rows": lost + faults.listed(), "seconds": perf_counter() - began}


def _limit(speed: dict, row: float, places: dict) -> str:
    """The slowest stage for rows of ``row`` bytes; ``places``: bytes/s of the disk or network, if it counts."""
    seconds = {name: 1 / speed[name] for name in ("decode", "copy") if speed[name]}
    seconds |= {name: row / rate for name, rate in places.items() if rate}
    return max(seconds, key=seconds.get)


# ---- what is looked at


def _bytes_of(files: list[str], faults: BadRowPolicy) -> int:
    looked_at = files[:: -(-len(files) // COUNTED)]
    return round(sum(stamped(file, faults)[1] for file in looked_at) * len(files) / len(looked_at))


def _in_one_size(reading: RowReader) -> RowReader:
    """Images of one size, as batches need them: their own if all have the same and it is small, else a square."""
    if reading.kind.name not in ("images", "shards"):
        return reading
    rows = (
        numpy.unique(numpy.linspace(0, reading.rows - 1, LOOKED_AT).astype(numpy.int64))
        if reading.rows
        else numpy.arange(0)
    )
    sizes = {tuple(picture.shape[1:]) for picture in _pictures(reading, rows)}
    if not sizes:
        return reading
    size = sizes.pop()
    return replace(reading, resize=size if not sizes and max(size) <= SIDE else SIDE)


def _pictures(reading: RowReader, rows: numpy.ndarray) -> list[torch.Tensor]:
    try:
        there = reading.read(reading.source, rows) if len(rows) else None
    except BadRow:
        there = None  # reported when it is measured
    columns = {} if there is None else named(there, reading.kind)
    of_pictures = [
        column for name, column in columns.items() if name == "pictures" or name.rpartition(".")[2] in IMAGE_TYPES
    ]
    return of_pictures[0] if of_pictures else []


def _type(column) -> str:
    """``float32``, ``uint8 (3, 32, 32)``, ``text``, ``lists of int64``."""
    if isinstance(column, torch.Tensor):
        kind = str(column.dtype).removeprefix("torch.")
        return f"{kind} {tuple(column.shape[1:])}" if column.ndim > 1 else kind
    first = column[0] if column else None
    if isinstance(first, torch.Tensor):
        return f"lists of {first.dtype}".replace("torch.", "")
    return {str: "text", bytes: "bytes"}.get(type(first), f"lists of {type(first).__name__}")
