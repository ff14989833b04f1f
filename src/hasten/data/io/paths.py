"""Resolves paths, folders and patterns to files, opens files, and detects changed files.

A path that contains ``://`` is remote (``remote.py``); everything else is local and uses the standard library only.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from glob import has_magic
from pathlib import Path
from typing import BinaryIO

from hasten.core.errors import ConfigurationError, RunError, suggest
from hasten.data.io import remote
from hasten.data.io.dir_walk import Mark, entries, is_folder, matcher, walk

NUMBERS = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")
BLAMING = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
)  # the fault of a file, not the machine
MAPPED = 128  # files that stay mapped: each counts towards the process's limit of open files, usually 1,024


class FileMissingError(ConfigurationError):
    """A file is missing, unreadable or damaged. Where there are other files, it counts as a bad row."""


def resolve_paths(patterns: str | Path | Iterable[str | Path], suffixes: tuple[str, ...] = ()) -> list[str]:
    """All files that some paths or patterns select, sorted, each once.

    Args:
        patterns: files, folders or patterns (``*``, ``?``, ``[...]``, ``**`` for any depth, ``{000..099}`` for a range
            of numbers), local or remote. A folder, also one that a pattern matches, stands for all files below it
            except hidden ones; one that links lead to as well is read once.
        suffixes: endings (``.parquet``) of the files that a folder stands for; empty for all.

    Raises:
        Refusal: a pattern matches nothing, a file does not exist, or the file system cannot be reached.
    """
    patterns = list(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else [patterns]
    if not patterns:
        raise ConfigurationError("no file was named")
    files: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, (str, os.PathLike)):
            raise ConfigurationError(f"a file is named by a text or a path, not by {pattern!r:.80}")
        if not os.fspath(pattern):
            raise ConfigurationError("a file was named by an empty text")
        matches = remote.matches if is_remote(pattern) else _local_matches
        for each in _expanded(plain(pattern)):
            some = set(matches(each, tuple(suffix.lower() for suffix in suffixes)))
            if not some:
                raise ConfigurationError(_nothing(each, suffixes))
            files |= some
    return sorted(files)


def open_file(path: str) -> BinaryIO:
    """A file opened for reading bytes at any position.

    Raises:
        Refusal: it does not exist, or may not be read.
        Failure: its server did not answer four times.
    """
    if is_remote(path):
        return io.BufferedReader(remote.RemoteFile(path), 1 << 20)
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None


def mapped_bytes(path: str) -> memoryview:
    """The bytes of a local file, mapped into memory read-only. Truncating the file kills its readers (SIGBUS).

    Raises:
        Refusal: it does not exist, or may not be read.
    """
    _, size, version = file_signature(path)
    return _mapped(path, size, *version)


def file_signature(path: str) -> list:
    """[path, size in bytes, version], which changes when the file does.

    The version of a local file is [modification time, change time] in nanoseconds. The change time cannot be set back.
    The inode number adds nothing, and some network file systems assign new ones every day.

    Raises:
        Refusal: it does not exist.
        Failure: its server did not answer.
    """
    if is_remote(path):
        return remote.remote_signature(path)
    try:
        info = os.stat(path)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    return [os.path.abspath(path), info.st_size, [info.st_mtime_ns, info.st_ctime_ns]]


def check_unchanged(path: str, before: list) -> None:
    """Checks that a file has not changed since its stamp was taken.

    Raises:
        Failure: it changed, or was removed.
    """
    try:
        same = _content(file_signature(path)) == _content(before)
    except ConfigurationError as gone:
        raise RunError(f"{path} went away while it was being read: {gone}") from None
    if not same:
        raise RunError(f"{path} changed while it was being read; start again when nobody writes to it")


def _content(stamp: list) -> tuple:
    """(size, version) without the change time of a local file, which changes also when a backup links to the file."""
    _, size, version = stamp
    return size, version[0] if isinstance(version, list) else version


def is_lost(path: str, refused: ConfigurationError) -> bool:
    """Whether an error is the fault of one file: it is missing, unreadable or damaged.

    An expired login, missing software and a wrong delimiter are not: every file would fail.
    """
    if is_remote(path):
        return isinstance(refused, (FileMissingError, remote.NotFoundError))
    return (
        isinstance(refused, FileMissingError) or getattr(refused.__context__, "errno", None) in BLAMING
    )  # an OSError behind it


def is_remote(path: str | Path) -> bool:
    return "://" in str(path) and not str(path).startswith("file://")


def plain(pattern: str | Path) -> str:
    """A path as text, a local one without ``file://`` and with ``~`` expanded."""
    text = os.fspath(pattern)
    return text if is_remote(text) else os.path.expanduser(text.removeprefix("file://"))


def _expanded(pattern: str) -> Iterator[str]:
    """A pattern for each number of ``{000..099}``, as WebDataset's users name their shards."""
    if (numbers := NUMBERS.search(pattern)) is None:
        yield pattern
        return
    first, last = numbers.groups()
    if int(last) < int(first):
        raise ConfigurationError(f"{numbers[0]} in {pattern} counts backwards; say {{{last}..{first}}}")
    for number in range(int(first), int(last) + 1):
        yield from _expanded(f"{pattern[: numbers.start()]}{number:0{len(first)}}{pattern[numbers.end() :]}")


def _local_matches(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    if os.path.isfile(pattern):
        yield pattern
    elif os.path.isdir(pattern):
        yield from (path + name for path, names in _inside(pattern, set()) for name in names if _wanted(name, suffixes))
    elif has_magic(pattern):
        yield from _globbed(pattern, suffixes)


def _inside(folder: str, met: set[Mark]) -> Iterator[tuple[str, list[str]]]:
    """(path with a slash at its end, names of the files) of a folder and every folder in it that is not in ``met``."""
    return ((os.path.join(folder, inner, ""), names) for inner, _, names in walk(folder, met))


def _wanted(name: str, suffixes: tuple[str, ...]) -> bool:
    return not suffixes or name.lower().endswith(suffixes)


def _globbed(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """The files that a pattern selects, and those below the folders that it selects, each once.

    A folder is read under its own name where that is selected too, and under a link's otherwise. The types of entries
    come with the listing, without a ``stat`` for each file: a million files take a second.
    """
    folder, name = os.path.split(pattern)
    matches, searched, folders = matcher("*" if name == "**" else name), {}, []
    for each in _once(_folders(folder), searched):
        for entry in entries(each):
            if matches(entry.name):
                path = os.path.join(each, entry.name)
                if is_folder(entry):
                    folders.append((entry.is_symlink(), path))
                else:
                    yield path
    selected = {path for _, path in folders}
    passed = {mark for mark, each in searched.items() if not any(above in selected for above in _upwards(each))}
    met = set(passed)
    for _, each in sorted(folders):
        if (mark := _mark(each)) in passed:  # selected through a link
            passed.remove(mark)
            met.remove(mark)
        for path, names in _inside(each, met):
            was_searched = _mark(path) in searched
            yield from (
                path + name for name in names if _wanted(name, suffixes) and not (was_searched and matches(name))
            )


def _upwards(folder: str) -> Iterator[str]:
    """A folder and its parents, as far as its path names them."""
    while folder:
        yield folder
        above = os.path.dirname(folder)
        folder = above if above != folder else ""


def _folders(pattern: str) -> Iterator[str]:
    """The folders that a pattern selects; ``**`` is any depth."""
    if not has_magic(pattern):
        if os.path.isdir(pattern or "."):
            yield pattern
        return
    above, name = os.path.split(pattern)
    matches = matcher(name)
    for each in _folders(above):
        if name == "**":
            yield from (os.path.join(each, inner) if inner else each for inner, _, _ in walk(each))
        elif has_magic(name):
            yield from (
                os.path.join(each, entry.name) for entry in entries(each) if matches(entry.name) and is_folder(entry)
            )
        elif os.path.isdir(os.path.join(each, name)):
            yield os.path.join(each, name)


def _once(folders: Iterable[str], met: dict[Mark, str]) -> Iterator[str]:
    """Each folder once, under its own name rather than a link's; it is added to ``met``."""
    for folder in sorted(folders, key=lambda each: (os.path.realpath(each) != os.path.abspath(each), each)):
        if (mark := _mark(folder)) not in met:
            met[mark] = folder
            yield folder


def _mark(folder: str) -> Mark:
    try:
        info = os.stat(folder or ".")
    except OSError as error:
        raise ConfigurationError(f"cannot read the folder {folder}: {error.strerror}") from None
    return info.st_dev, info.st_ino


def _nothing(pattern: str, suffixes: tuple[str, ...]) -> str:
    """Why a pattern selects no file, and which similar names exist."""
    if is_remote(pattern):
        return f"no file matches {pattern}"
    if os.path.isdir(pattern):
        return (
            f"the folder {pattern} holds no file that ends in {' or '.join(suffixes)}"
            if suffixes
            else f"the folder {pattern} is empty"
        )
    if os.path.exists(pattern):
        return f"{pattern} is no regular file"
    if os.path.islink(pattern):
        return f"{pattern} is a link that leads nowhere"
    folder, name = os.path.split(pattern)
    what = f"no file matches {pattern}" if has_magic(pattern) else f"there is no file {pattern}"
    if has_magic(folder) or not os.path.isdir(folder or "."):
        return what if has_magic(folder) else f"{what}: there is no folder {folder}"
    there = [entry.name for entry in entries(folder)]
    return what + (
        suggest(name, sorted(there)[:20] if has_magic(name) else there) if there else ": the folder is empty"
    )


@lru_cache(maxsize=MAPPED)
def _mapped(path: str, size: int, *version: int) -> memoryview:
    if not size:
        return memoryview(b"")  # an empty file cannot be mapped
    with open_file(path) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
