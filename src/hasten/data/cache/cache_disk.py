"""The directory of a disk cache, which is either complete or absent.

::

    KEY/cache.json     format; nesting, dtypes and shapes of the columns; which are lists; bad rows; source identity
    KEY/0.rows, ...    one file per column: its rows one after the other, nothing else
    KEY.making/        the same while it is written; renamed when it is complete
    KEY.lock           locked by the process that writes; the system releases the lock when that process ends

KEY is a hash of the identity of the source (its class, files with sizes and times, fingerprints of maps), of the
format, and of the version of this package, because another version may read files differently.
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
from hasten.core.errors import HastenWarning, RunError
from hasten.data.formats.arrays import from_numpy_array
from hasten.data.source import column_leaves, length_of, map_columns
from hasten.engine.error_messages import translate_disk_errors

FORMAT = 3  # to be increased with every change of what is written or of how sources read
NOT_WHOLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)  # raised while a damaged or missing cache is read
LOCK_POLL_INTERVAL_S = 0.1


def default_folder() -> Path:
    """The environment variable HASTEN_CACHE, or hasten's folder in the user's cache directory.

    Raises:
        RuntimeError: the user has no home directory.
    """
    if os.environ.get("HASTEN_CACHE"):
        return Path(os.environ["HASTEN_CACHE"])
    return user_cache_path("hasten", appauthor=False).expanduser()


def free_disk(folder: Path) -> int:
    """Returns the free bytes on the disk of a folder, which need not exist yet.

    Raises:
        Failure: The file system does not report it.
    """
    with _trouble(folder):
        return shutil.disk_usage(next(filter(os.path.exists, (folder, *folder.parents)), "/")).free


class CacheDirectory:
    """The cache in ``folder`` of the source with the identity ``made_of``."""

    def __init__(self, folder: Path, made_of: dict):
        identity = json.dumps([made_of, FORMAT, __version__, sys.byteorder], sort_keys=True)
        key = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self.folder, self.made_of = folder, json.loads(identity)[0]
        self.whole, self.making, self.lock = folder / key, folder / f"{key}.making", folder / f"{key}.lock"

    def opened(self, fill: Callable[[Callable], tuple[list[int], dict]]) -> tuple[Any, list[int], dict]:
        """Opens the cache, and writes it first if it does not exist.

        Args:
            fill: ``(write) -> (lists, bad rows)``; calls ``write(columns)`` for all rows in order.

        Returns:
            (memory-mapped columns, numbers of the columns that are lists of rows, bad rows).

        Raises:
            Failure: The disk is full or not writable.
        """
        with suppress(*NOT_WHOLE):
            return self._mapped()
        with _trouble(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with file_lock(self.lock, f"another process makes the cache in {self.folder}; waiting for it"):
            with suppress(*NOT_WHOLE):
                return self._mapped()  # written by the process that held the lock before
            self._make(fill)
            return self._mapped()

    def _make(self, fill: Callable) -> None:
        remove_partial(self.folder)
        for left in (self.making, self.whole):  # left by a killed process, or damaged
            shutil.rmtree(left, ignore_errors=True)
        with _trouble(self.folder):
            self.making.mkdir()
        written = _Written(self.making)
        try:
            lists, bad = fill(written.write)
            about = {
                "format": FORMAT,
                "made of": self.made_of,
                "lists": lists,
                "bad": [[row, *why] for row, why in bad.items()],
            }
            written.finish(about)
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
            content = numpy.memmap(file, numpy.uint8, mode="r") if file.stat().st_size else numpy.empty(0, numpy.uint8)
            columns.append(from_numpy_array(content).view(dtype).view(shape))
        return (
            _nested(about["nesting"], columns),
            about["lists"],
            {row: (where, why) for row, where, why in about["bad"]},
        )


class _Written:
    """Writes the files of a cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.open, self.files = ExitStack(), []
        self.like, self.rows = None, 0

    def write(self, columns) -> None:
        with _trouble(self.folder.parent):
            if self.like is None:
                self.like = columns
                self.files = [self._new(f"{number}.rows") for number in range(len(column_leaves(columns)))]
            for file, column in zip(self.files, column_leaves(columns), strict=True):
                file.write(column.contiguous().reshape(-1).view(torch.uint8).numpy())
        self.rows += length_of(columns)

    def finish(self, about: dict) -> None:
        kinds = [
            [str(column.dtype).removeprefix("torch."), [self.rows, *column.shape[1:]]]
            for column in column_leaves(self.like)
        ]
        numbers = count()
        about = {
            **about,
            "columns": kinds,
            "nesting": map_columns(lambda column: next(numbers), self.like),
        }  # tuples become JSON arrays
        with _trouble(self.folder.parent):
            description = self._new("cache.json")
            description.write(json.dumps(about).encode())
            for file in (*self.files, description):
                file.flush()
                os.fsync(file.fileno())
            self.open.close()

    def abandon(self) -> None:
        with suppress(OSError):  # a full disk raises again; it has been reported
            self.open.close()

    def _new(self, name: str) -> BinaryIO:
        return self.open.enter_context(open(self.folder / name, "wb"))


def _trouble(folder: Path):
    return translate_disk_errors(
        folder, "nothing is left of the cache there; make room, or choose another folder: .cache('disk', folder=...)"
    )


@contextmanager
def file_lock(lock: Path, waiting: str) -> Iterator[None]:
    """Holds an exclusive lock file and removes it afterwards; gives the Notice ``waiting`` if another process holds it.

    Raises:
        Failure: The file system does not support locks, or the file cannot be written.
    """
    warned = False
    while (file := _locked(lock)) is None:
        if not warned:
            warnings.warn(waiting, HastenWarning, stacklevel=3)
            warned = True
        time.sleep(LOCK_POLL_INTERVAL_S)
    with file:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Removes what killed processes left: partial caches and lock files."""
    for left in {path.with_suffix("") for ending in ("making", "lock") for path in folder.glob(f"*.{ending}")}:
        lock = left.with_suffix(".lock")
        with suppress(RunError):  # the file may belong to another user
            if file := _locked(lock):
                with file:
                    shutil.rmtree(left.with_suffix(".making"), ignore_errors=True)
                    lock.unlink(missing_ok=True)


def _locked(lock: Path) -> BinaryIO | None:
    """Returns the locked file, or None while another process holds it."""
    with translate_disk_errors(
        lock, "files there must be lockable; choose another folder: .cache('disk', folder=...), or HASTEN_CACHE"
    ):
        file = open(lock, "ab")  # noqa: SIM115 (the caller closes it)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):  # otherwise its last holder has removed it
                return file
        file.close()
        return None


def _synced(folder: Path) -> None:
    """Makes a rename in the folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _nested(nesting, columns: list):
    """Arranges the columns as described: a number stands for a column, an object for a dict, an array for a tuple."""
    if isinstance(nesting, dict):
        return {name: _nested(part, columns) for name, part in nesting.items()}
    if isinstance(nesting, list):
        return tuple(_nested(part, columns) for part in nesting)
    return columns[nesting]
