"""Walks folder trees and matches names; a folder that links lead to as well is visited once.

Own code because ``os.walk`` and ``glob`` follow links that lead back until the path is too long, and fsspec's local
``find`` and ``glob`` take four to six times the processor time (20,000 files: 0.18 s and 0.21 s against 0.03 s and 0.05
s).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import lru_cache

from hasten.core.errors import ConfigurationError

Mark = tuple[int, int]  # (device, inode) of a folder: the same for all its names


def walk(root: str, met: set[Mark] | None = None) -> Iterator[tuple[str, int, list[str]]]:
    """Walks a folder and all folders in it except hidden ones.

    Args:
        root: a folder; empty for the working directory.
        met: folders to leave out; the visited ones are added.

    Yields:
        (path relative to the root, modification time in nanoseconds, names of its files) of each folder.

    Raises:
        Refusal: a folder cannot be read.
    """
    met = set() if met is None else met
    waiting, links = [""], []
    while (
        waiting or links
    ):  # links last and sorted, so that a folder is visited under its own name if it is inside the root
        folder = waiting.pop() if waiting else links.pop(links.index(min(links)))
        path, files = os.path.join(root, folder) if folder else root, []
        try:
            info = os.stat(path or ".")
            if (info.st_dev, info.st_ino) in met:
                continue
            met.add((info.st_dev, info.st_ino))
            for entry in entries(path):
                if entry.name.startswith("."):
                    continue
                if is_folder(entry):
                    (links if entry.is_symlink() else waiting).append(
                        f"{folder}/{entry.name}" if folder else entry.name
                    )
                else:
                    files.append(entry.name)
        except OSError as error:
            raise ConfigurationError(f"cannot read the folder {path}: {error.strerror}") from None
        yield folder, info.st_mtime_ns, files


@lru_cache
def matcher(pattern: str) -> Callable[[str], bool]:
    """A predicate for one part of a path; only a pattern that begins with a dot matches hidden names."""
    match = re.compile(translate(pattern)).match
    return lambda name: match(name) is not None and (pattern.startswith(".") or not name.startswith("."))


def is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder or a link to one. A broken or circular link counts as an unreadable file."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def entries(folder: str) -> list[os.DirEntry]:
    """The entries of a folder; an empty name is the working directory.

    Raises:
        Refusal: it cannot be read.
    """
    try:
        with os.scandir(folder or ".") as scan:
            return [*scan]
    except OSError as error:
        raise ConfigurationError(f"cannot read the folder {folder}: {error.strerror}") from None
