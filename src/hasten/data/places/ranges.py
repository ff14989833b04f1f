"""Parts of files by position, read from several threads and processes at once.

Local files are read, not mapped into memory: somebody who cuts off a file that is mapped kills the process. Whether a local file has
changed is looked at each time; to ask for that of a remote one takes as long as to read from it, so it is done now and then.

Remote ranges that lie together, as those of rows in order do, are read as a stream, which reads ahead; those that lie apart, as shuffled
rows do, are asked for at once, each by itself.
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
from hasten.data.places import remote
from hasten.data.places.files import is_remote, mapped_bytes, opened, unchanged

SECONDS_BETWEEN_LOOKS = 10.0  # at a remote file, in each thread
GAP, LONGEST = 64 << 10, 16 << 20  # bytes between remote ranges that are read as one, and of such a one at most
OPEN = 16  # remote files that a thread keeps open, those it used last: each keeps some megabytes that it has read ahead
PIECE = 4 << 20  # bytes of a whole remote file that are asked for at a time

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
    far = [file for file in numpy.unique(files).tolist() if is_remote(stamps[file][0])]
    runs = _runs(files, begins, ends, numpy.flatnonzero(numpy.isin(files, far))) if far else []
    if len(runs) > 1:
        _scattered(stamps, runs, begins, ends, parts)
    for file in numpy.unique(files).tolist():
        if len(runs) > 1 and file in far:
            continue
        with _reading(stamps[file]) as read:
            for number in numpy.flatnonzero(files == file).tolist():
                parts[number] = _all_of(read, stamps[file][0], int(begins[number]), int(ends[number]))
    return parts


def _scattered(stamps: list[list], runs: list[tuple], begins: numpy.ndarray, ends: numpy.ndarray, parts: list[bytes]) -> None:
    """Ranges of remote files that lie apart: all are asked for at once, and nothing is read ahead."""
    _look_at_one([stamps[file] for file in dict.fromkeys(file for file, *_ in runs)])
    contents = remote.at_once([(stamps[file][0], begin, end) for file, begin, end, _ in runs])
    for (file, begin, end, numbers), content in zip(runs, contents, strict=True):
        if content is None:  # once more, with patience; and if it is hopeless, this says why
            with _reading(stamps[file]) as read:
                content = _all_of(read, stamps[file][0], begin, end)
        for number in numbers:
            parts[number] = content[begins[number] - begin : ends[number] - begin]


def _runs(
    files: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray, numbers: numpy.ndarray
) -> list[tuple[int, int, int, list[int]]]:
    """(file, begin, end, numbers of its ranges) of what lies together, or nearly so."""
    runs = []
    for number in numbers[numpy.lexsort((begins[numbers], files[numbers]))].tolist():
        file, begin, end = int(files[number]), int(begins[number]), int(ends[number])
        if runs and runs[-1][0] == file and begin - runs[-1][2] <= GAP and end - runs[-1][1] <= LONGEST:
            *_, before, those = runs[-1]
            runs[-1] = (*runs[-1][:2], max(end, before), [*those, number])
        else:
            runs.append((file, begin, end, [number]))
    return runs


def _all_of(read: Callable[[int, int], bytes], path: str, begin: int, end: int) -> bytes:
    part = read(end - begin, begin)
    while len(part) < end - begin:  # few file systems give less than all at once
        if not (more := read(end - begin - len(part), begin + len(part))):
            raise Failure(f"{path} is shorter than it was; start again when nobody writes to it")
        part += more
    return part


def whole(stamp: list, tell: Callable[[int], None]) -> memoryview:
    """All bytes of a file; a local one's are not copied. ``tell`` hears how many of a remote one's are here."""
    path, content = stamp[0], bytearray()
    if not is_remote(path):
        return mapped_bytes(path)
    with opened(path) as file:
        while piece := file.read(PIECE):
            content += piece
            tell(len(content))
    unchanged(path, stamp)
    return memoryview(content)


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


def _look_at_one(stamps: list[list]) -> None:
    """Whether a remote file has changed: the one that nobody has looked at for longest, if that is long ago."""
    looks = _own.__dict__.setdefault("looks", {})
    now, oldest = time.monotonic(), min(stamps, key=lambda stamp: looks.get(stamp[0], 0.0))
    if now - looks.get(oldest[0], -SECONDS_BETWEEN_LOOKS) >= SECONDS_BETWEEN_LOOKS:
        unchanged(oldest[0], oldest)
        looks[oldest[0]] = now


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
