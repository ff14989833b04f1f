"""Parts of files by position, read from several threads and processes at once."""

from __future__ import annotations

import os
import threading

import numpy

from hasten.data.files import is_remote, mapped_bytes, opened, unchanged

_own = threading.local()  # each thread keeps its own remote files open


def read_ranges(stamps: list[list], files: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray) -> list[bytes]:
    """The bytes of some ranges, in the order asked for.

    Args:
        stamps: of all files, as they were when the positions were found.
        files: the number of each range's file.
        begins, ends: each range's place in it.

    Raises:
        Failure: a file is no longer what it was.
    """
    if len(files) and (files == files[0]).all():
        return _ranges(stamps[files[0]], begins.tolist(), ends.tolist())
    parts: list = [None] * len(files)
    for file in numpy.unique(files).tolist():
        where = numpy.flatnonzero(files == file)
        for place, part in zip(where.tolist(), _ranges(stamps[file], begins[where].tolist(), ends[where].tolist()), strict=True):
            parts[place] = part
    return parts


def whole(stamp: list) -> memoryview:
    """All bytes of a file; a local one's are not copied."""
    path = stamp[0]
    if not is_remote(path):
        return mapped_bytes(path)
    with opened(path) as file:
        return memoryview(file.read())


def _ranges(stamp: list, begins: list[int], ends: list[int]) -> list[bytes]:
    path = stamp[0]
    if is_remote(path):
        return [_read(path, begin, end) for begin, end in zip(begins, ends, strict=True)]
    unchanged(path, stamp)
    content = mapped_bytes(path)
    return [bytes(content[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def _read(path: str, begin: int, end: int) -> bytes:
    file = _remote_file(path)
    file.seek(begin)
    return file.read(end - begin)


def _remote_file(path: str):
    """A file that this thread of this process has opened: a fork must not share its parent's connections."""
    if getattr(_own, "process", None) != os.getpid():
        _own.process, _own.files = os.getpid(), {}
    if path not in _own.files:
        _own.files[path] = opened(path)
    return _own.files[path]
