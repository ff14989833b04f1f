"""Where files are: patterns and folders, local or remote, and what tells whether a file is still the same.

A path with ``://`` in it is remote (``remote.py``); everything else is local and touches nothing but the standard library.
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

from hasten.contract.errors import Failure, Refusal, nearest
from hasten.data.places import remote
from hasten.data.places.walks import Mark, entries, is_folder, matcher, walked

NUMBERS = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")
BLAMING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EINVAL)  # a file, and not the machine
MAPPED = 128  # files that stay mapped: each counts among those that a process may have open, usually 1,024


class Lost(Refusal):
    """A file is not there, may not be read, or is no whole one of its format: where there are others, it is a bad row."""


def found(patterns: str | Path | Iterable[str | Path], suffixes: tuple[str, ...] = ()) -> list[str]:
    """Every file that is meant, sorted, each once.

    Args:
        patterns: files, folders or patterns (``*``, ``?``, ``[...]``, ``**`` for any depth, ``{000..099}`` for so many names), local or
            remote. A folder that links lead to as well is met once.
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
        if not os.fspath(pattern):
            raise Refusal("a file was named by an empty text")
        matches = remote.matches if is_remote(pattern) else _local_matches
        for each in _expanded(plain(pattern)):
            some = set(matches(each, tuple(suffix.lower() for suffix in suffixes)))
            if not some:
                raise Refusal(_nothing(each, suffixes))
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
    """The bytes of a local file, mapped into memory: read-only, and shared by all processes. Who cuts it off meanwhile kills them.

    Raises:
        Refusal: it is not there, or may not be read.
    """
    _, size, version = stamp(path)
    return _mapped(path, size, *version)


def stamp(path: str) -> list:
    """[path, bytes, version], which changes when the file does.

    A local file's version is the time of its content and that of its inode, in nanoseconds: the second cannot be set back. The
    number of the inode says no more, and some network file systems make up a new one every day.

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
    return [os.path.abspath(path), about.st_size, [about.st_mtime_ns, about.st_ctime_ns]]


def unchanged(path: str, before: list) -> None:
    """Makes sure that a file is still the one whose stamp was taken.

    Raises:
        Failure: it changed, or went away.
    """
    try:
        same = _content(stamp(path)) == _content(before)
    except Refusal as gone:
        raise Failure(f"{path} went away while it was being read: {gone}") from None
    if not same:
        raise Failure(f"{path} changed while it was being read; start again when nobody writes to it")


def _content(stamp: list) -> tuple:
    """What of a stamp tells of the content; an inode changes too when a file is linked to, as backups do."""
    _, size, version = stamp
    return size, version[0] if isinstance(version, list) else version


def is_lost(path: str, refused: Refusal) -> bool:
    """Whether a file is to blame: it is not there, may not be read, or is no whole one.

    A login that has run out is no fault of it, nor are a machine that lacks something and a delimiter that is another.
    """
    if is_remote(path):
        return isinstance(refused, (Lost, remote.Nothing))
    return isinstance(refused, Lost) or getattr(refused.__context__, "errno", None) in BLAMING  # the system's, in other words


def is_remote(path: str | Path) -> bool:
    return "://" in str(path) and not str(path).startswith("file://")


def plain(pattern: str | Path) -> str:
    """A path as text; a local one without ``file://``, and ``~`` written out."""
    text = os.fspath(pattern)
    return text if is_remote(text) else os.path.expanduser(text.removeprefix("file://"))


def _expanded(pattern: str) -> Iterator[str]:
    """``{000..099}`` written out, as WebDataset's users name their shards."""
    if (numbers := NUMBERS.search(pattern)) is None:
        yield pattern
        return
    first, last = numbers.groups()
    if int(last) < int(first):
        raise Refusal(f"{numbers[0]} in {pattern} counts backwards; say {{{last}..{first}}}")
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
    """(path with a slash at its end, names of the files) of a folder and every folder in it that is not met."""
    return ((os.path.join(folder, inner, ""), names) for inner, _, names in walked(folder, met))


def _wanted(name: str, suffixes: tuple[str, ...]) -> bool:
    return not suffixes or name.lower().endswith(suffixes)


def _globbed(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """As ``glob`` does, but no file twice, and entries tell what they are without being asked: a million take a second.

    A folder that is meant stands for what lies in it.
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
    meant = {path for _, path in folders}
    passed = {mark for mark, each in searched.items() if not any(above in meant for above in _upwards(each))}
    met = set(passed)
    for _, each in sorted(folders):
        if (mark := _mark(each)) in passed:  # meant by the name of a link that leads to it
            passed.remove(mark)
            met.remove(mark)
        for path, names in _inside(each, met):
            given = _mark(path) in searched
            yield from (path + name for name in names if _wanted(name, suffixes) and not (given and matches(name)))


def _upwards(folder: str) -> Iterator[str]:
    """The folder and those above it, spelt as it is."""
    while folder:
        yield folder
        above = os.path.dirname(folder)
        folder = above if above != folder else ""


def _folders(pattern: str) -> Iterator[str]:
    """The folders that a pattern means; ``**`` is any depth."""
    if not has_magic(pattern):
        if os.path.isdir(pattern or "."):
            yield pattern
        return
    above, name = os.path.split(pattern)
    matches = matcher(name)
    for each in _folders(above):
        if name == "**":
            yield from (os.path.join(each, inner) if inner else each for inner, _, _ in walked(each))
        elif has_magic(name):
            yield from (os.path.join(each, entry.name) for entry in entries(each) if matches(entry.name) and is_folder(entry))
        elif os.path.isdir(os.path.join(each, name)):
            yield os.path.join(each, name)


def _once(folders: Iterable[str], met: dict[Mark, str]) -> Iterator[str]:
    """Each folder once, by its own name rather than a link's; those that are met are added."""
    for folder in sorted(folders, key=lambda each: (os.path.realpath(each) != os.path.abspath(each), each)):
        if (mark := _mark(folder)) not in met:
            met[mark] = folder
            yield folder


def _mark(folder: str) -> Mark:
    try:
        about = os.stat(folder or ".")
    except OSError as error:
        raise Refusal(f"cannot read the folder {folder}: {error.strerror}") from None
    return about.st_dev, about.st_ino


def _nothing(pattern: str, suffixes: tuple[str, ...]) -> str:
    """Why a pattern found no file, and what is there instead."""
    if is_remote(pattern):
        return f"no file matches {pattern}"
    if os.path.isdir(pattern):
        return f"the folder {pattern} holds no file that ends in {' or '.join(suffixes)}" if suffixes else f"the folder {pattern} is empty"
    if os.path.exists(pattern):
        return f"{pattern} is no regular file"
    if os.path.islink(pattern):
        return f"{pattern} is a link that leads nowhere"
    folder, name = os.path.split(pattern)
    what = f"no file matches {pattern}" if has_magic(pattern) else f"there is no file {pattern}"
    if has_magic(folder) or not os.path.isdir(folder or "."):
        return what if has_magic(folder) else f"{what}: there is no folder {folder}"
    there = [entry.name for entry in entries(folder)]
    return what + (nearest(name, sorted(there)[:20] if has_magic(name) else there) if there else ": the folder is empty")


@lru_cache(maxsize=MAPPED)
def _mapped(path: str, size: int, *version: int) -> memoryview:
    if not size:
        return memoryview(b"")  # nothing cannot be mapped
    with opened(path) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
