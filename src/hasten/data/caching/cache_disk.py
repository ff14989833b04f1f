"""The folder of a disk cache, and how it comes to be whole or not at all.

::

    KEY/cache.json     format, rows, nesting, types and shapes of the columns, which of them are lists, bad rows, what it was made of
    KEY/0.rows, ...    one file a column: its rows one after the other, nothing else
    KEY.making/        the same, while it is being written: renamed when it is whole
    KEY.lock           held by whoever writes; the system lets go of it when that process ends, however it ends

KEY is a hash of what the rows are made of (the kind of source, files with sizes and times, fingerprints of maps), of the format, and of
the version of this package, whose reading may be another.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from platformdirs import user_cache_path

from hasten import __version__
from hasten.contract.errors import Failure, Notice
from hasten.data.formats.in_memory import from_numpy_array
from hasten.data.source import leaves_of, length_of, mapped
from hasten.engine.failures import disk_trouble

FORMAT = 3  # a change of what is written, or of how our sources read, is a change of this number
NOT_WHOLE = (OSError, ValueError, LookupError, TypeError, AttributeError)  # what reading a damaged description, or none, may raise
SECONDS_BETWEEN_LOOKS = 0.1  # for the lock that another process holds


def default_folder() -> Path:
    """The environment variable HASTEN_CACHE, or hasten's folder in the user's cache directory.

    Raises:
        RuntimeError: the user has no home directory.
    """
    if os.environ.get("HASTEN_CACHE"):
        return Path(os.environ["HASTEN_CACHE"])
    return user_cache_path("hasten", appauthor=False).expanduser()


def free_disk(folder: Path) -> int:
    """Bytes that may still be written to a folder, which need not be there yet.

    Raises:
        Failure: the file system does not tell.
    """
    with _trouble(folder):
        return shutil.disk_usage(next(filter(os.path.exists, (folder, *folder.parents)), "/")).free


class Folder:
    """The cache of rows that are made of ``made_of``, inside ``folder``."""

    def __init__(self, folder: Path, made_of: dict):
        told = json.dumps([made_of, FORMAT, __version__, sys.byteorder], sort_keys=True)
        key = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
        self.folder, self.made_of = folder, json.loads(told)[0]
        self.whole, self.making, self.lock = folder / key, folder / f"{key}.making", folder / f"{key}.lock"

    def opened(self, fill: Callable[[Callable], tuple[list[int], dict]]) -> tuple[Any, list[int], dict]:
        """(columns, which of them are lists of rows, bad rows), memory-mapped; made first where it is not there.

        Args:
            fill: ``(write) -> (lists, bad rows)``: calls ``write(columns)`` for all rows, in order.

        Raises:
            Failure: the disk is full, or may not be written to.
        """
        with suppress(*NOT_WHOLE):
            return self._mapped()
        with _trouble(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with held(self.lock, f"another process makes the cache in {self.folder}; waiting for it"):
            with suppress(*NOT_WHOLE):
                return self._mapped()  # made by whoever held the lock before
            self._make(fill)
            return self._mapped()

    def _make(self, fill: Callable) -> None:
        swept(self.folder)
        for left in (self.making, self.whole):  # of a process that was killed, or damaged since
            shutil.rmtree(left, ignore_errors=True)
        with _trouble(self.folder):
            self.making.mkdir()
        written = _Written(self.making)
        try:
            lists, bad = fill(written.write)
            told = {"format": FORMAT, "made of": self.made_of, "lists": lists, "bad": [[row, *why] for row, why in bad.items()]}
            written.finish(told)
            with _trouble(self.folder):
                self.making.rename(self.whole)
                _synced(self.folder)
        except BaseException:
            written.abandon()
            shutil.rmtree(self.making, ignore_errors=True)
            raise

    def _mapped(self) -> tuple[Any, list[int], dict]:
        about = json.loads((self.whole / "cache.json").read_text(encoding="utf-8"))
        columns = []
        for number, (kind, shape) in enumerate(about["columns"]):
            file, dtype = self.whole / f"{number}.rows", getattr(torch, kind)
            if file.stat().st_size != dtype.itemsize * numpy.prod(shape, dtype=int):
                raise OSError(errno.EIO, "damaged", str(file))
            mapped = numpy.memmap(file, numpy.uint8, mode="r") if file.stat().st_size else numpy.empty(0, numpy.uint8)
            columns.append(from_numpy_array(mapped).view(dtype).view(shape))
        return _nested(about["nesting"], columns), about["lists"], {row: (where, why) for row, where, why in about["bad"]}


class _Written:
    """The files of a cache that is being written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.open, self.files = ExitStack(), []
        self.like, self.rows = None, 0

    def write(self, columns) -> None:
        with _trouble(self.folder.parent):
            if self.like is None:
                self.like = columns
                self.files = [self._new(f"{number}.rows") for number in range(len(leaves_of(columns)))]
            for file, column in zip(self.files, leaves_of(columns), strict=True):
                file.write(column.contiguous().reshape(-1).view(torch.uint8).numpy())
        self.rows += length_of(columns)

    def finish(self, about: dict) -> None:
        kinds = [[str(column.dtype).removeprefix("torch."), [self.rows, *column.shape[1:]]] for column in leaves_of(self.like)]
        numbers = count()
        about = {**about, "columns": kinds, "nesting": mapped(lambda _: next(numbers), self.like)}
        with _trouble(self.folder.parent):
            description = self._new("cache.json")
            description.write(json.dumps(about).encode())
            for file in (*self.files, description):
                file.flush()
                os.fsync(file.fileno())
            self.open.close()

    def abandon(self) -> None:
        with suppress(OSError):  # a full disk says it once more; it has been told
            self.open.close()

    def _new(self, name: str) -> BinaryIO:
        return self.open.enter_context(open(self.folder / name, "wb"))


def _trouble(folder: Path):
    return disk_trouble(folder, "nothing is left of the cache there; make room, or choose another folder: .cache('disk', folder=...)")


@contextmanager
def held(lock: Path, waiting: str) -> Iterator[None]:
    """Holds a lock that only one process can hold, and removes it; says so if it has to wait for it.

    Raises:
        Failure: the file system does not let it.
    """
    told = False
    while (file := _locked(lock)) is None:
        if not told:
            warnings.warn(waiting, Notice, stacklevel=3)
            told = True
        time.sleep(SECONDS_BETWEEN_LOOKS)
    with file:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def swept(folder: Path) -> None:
    """Removes what killed processes left: what is half written, and locks."""
    for left in {path.with_suffix("") for ending in ("making", "lock") for path in folder.glob(f"*.{ending}")}:
        lock = left.with_suffix(".lock")
        with suppress(Failure):  # another user's, perhaps
            if file := _locked(lock):
                with file:
                    shutil.rmtree(left.with_suffix(".making"), ignore_errors=True)
                    lock.unlink(missing_ok=True)


def _locked(lock: Path) -> BinaryIO | None:
    """The lock, locked; None while another process holds it."""
    with disk_trouble(lock, "files there must be lockable; choose another folder: .cache('disk', folder=...), or HASTEN_CACHE"):
        file = open(lock, "ab")  # noqa: SIM115 (whoever gets it closes it)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):  # else whoever held it has removed it meanwhile
                return file
        file.close()
        return None


def _synced(folder: Path) -> None:
    """What was renamed in the folder outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _nested(nesting, columns: list):
    """Nests columns as they were when their numbers were written as JSON, in which tuples are arrays."""
    if isinstance(nesting, dict):
        return {name: _nested(part, columns) for name, part in nesting.items()}
    if isinstance(nesting, list):
        return tuple(_nested(part, columns) for part in nesting)
    return columns[nesting]
