"""Walks folder trees and matches file names. A folder that is also reachable through links is visited once.

Own code because ``os.walk`` and ``glob`` follow circular links until the path is too long, and fsspec's local ``find``
and ``glob`` take four to six times the processor time (20,000 files: 0.18 s and 0.21 s against 0.03 s and 0.05 s).
"""

import os
import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import lru_cache

from hasten.core.errors import ConfigurationError


def walk(root: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yields (path relative to ``root``, modification time in ns, names of its files) of a folder and all folders in
    it, each once, without hidden ones. An empty root is the working directory. ConfigurationError if a folder cannot be
    read.
    """
    visited: set[tuple[int, int]] = set()  # (device, inode), the same for all paths to a folder
    waiting, links = [""], []
    while waiting or links:  # links last and sorted: a folder inside the root is visited under its own name
        folder = waiting.pop() if waiting else links.pop(links.index(min(links)))
        path, files = os.path.join(root, folder) if folder else root, []
        try:
            info = os.stat(path or ".")
            if (info.st_dev, info.st_ino) in visited:
                continue
            visited.add((info.st_dev, info.st_ino))
            for entry in entries(path):
                if entry.name.startswith("."):
                    continue
                if is_folder(entry):
                    queue = links if entry.is_symlink() else waiting
                    queue.append(f"{folder}/{entry.name}" if folder else entry.name)
                else:
                    files.append(entry.name)
        except OSError as error:
            raise ConfigurationError(f"cannot read the folder {path}: {error.strerror}") from None
        yield folder, info.st_mtime_ns, files


@lru_cache
def matcher(pattern: str) -> Callable[[str], bool]:
    """Returns ``(name) -> bool`` for one part of a path; only a pattern with a leading dot matches hidden names."""
    match = re.compile(translate(pattern)).match
    return lambda name: match(name) is not None and (pattern.startswith(".") or not name.startswith("."))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; False for a broken or circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def entries(folder: str) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder (empty: the working directory); ConfigurationError if it cannot be read."""
    try:
        with os.scandir(folder or ".") as scan:
            return [*scan]
    except OSError as error:
        raise ConfigurationError(f"cannot read the folder {folder}: {error.strerror}") from None
