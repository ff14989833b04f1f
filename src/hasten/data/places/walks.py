"""Folders, and the folders in them, each met once: a link may lead to one that was met already, or back to where it lies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import lru_cache

from hasten.contract.errors import Refusal

Mark = tuple[int, int]  # (device, number) of a folder, whatever it is called


def walked(root: str, met: set[Mark] | None = None) -> Iterator[tuple[str, int, list[str]]]:
    """(path relative to the root, time in nanoseconds, names of its files) of the root and every folder in it, but hidden ones.

    Args:
        root: a folder; empty for the one where we are.
        met: folders that are passed over; those that are met are added.

    Raises:
        Refusal: a folder cannot be read.
    """
    met = set() if met is None else met
    waiting, links = [""], []
    while waiting or links:  # links last, and in order: what they lead to may be met by its own name
        folder = waiting.pop() if waiting else links.pop(links.index(min(links)))
        path, files = os.path.join(root, folder) if folder else root, []
        try:
            about = os.stat(path or ".")
            if (about.st_dev, about.st_ino) in met:
                continue
            met.add((about.st_dev, about.st_ino))
            for entry in entries(path):
                if entry.name.startswith("."):
                    continue
                if is_folder(entry):
                    (links if entry.is_symlink() else waiting).append(f"{folder}/{entry.name}" if folder else entry.name)
                else:
                    files.append(entry.name)
        except OSError as error:
            raise Refusal(f"cannot read the folder {path}: {error.strerror}") from None
        yield folder, about.st_mtime_ns, files


@lru_cache
def matcher(name: str) -> Callable[[str], bool]:
    """Whether a name is one that a part of a pattern means; hidden ones are meant only by what begins with a point itself."""
    matches = re.compile(translate(name)).match
    return lambda text: matches(text) is not None and (name.startswith(".") or not text.startswith("."))


def is_folder(entry: os.DirEntry) -> bool:
    """Whether it is one, or a link to one. A link that leads nowhere is a file that cannot be read, also where it leads in a circle."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def entries(folder: str) -> list[os.DirEntry]:
    """What lies in a folder; an empty name is the one where we are.

    Raises:
        Refusal: it cannot be read.
    """
    try:
        with os.scandir(folder or ".") as there:
            return [*there]
    except OSError as error:
        raise Refusal(f"cannot read the folder {folder}: {error.strerror}") from None
