"""Parts of files by position, read from several threads and processes at once.

Local files are read, not mapped into memory: somebody who cuts off a file that is mapped kills the process. Whether a local file has
changed is looked at each time; to ask for that of a remote one takes as long as to read from it, so it is done now and then.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

import numpy

from hasten.contract.errors import Failure
from hasten.data.places.files import is_remote, mapped_bytes, opened, unchanged

SECONDS_BETWEEN_LOOKS = 10.0  # at a remote file, in each thread
OPEN = 16  # remote files that a thread keeps open, those it used last: each keeps some megabytes that it has read ahead

_own = threading.local()  # each thread keeps its own remote files open: {path: (stamp, time of the last look, file)}


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
        content = memoryview(file.read())
    unchanged(path, stamp)
    return content


@contextmanager
def _reading(stamp: list) -> Iterator[Callable[[int, int], bytes]]:
    """``(bytes, position) -> content`` of a file, which may be less than was asked for."""
    path = stamp[0]
    if is_remote(path):
        yield partial(_read, _remote_file(stamp))
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


def _remote_file(stamp: list) -> BinaryIO:
    """A file that this thread of this process has opened: a fork must not share its parent's connections."""
    if getattr(_own, "process", None) != os.getpid():
        _own.process, _own.files = os.getpid(), OrderedDict()
    path, now = stamp[0], time.monotonic()
    before, looked, file = _own.files.pop(path, (None, 0.0, None))
    if before != stamp or now - looked >= SECONDS_BETWEEN_LOOKS:
        unchanged(path, stamp)
        looked = now
    if before != stamp:  # what was kept of another file of that name is of no use
        file = opened(path)
    _own.files[path] = stamp, looked, file
    if len(_own.files) > OPEN:
        _own.files.popitem(last=False)
    return file
