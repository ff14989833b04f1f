"""``hasten data inspect``: what is stored at a path, how fast it is read, and which format would be faster.

Everything is measured on these data: some of them are read from the disk, decoded, copied into batches, stored in other
formats and read back. No file is left behind unless the process is killed; the page cache of the measured files is
dropped once.
"""

import gzip
import zlib
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, format_error
from hasten.core.progress import ProgressCallback, no_progress
from hasten.data.formats.table_files import MEMORY_FRACTION
from hasten.data.formats.webdataset import IMAGE_TYPES
from hasten.data.io.paths import file_signature, is_remote, open_file, plain
from hasten.data.source import BadRow, BadRowPolicy
from hasten.data.validation import at_least
from hasten.datatools.advice import better_storages, limit_by_disk, side_of, temporary_directory
from hasten.datatools.format_detection import (
    StorageFormat,
    class_names,
    count_by_title,
    flatten_columns,
    formats_at,
    select_openable,
)
from hasten.datatools.row_reader import CHUNK, RowReader, signature_or_reason
from hasten.datatools.stage_throughput import read_rates, repeated_stage_rates
from hasten.engine.resources import free_memory

MAX_SIDE = 256  # pixels; larger images are measured resized to squares of this side
PROBED_IMAGES = 16  # examined to find out whether all have one size
MAX_COUNTED = 10_000  # files whose sizes are added up; of more files, a sample is extrapolated
SAMPLED_BYTES = 256_000_000  # of files without an index
SAMPLED_CSV_BYTES = 16_000_000
MAX_QUOTED_BYTES = 1_000_000  # of a quoted string that contains line breaks
BUDGET_SHARES = {"disk": 0.1, "stages": 0.2, "storages": 0.6}


def inspect(
    path: str | Path,
    *,
    target: str | None = None,
    max_bad_rows: int | None = None,
    budget: float = 20.0,
    on_progress: ProgressCallback = no_progress,
) -> dict:
    """Inspects stored data: what they are, how fast they are read into batches, and which format would be faster.

    Args:
        path: A directory, a file or a pattern; of several formats, the one with the most files is inspected.
        target: The column of a table to predict. As in training, the others are then one matrix if they are numeric.
        max_bad_rows: Skip up to this many unreadable rows or files, as ``convert`` does; None reports the first one as
            "trouble".
        budget: Seconds to spend, about.
        on_progress: Progress callback.

    Returns:
        "path", "kind", "title", "files" (number), "bytes", "others" ({format: number of files} of other formats),
        "rows" ("rows_exact" is False if they were counted in some of the files only), "columns" ({name: type}),
        "classes" (class names in the order of their indices, or None), "target", "resize" (side in pixels that images
        were resized to for measuring), "speed" ({"disk", "page_cache", "network": bytes/s; "decode", "copy", "batches":
        rows/s on one core}: medians, None for a stage that does not exist), "ranges" ({name: [low, high]} of repeated
        measurements), "in_memory" (whether the files fit into memory, so that only the first epoch reads the disk),
        "limit" (the slowest stage: "disk", "network", "decode" or "copy"), "passes" ("first" if later epochs find the
        decoded rows in memory, else "every"), "storages" (faster formats, as of ``better_storages``), "max_bad_rows",
        "skipped_rows" ({"row", "where", "why"} of what could not be read; row is None for a file), "trouble" (why
        speeds could not be measured, or None), "seconds".

    Raises:
        ConfigurationError: There is no file at the path, or a file cannot be opened.
        RunError: More rows cannot be read than may be skipped.
    """
    start = perf_counter()
    at_least("max_bad_rows", max_bad_rows, 1, optional=True)
    on_progress("opening", 0.0, budget)
    (kind, files), *others = formats_at(path)
    files, skipped_files = select_openable(kind, files, max_bad_rows or 0)
    faults = BadRowPolicy((max_bad_rows or 0) - len(skipped_files))
    counted = files[:: -(-len(files) // MAX_COUNTED)]
    size = round(sum(signature_or_reason(file, faults)[1] for file in counted) * len(files) / len(counted))
    with temporary_directory() as directory:
        originals, sample_bytes = _sample_files(kind, files, directory)
        sample = [*originals]
        fraction = 1.0 if sample_bytes is None else sample_bytes / size
        where = plain(path) if kind.name == "images" and Path(plain(path)).is_dir() else sample
        reader = RowReader(kind, where, sample, target, faults=faults)
        try:
            if kind.is_table:  # which values are missing does not change the speed
                reader = replace(reader, fill=reader.source.any_fill())
            reader = _with_common_size(reader)
            if not reader.rows:
                raise ConfigurationError(f"{path} holds no rows")
        except ConfigurationError as error:  # names the user's file, not the temporary one with its first lines
            raise ConfigurationError(str(error).replace(sample[0], originals[sample[0]])) from None
        result = {
            "path": str(path),
            "kind": kind.name,
            "title": kind.title,
            "files": len(files),
            "bytes": size,
            "rows": round(reader.rows / fraction),
            "rows_exact": fraction == 1.0,
            "target": target,
            "resize": side_of(reader.resize),
            "in_memory": size < free_memory() / 2 and not is_remote(files[0]),
            "others": count_by_title(others),
            "classes": None,
            "columns": {},
            "passes": "every",
            "limit": None,
            "storages": [],
            "trouble": None,
            "max_bad_rows": max_bad_rows,
        }
        on_progress("reading", 0.05, budget)
        rates = read_rates(files, BUDGET_SHARES["disk"] * budget)
        on_progress("decoding", 0.2, 0.8 * budget)
        try:
            result["columns"] = {name: _type_name(column) for name, column in reader.like.items()}
            rates |= repeated_stage_rates(reader, BUDGET_SHARES["stages"] * budget)
            result["classes"] = class_names(reader.source, files)
        except (BadRow, ConfigurationError) as error:
            rates |= dict.fromkeys(("decode", "copy", "batches"))
            result["trouble"] = str(error).replace(sample[0], originals[sample[0]])
        result["speed"] = {name: values and median(values) for name, values in rates.items()}
        repeated = {name: values for name, values in rates.items() if values and len(values) > 1}
        result["ranges"] = {name: [min(values), max(values)] for name, values in repeated.items()}
        if rates["batches"]:
            _add_advice(result, reader, rates["batches"], start + budget - perf_counter(), budget, on_progress)
    return result | {"skipped_rows": skipped_files + faults.listed(), "seconds": perf_counter() - start}


def _add_advice(
    result: dict, reader: RowReader, rates: list[float], left: float, budget: float, on_progress: ProgressCallback
) -> None:
    """Sets "limit", "passes" and "storages" of ``result``. ``rates`` are measurements of rows/s into batches; ``left``
    and ``budget`` seconds, left and in all.
    """
    speed, rows, row_bytes = result["speed"], result["rows"], result["bytes"] / result["rows"]
    is_local = speed["network"] is None
    bandwidth = None if result["in_memory"] else speed["disk"] or speed["network"]
    if reader.kind.is_table and rows * CHUNK / reader.chunk < free_memory() * MEMORY_FRACTION:
        result["passes"] = "first"
    seconds = {name: 1 / speed[name] for name in ("decode", "copy") if speed[name]}  # of each stage, for a row
    if bandwidth:
        seconds["disk" if is_local else "network"] = row_bytes / bandwidth
    result["limit"] = max(seconds, key=lambda name: seconds[name])
    before = [limit_by_disk(rate, row_bytes, bandwidth) for rate in rates]
    disk = bandwidth if is_local else None  # a converted copy would be on this machine
    left = min(left, BUDGET_SHARES["storages"] * budget)
    result["storages"] = better_storages(reader, before, rows, disk, left, on_progress)


def _with_common_size(reader: RowReader) -> RowReader:
    """The reader with images of one size, as batches require: their own if all probed images share it and it is at most
    256 pixels high and wide, else squares of 256 pixels.
    """
    if reader.kind.name not in ("images", "webdataset") or not reader.rows:
        return reader
    rows = numpy.unique(numpy.linspace(0, reader.rows - 1, PROBED_IMAGES).astype(numpy.int64))
    try:
        columns = flatten_columns(reader.read(reader.source, rows) or {}, reader.kind)
    except BadRow:  # measuring reports that
        return reader
    named = (column for name, column in columns.items() if name == "images" or name.rpartition(".")[2] in IMAGE_TYPES)
    sizes = {tuple(image.shape[1:]) for image in next(named, ())}
    if not sizes:
        return reader
    size = sizes.pop()
    return replace(reader, resize=size if not sizes and max(size) <= MAX_SIDE else MAX_SIDE)


def _type_name(column: Any) -> str:
    """Describes a column's type: ``float32``, ``uint8 (3, 32, 32)``, ``text``, ``lists of int64``."""
    if isinstance(column, torch.Tensor):
        dtype = str(column.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(column.shape[1:])}" if column.ndim > 1 else dtype
    first: Any = column[0] if column else None
    if isinstance(first, torch.Tensor):
        return f"lists of {first.dtype}".replace("torch.", "")
    if isinstance(first, (str, bytes)):
        return "text" if isinstance(first, str) else "bytes"
    return f"lists of {type(first).__name__}"


def _sample_files(kind: StorageFormat, files: list[str], directory: Path) -> tuple[dict[str, str], int | None]:
    """({file to measure: the original}, bytes of the originals in them or None for all): not all if opening them takes
    long. The first lines of a large CSV file may be written to a file in ``directory``.
    """
    if kind.has_index:
        return {file: file for file in files}, None
    sizes, size = dict[str, int](), 0
    for file in files:
        sizes[file] = file_signature(file)[1]
        size += sizes[file]
        if size > SAMPLED_BYTES:
            break
    if kind.name == "csv" and size > SAMPLED_CSV_BYTES:
        largest = max(sizes, key=lambda file: sizes[file])  # the first one may hold nothing but a header
        head, size = _head(largest, directory)
        return {head: largest}, size
    return {file: file for file in sizes}, None if len(sizes) == len(files) else size


def _head(file: str, directory: Path) -> tuple[str, int]:
    """(path of a copy of the first lines, bytes that they take in the original); ConfigurationError if truncated."""
    is_packed = file.lower().endswith(".gz")
    with open_file(file) as raw, gzip.open(raw) if is_packed else raw as content:
        try:
            lines = content.read(SAMPLED_CSV_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigurationError(f"{file} is not a complete CSV file: {format_error(error)}") from None
        size = raw.tell()
    path = directory / (Path(file).stem if is_packed else Path(file).name)
    path.write_bytes(_complete_lines(lines))
    return str(path), size


def _complete_lines(lines: bytes) -> bytes:
    """Returns CSV text up to its last line break outside quotes; a quoted string is taken to end within 1 MB."""
    last = end = lines.rfind(b"\n") + 1
    inside = lines.count(b'"', 0, end) % 2
    while inside and last - end < MAX_QUOTED_BYTES:
        begin = lines.rfind(b"\n", 0, end - 1) + 1
        inside ^= lines.count(b'"', begin, end) % 2
        end = begin
    return lines[: last if inside else end]
