"""Where files are: patterns and folders, local or remote, and what tells whether a file is still the same.

A path with ``://`` in it is remote (``remote.py``); everything else is local and touches nothing but the standard library.
"""

from __future__ import annotations

import io
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from functools import lru_cache
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO

from hasten.contract.errors import Failure, Refusal, nearest
from hasten.data import remote


def found(patterns: str | Path | Iterable[str | Path], suffixes: tuple[str, ...] = ()) -> list[str]:
    """Every file that is meant, sorted, each once.

    Args:
        patterns: files, folders or patterns (``*``, ``?``, ``[...]``, ``**`` for any depth), local or remote.
        suffixes: what the names of a folder's files end in (``.parquet``); empty for all of them. Hidden ones are passed over.

    Raises:
        Refusal: a pattern matches nothing, a file is not there, or the file system cannot be reached.
    """
    patterns = list(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else [patterns]
    if not patterns:
        raise Refusal("no file was named")
    files: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, (str, os.PathLike)):
            raise Refusal(f"a file is named by a text or a path, not by {pattern!r:.80}")
        matches = remote.matches if is_remote(pattern) else _local_matches
        some = set(matches(_plain(pattern), tuple(suffix.lower() for suffix in suffixes)))
        if not some:
            raise Refusal(_nothing(_plain(pattern), suffixes))
        files |= some
    return sorted(files)


def opened(path: str) -> BinaryIO:
    """A file to read bytes from, at any position.

    Raises:
        Refusal: it is not there, or may not be read.
        Failure: it is remote and did not answer, four times.
    """
    if is_remote(path):
        return io.BufferedReader(remote.RemoteFile(path), 1 << 20)
    try:
        return open(path, "rb")
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from None


def mapped_bytes(path: str) -> memoryview:
    """The bytes of a local file, mapped into memory: read-only, and shared by all processes.

    Raises:
        Refusal: it is not there, or may not be read.
    """
    return _mapped(*stamp(path))


def stamp(path: str) -> list:
    """[path, bytes, version], which changes when the file does. A local file's version is its time in nanoseconds.

    Raises:
        Refusal: it is not there.
        Failure: it is remote and did not answer.
    """
    if is_remote(path):
        return remote.mark_of(path)
    try:
        about = os.stat(path)
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from None
    return [path, about.st_size, about.st_mtime_ns]


def unchanged(path: str, before: list) -> None:
    """Makes sure that a file is still the one whose stamp was taken.

    Raises:
        Failure: it changed, or went away.
    """
    try:
        same = stamp(path) == before
    except Refusal as gone:
        raise Failure(f"{path} went away while it was being read: {gone}") from None
    if not same:
        raise Failure(f"{path} changed while it was being read; start again when nobody writes to it")


def is_remote(path: str | Path) -> bool:
    return "://" in str(path) and not str(path).startswith("file://")


def _plain(pattern: str | Path) -> str:
    text = os.fspath(pattern)
    return text if is_remote(text) else os.path.expanduser(text.removeprefix("file://"))


def _local_matches(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    if os.path.isfile(pattern):
        yield pattern
    elif os.path.isdir(pattern):
        yield from _inside(pattern, suffixes)
    elif has_magic(pattern):
        yield from _globbed(pattern, suffixes)


def _globbed(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """As ``glob`` does, but a folder's entries tell what they are without being asked one by one: a million take a second."""
    folder, name = os.path.split(pattern)
    folders = glob(os.path.join(folder, ""), recursive=True) if has_magic(folder) else [folder]
    folders += [""] if folder == "**" else []  # any depth: also here
    if name == "**":
        name = "*"
    matches = re.compile(translate(name)).match
    for each in folders:
        for entry in _entries(each):
            if matches(entry.name) and (name.startswith(".") or not entry.name.startswith(".")):
                if not entry.is_dir():
                    yield entry.path
                elif "**" not in folder:  # else its folders are all among ``folders``
                    yield from _inside(entry.path, suffixes)


def _inside(folder: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    for entry in _entries(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _inside(entry.path, suffixes)
        elif not suffixes or entry.name.lower().endswith(suffixes):
            yield entry.path


def _entries(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder or ".") as entries:
            return [*entries] if folder else [_Bare(entry) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Refusal(f"cannot read the folder {folder}: {error.strerror}") from None


class _Bare:
    """An entry of the folder where we are, named as the user named it: without ``./``."""

    def __init__(self, entry: os.DirEntry):
        self.name = self.path = entry.name
        self.is_dir = entry.is_dir


def _nothing(pattern: str, suffixes: tuple[str, ...]) -> str:
    """Why a pattern found no file, and what is there instead."""
    if is_remote(pattern):
        return f"no file matches {pattern}"
    if os.path.isdir(pattern):
        return f"the folder {pattern} holds no file that ends in {' or '.join(suffixes)}" if suffixes else f"the folder {pattern} is empty"
    folder, name = os.path.split(pattern)
    there = [entry.name for entry in _entries(folder)]
    what = f"no file matches {pattern}" if has_magic(pattern) else f"there is no file {pattern}"
    if has_magic(folder) or not os.path.isdir(folder or "."):
        return what if has_magic(folder) else f"{what}: there is no folder {folder}"
    return what + (nearest(name, sorted(there)[:20] if has_magic(name) else there) if there else ": the folder is empty")


@lru_cache(maxsize=1024)
def _mapped(path: str, size: int, version: int) -> memoryview:
    if not size:
        return memoryview(b"")  # nothing cannot be mapped
    with opened(path) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
