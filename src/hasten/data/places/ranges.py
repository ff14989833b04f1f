"""Parts of files by position, read from several threads and processes at once.

Local files are read, not mapped into memory: somebody who cuts off a file that is mapped kills the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

import numpy

from hasten.contract.errors import Failure
from hasten.data.places.files import is_remote, mapped_bytes, opened, unchanged

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
    parts = [b""] * len(files)
    positions, sizes = begins.tolist(), (ends - begins).tolist()
    for file in numpy.unique(files).tolist():
        with _reading(stamps[file]) as read:
            for number in numpy.flatnonzero(files == file).tolist():
                part = read(sizes[number], positions[number])
                while len(part) < sizes[number]:  # few file systems give less than all at once
                    if not (more := read(sizes[number] - len(part), positions[number] + len(part))):
                        raise Failure(f"{stamps[file][0]} is shorter than it was; start again when nobody writes to it")
                    part += more
                parts[number] = part
    return parts


def whole(stamp: list) -> memoryview:
    """All bytes of a file; a local one's are not copied."""
    path = stamp[0]
    if not is_remote(path):
        return mapped_bytes(path)
    with opened(path) as file:
        return memoryview(file.read())


@contextmanager
def _reading(stamp: list) -> Iterator[Callable[[int, int], bytes]]:
    """``(bytes, position) -> content`` of a file, which may be less than was asked for."""
    path = stamp[0]
    if is_remote(path):
        yield partial(_read, _remote_file(path))
        return
    unchanged(path, stamp)
    with opened(path) as file:
        try:
            yield partial(os.pread, file.fileno())
        except OSError as error:
            raise Failure(f"cannot read {path}: {error.strerror}") from None


def _read(file: BinaryIO, size: int, position: int) -> bytes:
    file.seek(position)
    return file.read(size)


def _remote_file(path: str) -> BinaryIO:
    """A file that this thread of this process has opened: a fork must not share its parent's connections."""
    if getattr(_own, "process", None) != os.getpid():
        _own.process, _own.files = os.getpid(), {}
    if path not in _own.files:
        _own.files[path] = opened(path)
    return _own.files[path]
