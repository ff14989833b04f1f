"""Throughput of each stage of reading stored data: from the disk, from the page cache, decoding, copying into batches.

Decoding and copying are measured in processor time of all threads together, which is what *one core* can do, whatever
else the machine runs. Each is measured several times for a shorter time, which shows how far the measurements differ.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.data.formats.arrays import arrays
from hasten.data.io.paths import is_remote, open_file
from hasten.data.source import column_leaves, length_of
from hasten.datatools.row_reader import RowReader

MAX_DISK_BYTES = 64_000_000  # read to measure the disk
BLOCK = 1 << 20  # bytes
BATCHES_PER_CHUNK = 8  # the largest batch is a chunk of the reader divided by this: about two megabytes
MIN_BATCH, MAX_BATCH = 16, 4096  # rows
MAX_SHUFFLED_ROWS = 1 << 20  # read in random order
COPY_SECONDS = 0.07
MIN_TIMED_S = 0.02  # a shorter read cannot be timed well
ENOUGH_S = 0.07  # processor time after which a measurement ends early, if all rows were read
REPEATS = 3  # measurements that share the time
OVERTIME = 1.5  # times the time: if all would take longer, only one is made


def read_rates(files: list[str], seconds: float = 2.0) -> dict[str, list[float] | None]:
    """Returns {"disk", "page_cache", "network": measurements in bytes/s, None where these files have no such stage},
    each in up to ``seconds``. Drops local files from the page cache first.
    """
    if is_remote(files[0]):
        return {"disk": None, "page_cache": None, "network": _bytes_per_second(files, seconds)}
    _drop_page_cache(files)
    return {"disk": _bytes_per_second(files, seconds), "page_cache": _bytes_per_second(files, seconds), "network": None}


def repeated_stage_rates(reader: RowReader, seconds: float) -> dict[str, list[float] | None]:
    """Returns the measurements of each stage of ``stage_rates``, in rows/s, None if it has none: three within about
    ``seconds``, or a single one if three would take much longer.
    """
    start = time.perf_counter()
    with warnings.catch_warnings(action="ignore", category=HastenWarning):  # about decoding whole runs for a few rows
        results = [stage_rates(reader, seconds / REPEATS)]
        if REPEATS * (time.perf_counter() - start) <= OVERTIME * (seconds + REPEATS * COPY_SECONDS):
            results += [stage_rates(reader, seconds / REPEATS) for _ in range(REPEATS - 1)]
    return {name: [rates[name] for rates in results if rates[name]] or None for name in results[0]}


def stage_rates(reader: RowReader, seconds: float) -> dict[str, Any]:
    """Measures rows/s on one core in about ``seconds``.

    Returns "decode" (from the page cache to rows in memory), "copy" (from there to shuffled batches) and "batches"
    (both); None for a stage that the format does not have. BadRow if a row cannot be read and none may be skipped,
    RunError if more cannot be read than may be skipped.
    """
    start = time.process_time()
    source = reader.open()
    opening, read = time.process_time() - start, partial(reader.read, source)
    size = min(max(reader.chunk // BATCHES_PER_CHUNK, MIN_BATCH), MAX_BATCH)
    if reader.kind.is_table:  # a batch is copied from decoded runs
        opening = 0.0 if reader.kind.has_index else opening
        # without them, the first timed read would read a text target of all files
        source.classes = reader.source.classes
        decode, run = _read_runs(read, source.chunk_offsets(), reader.rows, seconds, opening)
        copy, _ = _read_shuffled(read, run, size, COPY_SECONDS)
        return {"decode": decode, "copy": copy, "batches": 1 / (1 / decode + 1 / copy)}
    rows = numpy.arange(min(reader.rows, MAX_SHUFFLED_ROWS))
    rate, columns = _read_shuffled(read, rows, size, seconds)
    if not reader.kind.decodes:
        return {"decode": None, "copy": rate, "batches": rate}
    tensors = [leaf for leaf in column_leaves(columns) if isinstance(leaf, torch.Tensor)]
    copy = None
    if tensors:
        read, rows = arrays(*tensors).source.read, numpy.arange(len(tensors[0]))
        copy, _ = _read_shuffled(read, rows, size, COPY_SECONDS)
    return {"decode": rate, "copy": copy, "batches": rate}


def _read_runs(
    read: Callable, offsets: numpy.ndarray, rows: int, seconds: float, opening: float
) -> tuple[float, numpy.ndarray]:
    """Decodes each run once: (rows per CPU second, rows of the run still in memory); adds ``opening`` CPU seconds."""
    start, done, cpu_seconds, run = time.perf_counter(), 0, opening, numpy.arange(0)
    for first, last in pairwise(offsets.tolist()):
        before = time.process_time()
        columns = read(numpy.arange(first, min(first + 1, last)))
        cpu_seconds += time.process_time() - before
        if columns is not None and last > first:
            done, run = done + last - first, numpy.arange(first, last)
        if done >= rows or (done and time.perf_counter() - start > seconds):
            break
    read(run[:1])  # in case an unreadable run has replaced it in memory
    return done / max(cpu_seconds, 1e-9), run


def _read_shuffled(read: Callable, rows: numpy.ndarray, max_size: int, seconds: float) -> tuple[float, Any]:
    """Reads shuffled batches, larger until one can be timed: (rows per CPU second, columns of the largest)."""
    order = numpy.random.default_rng(0).permutation(rows)
    size, position, done, cpu_seconds, largest = MIN_BATCH, 0, 0, 0.0, None
    start = time.perf_counter()
    while not done or (time.perf_counter() - start < seconds and (done < len(order) or cpu_seconds < ENOUGH_S)):
        batch = order[position : position + size]
        before = time.process_time()
        columns = read(batch)
        elapsed = time.process_time() - before
        cpu_seconds += elapsed
        position = position + size if position + size < len(order) else 0
        if columns is not None:
            done += length_of(columns)
            largest = columns if largest is None or length_of(columns) > length_of(largest) else largest
        size = min(2 * size, max(max_size, MIN_BATCH)) if elapsed < MIN_TIMED_S else size
    return done / max(cpu_seconds, 1e-9), largest


# ---- from the disk


def _bytes_per_second(files: list[str], seconds: float) -> list[float]:
    """Bytes/s of reading successive parts of the files, each once; a single value if there are few bytes."""
    done, times = [0], [time.perf_counter()]
    for block in _read_blocks(files, bytearray(BLOCK)):
        done.append(done[-1] + block)
        times.append(time.perf_counter())
        if done[-1] >= MAX_DISK_BYTES or times[-1] - times[0] > seconds:
            break
    ends = numpy.searchsorted(done, numpy.linspace(0, done[-1], REPEATS + 1)).tolist()  # of parts of about one size
    if len({*ends}) <= REPEATS:
        ends = [0, len(done) - 1]
    return [(done[last] - done[first]) / max(times[last] - times[first], 1e-9) for first, last in pairwise(ends)]


def _read_blocks(files: list[str], buffer: bytearray) -> Iterator[int]:
    """Reads all files into ``buffer`` and yields the bytes of each block; skips files that cannot be opened."""
    for file in files:
        with suppress(ConfigurationError), open_file(file) as content:
            while count := content.readinto(buffer):  # pyright: ignore[reportAttributeAccessIssue]  # both classes have it
                yield count


def _drop_page_cache(files: list[str]) -> None:
    """Drops the first files, about 64 MB, from the page cache."""
    size = 0
    for file in files:
        with suppress(ConfigurationError), open_file(file) as content:
            with suppress(OSError):  # pages that were just written cannot be dropped before they are on the disk
                os.fsync(content.fileno())
            os.posix_fadvise(content.fileno(), 0, MAX_DISK_BYTES, os.POSIX_FADV_DONTNEED)
            size += os.fstat(content.fileno()).st_size
        if size >= MAX_DISK_BYTES:
            break
