"""Cached lists of the files in a folder: opening a million images takes an instant the second time.

A cached list is valid while the modification time of every folder in it is the same. Adding, removing or renaming a
file changes the time of its folder; overwriting a file changes neither that time nor the list. Remote folders have no
such times and are listed every time.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy

from hasten.core.errors import ConfigurationError
from hasten.data.io.dir_walk import walk
from hasten.data.io.metadata_cache import TIMESTAMP_GRANULARITY_NS, load, store

MIN_FILES = 1000  # the list of a smaller folder is not cached


@dataclass(frozen=True)
class FileList:
    """Files by index, in arrays: forked processes share arrays, but copy the pages of a million ``str`` they read."""

    root: str  # the common beginning of all paths; may be empty
    folders: list[str]  # relative to the root, sorted
    parents: numpy.ndarray  # index of each file's folder, int32, shape (files,)
    letters: numpy.ndarray  # all file names, one after the other, UTF-8, uint8
    ends: numpy.ndarray  # the end of each name in ``letters``, int64, shape (files,)

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> str:
        begin = self.ends[index - 1] if index else 0
        return os.fsdecode(self.letters[begin : self.ends[index]].tobytes())

    def relative_path(self, index: int) -> str:
        """The path of a file, relative to the root."""
        folder = self.folders[self.parents[index]]
        return f"{folder}/{self.name(index)}" if folder else self.name(index)

    def path(self, index: int) -> str:
        return f"{self.root}/{self.relative_path(index)}" if self.root else self.relative_path(index)


def list_folder(folder: str | Path, suffixes: tuple[str, ...]) -> FileList:
    """Returns the files below a folder whose names end in one of the suffixes, sorted by folder and name.
    ConfigurationError if there is none, or a folder cannot be read.
    """
    root = os.path.abspath(folder)
    key = ["files in a folder", root, suffixes]
    listed = _load(key, root)
    if listed is None:
        start_ns, files, times = time.time_ns(), {}, {}
        for path, modified_ns, names in walk(root):
            files[path], times[path] = [name for name in names if name.lower().endswith(suffixes)], modified_ns
        listed = _build(root, files)
        if len(listed) >= MIN_FILES and max(times.values()) < start_ns - TIMESTAMP_GRANULARITY_NS:
            arrays = [listed.parents, listed.letters, listed.ends]
            store(key, {"folders": listed.folders, "times": times}, arrays)
    if not len(listed):
        raise ConfigurationError(f"the folder {folder} holds no file that ends in {' or '.join(suffixes)}")
    return listed


def file_list_of(paths: Iterable[str]) -> FileList:
    """Returns the given paths, sorted by folder, then by name."""
    files: dict[str, list[str]] = {}
    for path in paths:
        folder, name = path.rsplit("/", 1) if "/" in path else ("", path)
        files.setdefault(folder, []).append(name)
    return _build("", files)


def _build(root: str, files: dict[str, list[str]]) -> FileList:
    folders = sorted(folder for folder, names in files.items() if names)
    names = [os.fsencode(name) for folder in folders for name in sorted(files[folder])]
    counts = [len(files[folder]) for folder in folders]
    return FileList(
        root=root,
        folders=folders,
        parents=numpy.repeat(numpy.arange(len(folders), dtype=numpy.int32), counts),
        letters=numpy.frombuffer(b"".join(names), numpy.uint8),
        ends=numpy.cumsum(numpy.fromiter(map(len, names), numpy.int64, len(names))),
    )


def _load(key: list, root: str) -> FileList | None:
    """Returns the cached list of a folder; None if there is none, or a folder in it has changed since."""
    entry = load(key)
    if entry is None:
        return None
    info, arrays = entry
    with suppress(OSError):
        if all(os.stat(os.path.join(root, path)).st_mtime_ns == ns for path, ns in info["times"].items()):
            return FileList(root, info["folders"], *arrays)
    return None
