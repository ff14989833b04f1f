"""Finds the files that match a pattern, in the same way for local and remote folders, and lists local folders.

Own code because ``os.walk`` and ``glob`` follow circular links until the path is too long, and fsspec's ``glob``
selects hidden files and does not descend into folders that match; its local ``find`` and ``glob`` take four to six
times the processor time (20,000 files: 0.18 s and 0.21 s against 0.03 s and 0.05 s).
"""

import os
import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import lru_cache

from hasten.core.errors import ConfigurationError

Entries = list[tuple[str, bool]]  # of a folder: each name in it, and whether that is a folder
ListFolder = Callable[[str], Entries]
Walk = Callable[[str], Iterator[tuple[str, Entries]]]  # a folder and all in it, each once, without hidden ones


def glob(
    folder: str,
    pattern: list[str],
    suffixes: tuple[str, ...],
    list_folder: ListFolder,
    walk: Walk,
    entries: Entries | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """Yields (folder, names of files) below ``folder`` that match ``pattern``, which is split at its slashes; of a
    folder that matches, all below it that end in one of ``suffixes`` (empty: all), except hidden ones.

    Folders that the pattern excludes are not listed. ``entries`` are those of ``folder``, if known.
    """
    if not pattern:
        for path, found in walk(folder):
            files = (name for name, is_folder in found if not is_folder and not name.startswith("."))
            yield path, [name for name in files if name.lower().endswith(suffixes or "")]
    elif pattern[0] == "**" and len(pattern) > 1:
        for path, found in walk(folder):
            yield from glob(path, pattern[1:], suffixes, list_folder, walk, found)
    else:
        is_match, names = _matcher("*" if pattern[0] == "**" else pattern[0]), []
        for name, is_folder in list_folder(folder) if entries is None else entries:
            if not is_match(name):
                continue
            if is_folder:
                yield from glob(os.path.join(folder, name), pattern[1:], suffixes, list_folder, walk)
            elif len(pattern) == 1:
                names.append(name)
        yield folder, names


@lru_cache
def _matcher(pattern: str) -> Callable[[str], bool]:
    """Returns ``(name) -> bool`` for one part of a path; only a pattern with a leading dot matches hidden names."""
    match = re.compile(translate(pattern)).match
    return lambda name: match(name) is not None and (pattern.startswith(".") or not name.startswith("."))


# ---- local folders; an empty path is the working directory


def list_local(folder: str) -> Entries:
    """Returns the entries of a local folder; ConfigurationError if it cannot be read."""
    return [(entry.name, _is_folder(entry)) for entry in _scan(folder)]


def walk_local(root: str) -> Iterator[tuple[str, Entries]]:
    """Walks a local folder; one that is also reachable through links is visited once. ConfigurationError if a folder
    cannot be read.
    """
    visited: set[tuple[int, int]] = set()  # (device, inode), the same for all paths to a folder
    waiting, links = [root], []
    while waiting or links:  # links last and sorted: a folder inside the root is visited under its own name
        folder = waiting.pop() if waiting else links.pop(links.index(min(links)))
        entries: Entries = []
        for entry in _scan(folder, visited):
            is_folder = _is_folder(entry)
            entries.append((entry.name, is_folder))
            if is_folder and not entry.name.startswith("."):
                (links if entry.is_symlink() else waiting).append(os.path.join(folder, entry.name))
        yield folder, entries


def _scan(folder: str, visited: set[tuple[int, int]] | None = None) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder; none if it is in ``visited``, to which it is added."""
    try:
        if visited is not None:
            info = os.stat(folder or ".")
            if (info.st_dev, info.st_ino) in visited:
                return []
            visited.add((info.st_dev, info.st_ino))
        with os.scandir(folder or ".") as scan:  # the types of entries come with it, without a ``stat`` for each
            return [*scan]
    except OSError as error:
        raise ConfigurationError(f"cannot read the folder {folder}: {error.strerror}") from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; False for a broken or circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False
