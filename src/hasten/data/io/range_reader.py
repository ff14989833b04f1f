"""Reads byte ranges of local and remote files, safe in several threads and processes at once.

Local files are read with ``pread`` and not mapped into memory: truncating a mapped file kills the process that reads
it. A local file is checked for changes at every read; a remote one every ``SECONDS_BETWEEN_LOOKS``, because that takes
a request.

Remote ranges that lie apart, as shuffled rows do, are requested concurrently (fsspec's ``cat_ranges``). A single range,
as rows in order are, is read through an open file with fsspec's read-ahead cache: the next batch is then usually here
already.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy

from hasten.core.errors import RunError
from hasten.data.io import remote
from hasten.data.io.paths import check_unchanged, is_remote, mapped_bytes, open_file

SECONDS_BETWEEN_LOOKS = 10.0  # between two checks of a remote file, in each thread
GAP, LONGEST = 64 << 10, 16 << 20  # bytes: remote ranges at most GAP apart are merged, up to LONGEST
OPEN = 16  # remote files that a thread keeps open: each holds some megabytes of read-ahead
PIECE = 4 << 20  # bytes of a whole remote file that are requested at a time

_own = threading.local()  # each thread has its own open remote files: {path: (stamp, time of the last check, file)}


def read_ranges(stamps: list[list], files: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray) -> list[bytes]:
    """The bytes of some ranges, in the order asked for.

    Args:
        stamps: of all files, as they were when the positions were found.
        files: int64, shape (n,): the index of each range's file in ``stamps``.
        begins, ends: int64, shape (n,): each range's position in its file, in bytes.

    Raises:
        Failure: a file has changed since its stamp was taken, or cannot be read.
    """
    parts = [b""] * len(files)
    remote_files = [file for file in numpy.unique(files).tolist() if is_remote(stamps[file][0])]
    for file in numpy.unique(files).tolist():
        if file not in remote_files:
            with _local_reader(stamps[file]) as read:
                for index in numpy.flatnonzero(files == file).tolist():
                    parts[index] = _read_fully(read, stamps[file][0], int(begins[index]), int(ends[index]))
    if remote_files:
        indices = numpy.flatnonzero(numpy.isin(files, remote_files))
        ranges = zip(files[indices].tolist(), begins[indices].tolist(), ends[indices].tolist(), strict=True)
        for index, part in zip(indices.tolist(), _read_remote(stamps, list(ranges)), strict=True):
            parts[index] = part
    return parts


def _read_remote(stamps: list[list], ranges: list[tuple[int, int, int]]) -> Iterator[bytes]:
    """The bytes of remote ranges (file, begin, end); those that lie close together are requested as one."""
    from fsspec.utils import merge_offset_ranges

    merged = list(zip(*merge_offset_ranges(*map(list, zip(*ranges, strict=True)), GAP, LONGEST), strict=True))
    contents: list[bytes | None] = [None] * len(merged)
    if len(merged) > 1:
        _check_oldest([stamps[file] for file in dict.fromkeys(file for file, _, _ in merged)])
        contents = remote.fetch_ranges([(stamps[file][0], begin, end) for file, begin, end in merged])
    for index, (file, begin, end) in enumerate(merged):
        if contents[index] is None:  # read alone: as a stream; or again, with retries and a clear error
            contents[index] = _read_stream(stamps[file], begin, end)
    starts = [(file, begin) for file, begin, _ in merged]
    for file, begin, end in ranges:
        index = bisect_right(starts, (file, begin)) - 1
        offset = merged[index][1]
        yield contents[index][begin - offset : end - offset]


def whole(stamp: list, tell: Callable[[int], None]) -> memoryview:
    """All bytes of a file; those of a local file are mapped. ``tell`` is called with the bytes downloaded so far."""
    path, content = stamp[0], bytearray()
    if not is_remote(path):
        return mapped_bytes(path)
    with open_file(path) as file:
        while piece := file.read(PIECE):
            content += piece
            tell(len(content))
    check_unchanged(path, stamp)
    return memoryview(content)


@contextmanager
def _local_reader(stamp: list) -> Iterator[Callable[[int, int], bytes]]:
    """``(size, position) -> bytes`` of a local file that has not changed."""
    path = stamp[0]
    check_unchanged(path, stamp)
    with open_file(path) as file:
        try:
            yield lambda size, position: os.pread(file.fileno(), size, position)
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from None


def _read_stream(stamp: list, begin: int, end: int) -> bytes:
    file = _remote_file(stamp)

    def read(size: int, position: int) -> bytes:
        file.seek(position)
        return file.read(size)

    return _read_fully(read, stamp[0], begin, end)


def _read_fully(read: Callable[[int, int], bytes], path: str, begin: int, end: int) -> bytes:
    part = read(end - begin, begin)
    while len(part) < end - begin:  # a file system may return less than was asked for
        if not (more := read(end - begin - len(part), begin + len(part))):
            raise RunError(f"{path} is shorter than it was; start again when nobody writes to it")
        part += more
    return part


def _check_oldest(stamps: list[list]) -> None:
    """Checks whether the remote file whose last check is longest ago has changed, if that is long enough ago."""
    checks = _own.__dict__.setdefault("checks", {})
    now, oldest = time.monotonic(), min(stamps, key=lambda stamp: checks.get(stamp[0], 0.0))
    if now - checks.get(oldest[0], -SECONDS_BETWEEN_LOOKS) >= SECONDS_BETWEEN_LOOKS:
        check_unchanged(oldest[0], oldest)
        checks[oldest[0]] = now


def _remote_file(stamp: list) -> BinaryIO:
    """A remote file opened by this thread of this process: a forked process must not share its parent's connections."""
    if getattr(_own, "process", None) != os.getpid():
        _own.process, _own.files = os.getpid(), OrderedDict()
    path, now = stamp[0], time.monotonic()
    before, checked, file = _own.files.pop(path, (None, 0.0, None))
    if before != stamp or now - checked >= SECONDS_BETWEEN_LOOKS:
        check_unchanged(path, stamp)
        checked = now
    if before != stamp:  # what was read ahead belongs to an earlier content of the file
        file = open_file(path)
    _own.files[path] = stamp, checked, file
    if len(_own.files) > OPEN:
        _own.files.popitem(last=False)
    return file
