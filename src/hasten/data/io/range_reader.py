"""Reads byte ranges of local and remote files; safe in several threads and processes at once.

Local files are read with ``pread`` and not mapped into memory: truncating a mapped file kills the process that reads
it. Remote ranges that lie apart, as those of shuffled rows do, are requested concurrently (fsspec's ``cat_ranges``). A
single range, as of rows in order, is read through an open file with fsspec's read-ahead cache, which usually contains
the next batch already.
"""

import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO

import numpy

from hasten.core.errors import RunError
from hasten.data.io import remote
from hasten.data.io.paths import check_unchanged, is_remote, mapped_bytes, open_file

REMOTE_CHECK_INTERVAL_S = 10.0  # between two checks of a remote file, in each thread
GAP, LONGEST = 64 << 10, 16 << 20  # bytes: remote ranges at most GAP apart are merged, up to LONGEST
MAX_OPEN_FILES = 16  # remote files that a thread keeps open; each holds some megabytes of read-ahead
DOWNLOAD_CHUNK = 4 << 20  # bytes of a whole remote file that are requested at a time

_thread = threading.local()  # of each thread: ``files`` and ``checked``, {signature of a remote file: open file, time}


def read_ranges(
    signatures: list[list], files: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray
) -> list[bytes]:
    """Returns the bytes of some ranges, in the given order.

    ``signatures`` are those of all files ([path, size, version], see ``paths.file_signature``), taken when the
    positions were found; a file that has changed since is a RunError. ``files`` (index of each range's file),
    ``begins`` and ``ends`` (exclusive) are int64, shape (n,).
    """
    parts = [b""] * len(files)
    unique_files = numpy.unique(files).tolist()
    remote_files = [file for file in unique_files if is_remote(signatures[file][0])]
    for file in unique_files:
        if file not in remote_files:
            indices = numpy.flatnonzero(files == file)
            ranges = zip(begins[indices].tolist(), ends[indices].tolist(), strict=True)
            for index, part in zip(indices.tolist(), _read_local(signatures[file], ranges), strict=True):
                parts[index] = part
    if remote_files:
        indices = numpy.flatnonzero(numpy.isin(files, remote_files))
        ranges = zip(files[indices].tolist(), begins[indices].tolist(), ends[indices].tolist(), strict=True)
        for index, part in zip(indices.tolist(), _read_remote(signatures, list(ranges)), strict=True):
            parts[index] = part
    return parts


def _read_remote(signatures: list[list], ranges: list[tuple[int, int, int]]) -> Iterator[bytes]:
    """The bytes of remote ranges (file, begin, end); ranges that lie close together are merged into one request."""
    from fsspec.utils import merge_offset_ranges

    merge: Callable[..., Any] = merge_offset_ranges  # annotated for file names; here files are numbers
    merged = list(zip(*merge(*map(list, zip(*ranges, strict=True)), GAP, LONGEST), strict=True))
    fetched: list[bytes | None] = [None] * len(merged)
    if len(merged) > 1:
        _check_oldest([signatures[file] for file in dict.fromkeys(file for file, _, _ in merged)])
        fetched = remote.fetch_ranges([(signatures[file][0], begin, end) for file, begin, end in merged])
    contents = [  # a single range is read as a stream; so is a failed one, with retries and a clear error
        _read_stream(signatures[file], begin, end) if content is None else content
        for (file, begin, end), content in zip(merged, fetched, strict=True)
    ]
    starts = [(file, begin) for file, begin, _ in merged]
    for file, begin, end in ranges:
        index = bisect_right(starts, (file, begin)) - 1
        offset = merged[index][1]
        yield contents[index][begin - offset : end - offset]


def read_file(signature: list, report: Callable[[int], None]) -> memoryview:
    """Returns all bytes of a file: a local one memory-mapped, a remote one downloaded, with calls of ``report(bytes
    downloaded so far)`` and a RunError if it changed meanwhile.
    """
    path, content = signature[0], bytearray()
    if not is_remote(path):
        return mapped_bytes(path)
    with open_file(path) as file:
        while chunk := file.read(DOWNLOAD_CHUNK):
            content += chunk
            report(len(content))
    check_unchanged(path, signature)
    return memoryview(content)


def _read_local(signature: list, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
    path = signature[0]
    check_unchanged(path, signature)
    with open_file(path) as file:
        read = partial(os.pread, file.fileno())
        try:
            return [_read_fully(read, path, begin, end) for begin, end in ranges]
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from None


def _read_stream(signature: list, begin: int, end: int) -> bytes:
    file = _remote_file(signature)

    def read(size: int, position: int) -> bytes:
        file.seek(position)
        return file.read(size)

    return _read_fully(read, signature[0], begin, end)


def _read_fully(read: Callable[[int, int], bytes], path: str, begin: int, end: int) -> bytes:
    part = read(end - begin, begin)
    while len(part) < end - begin:  # a file system may return less than requested
        more = read(end - begin - len(part), begin + len(part))
        if not more:
            raise RunError(f"{path} is shorter than it was; start again when no process writes to it")
        part += more
    return part


def _check_oldest(signatures: list[list]) -> None:
    """Checks one of some remote files, the one that this thread checked longest ago, unless that was less than 10 s
    ago; RunError if the file has changed.
    """
    checked = _thread.__dict__.setdefault("checked", {})
    oldest = min(signatures, key=lambda signature: checked.get(str(signature), 0.0))
    if time.monotonic() - checked.get(str(oldest), -REMOTE_CHECK_INTERVAL_S) >= REMOTE_CHECK_INTERVAL_S:
        check_unchanged(oldest[0], oldest)
        checked[str(oldest)] = time.monotonic()


def _remote_file(signature: list) -> BinaryIO:
    """A remote file opened by this thread of this process: a forked process must not share its parent's connections."""
    if getattr(_thread, "process", None) != os.getpid():
        _thread.process, _thread.files = os.getpid(), OrderedDict()
    _check_oldest([signature])
    file = _thread.files.pop(str(signature), None) or open_file(signature[0])
    _thread.files[str(signature)] = file  # not by path: the read-ahead of a changed file is that of its old content
    if len(_thread.files) > MAX_OPEN_FILES:
        _thread.files.popitem(last=False)
    return file
