"""The list of files in a folder, cached: opening a million images takes an instant the second time.

A cached list is valid as long as the modification time of every folder in it is the same: adding, removing or renaming
a file changes that of its folder. Overwriting a file does not, nor does it change the list. Remote folders are listed
every time, as they have no such times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy

from hasten.core.errors import ConfigurationError
from hasten.data.io.dir_walk import walk
from hasten.data.io.metadata_cache import SETTLED, load, store

WORTH = 1000  # files; the list of a smaller folder is not cached


@dataclass(frozen=True)
class Manifest:
    """Files by index, in arrays that forked processes share: they would copy a million ``str`` when reading them.

    Attributes:
        root: the common beginning of all paths; may be empty.
        folders: relative to the root, sorted.
        parents: index of each file's folder, int32, shape (files,).
        letters: all file names one after the other, UTF-8, uint8.
        ends: the end of each name in ``letters``, int64, shape (files,).
    """

    root: str
    folders: list[str]
    parents: numpy.ndarray
    letters: numpy.ndarray
    ends: numpy.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> str:
        begin = self.ends[index - 1] if index else 0
        return os.fsdecode(self.letters[begin : self.ends[index]].tobytes())

    def inside(self, index: int) -> str:
        """The path of a file, relative to the root."""
        folder = self.folders[self.parents[index]]
        return f"{folder}/{self.name(index)}" if folder else self.name(index)

    def path(self, index: int) -> str:
        return f"{self.root}/{self.inside(index)}" if self.root else self.inside(index)


def manifest_of(folder: str | Path, suffixes: tuple[str, ...]) -> Manifest:
    """The files below a folder whose names end in one of the suffixes, sorted by folder and name.

    Raises:
        Refusal: there is none, or a folder cannot be read.
    """
    root = os.path.abspath(folder)
    key = ["files in a folder", root, suffixes]
    manifest = _recalled(key, root)
    if manifest is None:
        began, files, times = time.time_ns(), {}, {}
        for inner, time_ns, names in walk(root):
            files[inner], times[inner] = [name for name in names if name.lower().endswith(suffixes)], time_ns
        manifest = _made(root, files)
        if len(manifest) >= WORTH and max(times.values()) < began - SETTLED:
            store(
                key, {"folders": manifest.folders, "times": times}, [manifest.parents, manifest.letters, manifest.ends]
            )
    if not len(manifest):
        raise ConfigurationError(f"the folder {folder} holds no file that ends in {' or '.join(suffixes)}")
    return manifest


def manifest_of_paths(paths: Iterable[str]) -> Manifest:
    """Files given by their paths."""
    files: dict[str, list[str]] = {}
    for path in paths:
        folder, name = path.rsplit("/", 1) if "/" in path else ("", path)
        files.setdefault(folder, []).append(name)
    return _made("", files)


def _made(root: str, files: dict[str, list[str]]) -> Manifest:
    folders = sorted(folder for folder, names in files.items() if names)
    names = [os.fsencode(name) for folder in folders for name in sorted(files[folder])]
    return Manifest(
        root=root,
        folders=folders,
        parents=numpy.repeat(numpy.arange(len(folders), dtype=numpy.int32), [len(files[folder]) for folder in folders]),
        letters=numpy.frombuffer(b"".join(names), numpy.uint8),
        ends=numpy.cumsum(numpy.fromiter(map(len, names), numpy.int64, len(names))),
    )


def _recalled(key: list, root: str) -> Manifest | None:
    """The cached list, if no folder has changed since."""
    entry = load(key)
    with suppress(OSError):
        if entry is not None and all(
            os.stat(os.path.join(root, inner)).st_mtime_ns == then for inner, then in entry[0]["times"].items()
        ):
            return Manifest(root, entry[0]["folders"], *entry[1])
    return None
