"""Throughput of each stage of reading stored data: from the disk, from the page cache, decoding, copying into batches.

Decoding and copying are measured in processor time of all threads together: what *one core* can do, whatever else the
machine runs. Each is measured several times for a shorter time, which shows how far the measurements differ.
"""

from __future__ import annotations

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

MOST_BYTES = 64_000_000  # read to measure the disk
BLOCK = 1 << 20
PIECES = 8  # the largest batch is this fraction of the bytes read at a time: about two megabytes
SMALLEST_BATCH, LARGEST_BATCH = 16, 4096  # rows
MOST_ROWS = 1 << 20  # read in random order, at most
COPY_SECONDS = 0.2
SHORT = 0.02  # seconds; a shorter piece cannot be timed well
PASSES, ENOUGH = 3, 0.2  # passes over all rows, and seconds, after which a measurement ends early
READINGS = 3  # measurements that share the time
PATIENCE = 1.5  # times the time: if all would take longer, only one is made


def reading_pace(files: list[str], seconds: float = 2.0) -> dict:
    """Measurements in bytes/s of "disk" (if the page cache can be dropped), "page_cache" and "network", else None."""
    if is_remote(files[0]):
        return {"disk": None, "page_cache": None, "network": _bytes_a_second(files, seconds)}
    could = _forget(files)
    disk = _bytes_a_second(files, seconds)
    return {"disk": disk if could else None, "page_cache": _bytes_a_second(files, seconds), "network": None}


def paces(reading: RowReader, seconds: float) -> dict:
    """Several measurements of what ``pace`` returns in ``seconds``; only one if several would take much longer."""
    began = time.perf_counter()
    readings = [pace(reading, seconds / READINGS, 1 / READINGS)]
    if READINGS * (time.perf_counter() - began) <= PATIENCE * (seconds + COPY_SECONDS):
        readings += [pace(reading, seconds / READINGS, 1 / READINGS) for _ in range(READINGS - 1)]
    return {name: [each[name] for each in readings if each[name]] or None for name in readings[0]}


def pace(reading: RowReader, seconds: float, part: float = 1.0) -> dict:
    """Rows/s on one core.

    Args:
        reading: the rows.
        seconds: to spend, about.
        part: fraction of a full measurement that suffices.

    Returns:
        "decode" (from the page cache to rows in memory), "copy" (from there to shuffled batches) and "batches" (both);
        None for a stage that the format does not have.

    Raises:
        BadRow, Refusal, Failure: a row cannot be read, and may not be skipped.
    """
    with warnings.catch_warnings(
        action="ignore", category=HastenWarning
    ):  # the warning that runs are decoded for a few rows: here on purpose
        return _pace(reading, seconds, part)


def _pace(reading: RowReader, seconds: float, part: float) -> dict:
    began = time.process_time()
    source = reading.opened()
    opening, read = time.process_time() - began, partial(reading.read, source)
    size = min(max(reading.chunk // PIECES, SMALLEST_BATCH), LARGEST_BATCH)
    if reading.kind.is_table:  # a batch is copied from decoded runs
        decode, run = _run_by_run(
            read, source.chunk_offsets(), reading.rows, seconds, opening if reading.kind.walked else 0.0
        )
        copy, _ = _at_random(read, run, size, part * COPY_SECONDS, part)
        return {"decode": decode, "copy": copy, "batches": 1 / (1 / decode + 1 / copy)}
    rate, columns = _at_random(read, numpy.arange(min(reading.rows, MOST_ROWS)), size, seconds, part)
    if not reading.kind.decodes:
        return {"decode": None, "copy": rate, "batches": rate}
    tensors = [leaf for leaf in column_leaves(columns) if isinstance(leaf, torch.Tensor)]
    copy = None
    if tensors:
        copy, _ = _at_random(
            arrays(*tensors).source.read, numpy.arange(len(tensors[0])), size, part * COPY_SECONDS, part
        )
    return {"decode": rate, "copy": copy, "batches": rate}


def _run_by_run(
    read: Callable, edges: numpy.ndarray, rows: int, seconds: float, opening: float
) -> tuple[float, numpy.ndarray]:
    """(rows/s, the rows of the run that is still in memory): decodes each run once."""
    began, done, spent, held = time.perf_counter(), 0, opening, numpy.arange(0)
    for first, last in pairwise(edges.tolist()):
        before = time.process_time()
        columns = read(numpy.arange(first, min(first + 1, last)))
        spent += time.process_time() - before
        if columns is not None and last > first:
            done, held = done + last - first, numpy.arange(first, last)
        if done >= rows or (done and time.perf_counter() - began > seconds):
            break
    read(held[:1])  # in case an unreadable run has replaced it in memory
    return done / max(spent, 1e-9), held


def _at_random(read: Callable, rows: numpy.ndarray, most: int, seconds: float, part: float) -> tuple[float, Any]:
    """(rows/s, the columns of the largest piece): reads in pieces that grow until one takes long enough to be timed."""
    order = numpy.random.default_rng(0).permutation(rows)
    began, size, at, done, spent, largest = time.perf_counter(), SMALLEST_BATCH, 0, 0, 0.0, None
    while not done or (
        time.perf_counter() - began < seconds and (done < part * PASSES * len(order) or spent < part * ENOUGH)
    ):
        piece = order[at : at + size]
        before = time.process_time()
        columns = read(piece)
        took = time.process_time() - before
        spent, at = spent + took, at + size if at + size < len(order) else 0
        if columns is not None:
            done += length_of(columns)
            largest = columns if largest is None or length_of(columns) > length_of(largest) else largest
        size = min(2 * size, max(most, SMALLEST_BATCH)) if took < SHORT else size
    return done / max(spent, 1e-9), largest


# ---- from the disk


def _bytes_a_second(files: list[str], seconds: float) -> list[float]:
    """Measurements in bytes/s of successive parts, as a part read again is cached; one if there are few bytes."""
    done, times = [0], [time.perf_counter()]
    for block in _blocks(files, bytearray(BLOCK)):
        done.append(done[-1] + block)
        times.append(time.perf_counter())
        if done[-1] >= MOST_BYTES or times[-1] - times[0] > seconds:
            break
    ends = numpy.searchsorted(
        done, numpy.linspace(0, done[-1], READINGS + 1)
    ).tolist()  # of parts of about the same size
    if len({*ends}) <= READINGS:
        ends = [0, len(done) - 1]
    return [(done[last] - done[first]) / max(times[last] - times[first], 1e-9) for first, last in pairwise(ends)]


def _blocks(files: list[str], buffer: bytearray) -> Iterator[int]:
    for file in files:
        with (
            suppress(ConfigurationError),
            open_file(file) as content,
        ):  # a file that cannot be opened is reported when its rows are read
            while count := content.readinto(buffer):
                yield count


def _forget(files: list[str]) -> bool:
    """Drops the first files from the page cache; returns whether the system supports it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    done = 0
    for file in files:
        with suppress(ConfigurationError), open_file(file) as content:
            with suppress(OSError):  # pages that were just written cannot be dropped before they are on the disk
                os.fsync(content.fileno())
            os.posix_fadvise(content.fileno(), 0, MOST_BYTES, os.POSIX_FADV_DONTNEED)
            done += os.fstat(content.fileno()).st_size
        if done >= MOST_BYTES:
            break
    return True
