"""Walks directory trees and matches file names. A directory that is also reachable through links is visited once.

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
    """Yields (path relative to ``root``, modification time in ns, names of its files) of a directory and all
    directories in it, each once, without hidden ones. An empty root is the working directory. ConfigurationError if a
    directory cannot be read.
    """
    visited: set[tuple[int, int]] = set()  # (device, inode), the same for all paths to a directory
    waiting, links = [""], []
    while waiting or links:  # links last and sorted: a directory inside the root is visited under its own name
        directory = waiting.pop() if waiting else links.pop(links.index(min(links)))
        path, files = os.path.join(root, directory) if directory else root, []
        try:
            info = os.stat(path or ".")
            if (info.st_dev, info.st_ino) in visited:
                continue
            visited.add((info.st_dev, info.st_ino))
            for entry in entries(path):
                if entry.name.startswith("."):
                    continue
                if is_directory(entry):
                    queue = links if entry.is_symlink() else waiting
                    queue.append(f"{directory}/{entry.name}" if directory else entry.name)
                else:
                    files.append(entry.name)
        except OSError as error:
            raise ConfigurationError(f"cannot read the directory {path}: {error.strerror}") from None
        yield directory, info.st_mtime_ns, files


@lru_cache
def matcher(pattern: str) -> Callable[[str], bool]:
    """Returns ``(name) -> bool`` for one part of a path; only a pattern with a leading dot matches hidden names."""
    match = re.compile(translate(pattern)).match
    return lambda name: match(name) is not None and (pattern.startswith(".") or not name.startswith("."))


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a directory or a link to one; False for a broken or circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def entries(directory: str) -> list[os.DirEntry[str]]:
    """Returns the entries of a directory (empty: the working directory); ConfigurationError if it cannot be read."""
    try:
        with os.scandir(directory or ".") as scan:
            return [*scan]
    except OSError as error:
        raise ConfigurationError(f"cannot read the directory {directory}: {error.strerror}") from None
