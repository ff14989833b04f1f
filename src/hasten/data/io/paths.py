"""Resolves paths, directories and patterns to files, opens files, and detects changed files.

A path that contains ``://`` is remote (``remote.py``); everything else is local and uses the standard library only.
"""

import errno
import io
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from glob import has_magic
from pathlib import Path
from typing import BinaryIO, NoReturn

from hasten.core.errors import ConfigurationError, RunError, suggest
from hasten.data.io import remote
from hasten.data.io.remote import has_suffix, matcher

NUMBER_RANGE = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")
# Errors of one file, as opposed to errors of the machine or the disk.
FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EINVAL)
MAX_MAPPED_FILES = 128  # each counts towards the process's limit of open files, usually 1,024


class FileMissingError(ConfigurationError):
    """A file is missing, unreadable or damaged. If there are other files, it counts as a bad row."""


def resolve_paths(patterns: str | Path | Iterable[str | Path], suffixes: tuple[str, ...] = ()) -> list[str]:
    """Returns all files that some paths or patterns select, sorted, each once.

    Patterns contain ``*``, ``?``, ``[...]``, ``**`` for any depth, ``{000..099}`` for a range of numbers; local or
    remote. A directory, also one that a pattern matches, selects all files below it that end in one of ``suffixes``
    (empty: all), except hidden ones; one that is also reachable through links is read once. ConfigurationError if a
    pattern matches nothing, or a file or directory cannot be read; RunError if a server did not answer.
    """
    patterns = list(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else [patterns]
    if not patterns:
        raise ConfigurationError("no file was given")
    suffixes = tuple(suffix.lower() for suffix in suffixes)
    files: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, (str, os.PathLike)):
            raise ConfigurationError(f"a file is given by a str or a Path, not by {pattern!r:.80}")
        if not os.fspath(pattern):
            raise ConfigurationError("a path is an empty str; give the path of a file, or omit it")
        matches = remote.matches if is_remote(pattern) else _local_matches
        for expanded in _expand_numbers(plain(pattern)):
            selected = set(matches(expanded, suffixes))
            if not selected:
                raise ConfigurationError(_no_match_message(expanded, suffixes))
            files |= selected
    return sorted(files)


def open_file(path: str) -> BinaryIO:
    """Opens a file for reading bytes at any position. ConfigurationError if it does not exist or access is denied;
    RunError if its server failed four times.
    """
    if is_remote(path):
        return io.BufferedReader(remote.RemoteFile(path), 1 << 20)
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None


def mapped_bytes(path: str) -> memoryview:
    """Maps a local file read-only, or raises ConfigurationError. Truncating the file kills its readers (SIGBUS)."""
    _, size, version = file_signature(path)
    return _mapped(path, size, *version)


def file_signature(path: str) -> list:
    """Returns [path, size in bytes, version], which changes when the file does; ConfigurationError if there is no such
    file.

    The version of a local file is [modification time, change time] in nanoseconds; programs cannot set the change time
    back. The inode number is left out: some network file systems assign new ones every day.
    """
    if is_remote(path):
        return remote.remote_signature(path)
    try:
        info = os.stat(path)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    return [os.path.abspath(path), info.st_size, [info.st_mtime_ns, info.st_ctime_ns]]


def check_unchanged(path: str, signature: list) -> None:
    """Raises RunError if the size or the version of a file is no longer that in ``signature``, or it is unreadable."""
    try:
        is_same = content_version(file_signature(path)) == content_version(signature)
    except ConfigurationError as error:
        raise RunError(f"{path} became unreadable while it was being read: {error}") from None
    if not is_same:
        raise RunError(f"{path} changed while it was being read; start again when no process writes to it")


def content_version(signature: list) -> tuple:
    """Returns (size, version) of a ``file_signature`` without a local file's change time, which also changes when a
    backup links to the file or its permissions change.
    """
    _, size, version = signature
    return size, version[0] if isinstance(version, list) else version


def is_file_error(path: str, error: ConfigurationError) -> bool:
    """Whether an error is limited to one file: it is missing, unreadable or damaged. An expired login, a missing
    package or a wrong delimiter is not: every file would fail.
    """
    if is_remote(path):
        return isinstance(error, (FileMissingError, remote.NotFoundError))
    return isinstance(error, FileMissingError) or getattr(error.__context__, "errno", None) in FILE_ERRNOS


def is_remote(path: str | Path) -> bool:
    """Whether a path is an address with a scheme other than ``file``."""
    return "://" in str(path) and not str(path).startswith("file://")


def plain(pattern: str | Path) -> str:
    """Returns a path as str, a local one without ``file://`` and with ``~`` expanded."""
    text = os.fspath(pattern)
    return text if is_remote(text) else os.path.expanduser(text.removeprefix("file://"))


def _expand_numbers(pattern: str) -> Iterator[str]:
    """Yields the pattern for each number of ``{000..099}``; ConfigurationError if the first is above the last."""
    if (match := NUMBER_RANGE.search(pattern)) is None:
        yield pattern
        return
    first, last = match.groups()
    if int(last) < int(first):
        raise ConfigurationError(f"{match[0]} in {pattern} counts backwards; write {{{last}..{first}}}")
    for number in range(int(first), int(last) + 1):
        yield from _expand_numbers(f"{pattern[: match.start()]}{number:0{len(first)}}{pattern[match.end() :]}")


def _local_matches(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yields the files that a local path, directory or pattern selects, each once, by its path without links if any."""
    if os.path.isfile(pattern):
        yield pattern
        return
    top, parts = pattern, list[str]()
    while has_magic(top) and not os.path.isdir(top):
        top, part = os.path.split(top)
        parts.insert(0, part)
    found: dict[str, dict[str, set[str]]] = {}  # real path of a directory -> each path to it -> names of files
    for directory, names in _glob(top, parts, suffixes) if os.path.isdir(top or ".") else ():
        paths = found.setdefault(os.path.realpath(directory), {})
        paths.setdefault(directory, set()).update(names)
    for real, paths in found.items():
        seen: set[str] = set()
        for directory in sorted(paths, key=lambda path: (os.path.abspath(path) != real, path)):
            prefix = os.path.join(directory, "")
            yield from (prefix + name for name in paths[directory] - seen)
            seen |= paths[directory]


def _glob(directory: str, pattern: list[str], suffixes: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yields (directory, names of files) below ``directory`` that match ``pattern``, which is split at its slashes,
    some repeatedly; of a directory that matches, all below it that end in one of ``suffixes``.
    """
    if not pattern:
        for path, _, names in walk(directory):
            yield os.path.join(directory, path), [name for name in names if has_suffix(name, suffixes)]
    elif pattern[0] == "**" and len(pattern) > 1:
        for path, _, _ in walk(directory):
            yield from _glob(os.path.join(directory, path) if path else directory, pattern[1:], suffixes)
    else:
        is_match, names = matcher("*" if pattern[0] == "**" else pattern[0]), []
        for entry in _entries(directory):
            if not is_match(entry.name):
                continue
            if _is_directory(entry):
                yield from _glob(os.path.join(directory, entry.name), pattern[1:], suffixes)
            elif len(pattern) == 1:
                names.append(entry.name)
        yield directory, names


def _no_match_message(pattern: str, suffixes: tuple[str, ...]) -> str:
    """Returns the error message for a pattern that selects no file, with similar names that exist."""
    if is_remote(pattern):
        return f"no file matches {pattern}"
    if os.path.isdir(pattern):
        if suffixes:
            return f"the directory {pattern} holds no file that ends in {' or '.join(suffixes)}"
        return f"the directory {pattern} is empty"
    if os.path.exists(pattern):
        return f"{pattern} is not a regular file"
    if os.path.islink(pattern):
        return f"{pattern} is a link to a missing file"
    directory, name = os.path.split(pattern)
    message = f"no file matches {pattern}" if has_magic(pattern) else f"there is no file {pattern}"
    if has_magic(directory):
        return message
    if not os.path.isdir(directory or "."):
        return f"{message}: there is no directory {directory}"
    names = [entry.name for entry in _entries(directory)]
    if not names:
        return f"{message}: the directory is empty"
    return message + suggest(name, sorted(names)[:20] if has_magic(name) else names)


def walk(root: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yields (path relative to ``root``, modification time in ns, names of its files) of a directory and all
    directories in it, each once, without hidden ones. An empty root is the working directory. ConfigurationError if a
    directory cannot be read. ``os.walk(followlinks=True)`` would follow circular links until the path is too long.
    """
    visited: set[tuple[int, int]] = set()  # (device, inode), the same for all paths to a directory
    waiting, links = [""], []
    while waiting or links:  # links last and sorted: a directory inside the root is visited under its own name
        directory = waiting.pop() if waiting else links.pop(links.index(min(links)))
        path, files = os.path.join(root, directory) if directory else root, []
        try:
            info = os.stat(path or ".")  # before the listing: a file that is added meanwhile changes the time
            if (info.st_dev, info.st_ino) in visited:
                continue
            visited.add((info.st_dev, info.st_ino))
            for entry in _entries(path):
                if entry.name.startswith("."):
                    continue
                if _is_directory(entry):
                    queue = links if entry.is_symlink() else waiting
                    queue.append(f"{directory}/{entry.name}" if directory else entry.name)
                else:
                    files.append(entry.name)
        except OSError as error:
            _refuse(error)
        yield directory, info.st_mtime_ns, files


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a directory or a link to one; False for a broken or circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _entries(directory: str) -> list[os.DirEntry[str]]:
    """Returns the entries of a directory (empty: the working directory); ConfigurationError if it cannot be read."""
    try:
        with os.scandir(directory or ".") as scan:
            return [*scan]
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise ConfigurationError(f"cannot read the directory {error.filename}: {error.strerror}") from None


@lru_cache(maxsize=MAX_MAPPED_FILES)
def _mapped(path: str, size: int, *version: int) -> memoryview:
    if not size:
        return memoryview(b"")  # an empty file cannot be mapped
    with open_file(path) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
