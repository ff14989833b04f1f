"""The directory of a disk cache, which is either complete or absent.

::

    KEY/cache.json     nesting, dtypes and shapes of the columns; which are lists; bad rows; source identity
    KEY/0.rows, ...    one file per column: its rows one after the other, nothing else
    KEY.making/        the same while it is written; renamed when it is complete
    KEY.lock           locked by the process that writes; the system releases the lock when that process ends

KEY is a hash of the identity of the source (its class, files with sizes and times, fingerprints of maps), of the
format, and of the version of this package, because another version may read files differently.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch

from hasten import __version__
from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.data.array_source import from_numpy_array
from hasten.data.source import column_leaves, length_of
from hasten.engine.error_messages import translate_disk_errors

FORMAT = 6  # to be increased with every change of what is written or of how sources read
DAMAGE_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError)  # of reading a damaged or missing cache
JSON_KEYS = (str, int, float, bool, type(None))  # types that JSON restores
LOCK_POLL_INTERVAL_S = 0.1


def free_disk(directory: Path) -> int:
    """Returns the free bytes on the disk of a directory, which need not exist yet; RunError if the system does not
    report them.
    """
    with _disk_errors(directory):
        return shutil.disk_usage(next(filter(os.path.exists, (directory, *directory.parents)), "/")).free


class CacheDirectory:
    """The cache in ``directory`` of the source with this identity; once complete, it is in the directory ``path``."""

    def __init__(self, directory: Path, identity: str):
        key_content = json.dumps([identity, FORMAT, __version__, sys.byteorder])
        key = hashlib.blake2b(key_content.encode(), digest_size=16).hexdigest()
        self.directory, self.identity, self.path = directory, identity, directory / key
        self._partial, self._lock = directory / f"{key}.making", directory / f"{key}.lock"

    def open(self, fill: Callable[[Callable], tuple[list[int], dict]]) -> tuple[Any, list[int], dict]:
        """Returns (memory-mapped columns, indices of the columns that are lists of rows, {bad row: (where, why)}).

        If the cache does not exist, ``fill(write) -> (lists, bad rows)`` creates it by ``write(columns)`` of all rows
        in order. RunError if the disk is full or not writable.
        """
        with suppress(*DAMAGE_ERRORS):
            return self._map()
        with _disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        with file_lock(self._lock, f"another process is filling the cache in {self.directory}; waiting for it"):
            with suppress(*DAMAGE_ERRORS):
                return self._map()  # written by the process that held the lock before
            self._create(fill)
            return self._map()

    def _create(self, fill: Callable) -> None:
        remove_partial(self.directory)
        for stale in (self._partial, self.path):  # of a killed process, or damaged
            shutil.rmtree(stale, ignore_errors=True)
        with _disk_errors(self.directory):
            self._partial.mkdir()
        writer = _ColumnWriter(self._partial)
        try:
            lists, bad = fill(writer.write)
            bad_rows = [[row, *reason] for row, reason in bad.items()]
            writer.finish({"identity": self.identity, "lists": lists, "bad": bad_rows})
            with _disk_errors(self.directory):
                self._partial.rename(self.path)
                handle = os.open(self.directory, os.O_RDONLY)
                os.fsync(handle)  # so that the new name survives a power failure
                os.close(handle)
        except BaseException:
            writer.abandon()
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    def _map(self) -> tuple[Any, list[int], dict]:
        info = json.loads((self.path / "cache.json").read_text(encoding="utf-8"))
        columns = []
        for index, (dtype_name, shape) in enumerate(info["columns"]):
            file, dtype = self.path / f"{index}.rows", getattr(torch, dtype_name)
            size = file.stat().st_size
            if size != dtype.itemsize * numpy.prod(shape, dtype=int):
                raise OSError(errno.EIO, "damaged", str(file))
            content = numpy.memmap(file, numpy.uint8, mode="r") if size else numpy.empty(0, numpy.uint8)
            columns.append(from_numpy_array(content).view(dtype).view(shape))
        bad = {row: (where, why) for row, where, why in info["bad"]}
        return _nest(info["nesting"], columns), info["lists"], bad


class _ColumnWriter:
    """Appends rows to the files of a disk cache, one file per column."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.exit_stack = ExitStack()
        self.files: list[BinaryIO] = []
        self.first: Any = None  # the first columns, for nesting, shapes and dtypes
        self.rows = 0

    def write(self, columns: Any) -> None:
        leaves: list[Any] = column_leaves(columns)  # tensors
        with _disk_errors(self.directory.parent):
            if self.first is None:
                self.first = columns
                self.files = [self._new(f"{index}.rows") for index in range(len(leaves))]
            for file, column in zip(self.files, leaves, strict=True):
                file.write(column.contiguous().reshape(-1).view(torch.uint8).numpy())
        self.rows += length_of(columns)

    def finish(self, info: dict) -> None:
        leaves: list[Any] = column_leaves(self.first)
        shapes = [[str(leaf.dtype).removeprefix("torch."), [self.rows, *leaf.shape[1:]]] for leaf in leaves]
        info |= {"columns": shapes, "nesting": nesting_of(self.first)}
        with _disk_errors(self.directory.parent):
            description = self._new("cache.json")
            description.write(json.dumps(info).encode())
            for file in (*self.files, description):
                file.flush()
                os.fsync(file.fileno())
            self.exit_stack.close()

    def abandon(self) -> None:
        with suppress(OSError):  # a full disk raises again; it has been reported
            self.exit_stack.close()

    def _new(self, name: str) -> BinaryIO:
        return self.exit_stack.enter_context(open(self.directory / name, "wb"))


def _disk_errors(directory: Path) -> AbstractContextManager[None]:
    advice = (
        "the incomplete cache was removed; free some space, or choose another directory: .cache('disk', directory=...)"
    )
    return translate_disk_errors(directory, advice)


@contextmanager
def file_lock(lock: Path, waiting_message: str) -> Iterator[None]:
    """Context manager: holds an exclusive lock file and removes it afterwards. While another process holds it, warns
    once and waits. RunError if the file system does not support locks, or the file cannot be written.
    """
    warned = False
    while (file := _try_lock(lock)) is None:
        if not warned:
            warnings.warn(waiting_message, HastenWarning, stacklevel=3)
            warned = True
        time.sleep(LOCK_POLL_INTERVAL_S)
    with file:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def remove_partial(directory: Path) -> None:
    """Removes from ``directory`` what killed processes left: partial caches and lock files that no process holds."""
    for path in {path.with_suffix("") for suffix in ("making", "lock") for path in directory.glob(f"*.{suffix}")}:
        lock = path.with_suffix(".lock")
        with suppress(RunError):  # the file may belong to another user
            if file := _try_lock(lock):
                with file:
                    shutil.rmtree(path.with_suffix(".making"), ignore_errors=True)
                    lock.unlink(missing_ok=True)


def _try_lock(lock: Path) -> BinaryIO | None:
    """Returns the locked file, or None while another process holds it."""
    advice = "files there must be lockable; choose another directory: .cache('disk', directory=...), or HASTEN_CACHE"
    with translate_disk_errors(lock, advice):
        file = open(lock, "ab")  # noqa: SIM115 (the caller closes it)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):  # otherwise its last holder has removed it
                return file
        file.close()
        return None


def nesting_of(columns: Any, indices: Iterator[int] | None = None) -> Any:
    """Returns the nesting of columns as JSON: ``{"keys": ..., "parts": ...}`` for a dict, whose keys need not be
    strings, an array for a tuple, and a number for a column, its index. ConfigurationError for what a file cannot
    restore without executing code: named tuples, and keys of other types.
    """
    indices = count() if indices is None else indices
    if isinstance(columns, Mapping):
        if odd := [key for key in columns if not isinstance(key, JSON_KEYS)]:
            problem = f"a cache on disk cannot store samples with the key {odd[0]!r:.80}"
            raise ConfigurationError(f"{problem}; use strings as keys, or .cache('memory')")
        return {"keys": list(columns), "parts": [nesting_of(part, indices) for part in columns.values()]}
    if isinstance(columns, tuple):
        if hasattr(columns, "_fields"):
            problem = f"a cache on disk cannot store named tuples such as {type(columns).__name__}"
            raise ConfigurationError(f"{problem}; return tuples or dicts before it, or use .cache('memory')")
        return [nesting_of(part, indices) for part in columns]
    return next(indices)


def _nest(nesting: Any, columns: list) -> Any:
    """Nests columns as the JSON of ``nesting_of`` describes."""
    if isinstance(nesting, dict):
        return dict(zip(nesting["keys"], (_nest(part, columns) for part in nesting["parts"]), strict=True))
    if isinstance(nesting, list):
        return tuple(_nest(part, columns) for part in nesting)
    return columns[nesting]
