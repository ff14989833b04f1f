"""Cached lists of the files in a directory: opening a million images takes an instant the second time.

A cached list is valid while the modification time of every directory in it is the same. Adding, removing or renaming a
file changes the time of its directory; overwriting a file changes neither that time nor the list. Remote directories
have no such times and are listed every time.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy

from hasten.core.errors import ConfigurationError
from hasten.data.io.metadata_cache import TIMESTAMP_GRANULARITY_NS, load, store
from hasten.data.io.paths import walk

MIN_FILES = 1000  # the list of a smaller directory is not cached


@dataclass(frozen=True)
class FileList:
    """Files by index, in arrays: forked processes share arrays, but copy the pages of a million ``str`` they read."""

    root: str  # the common beginning of all paths; may be empty
    directories: list[str]  # relative to the root, sorted
    parents: numpy.ndarray  # index of each file's directory, int32, shape (files,)
    letters: numpy.ndarray  # all file names, one after the other, UTF-8, uint8
    ends: numpy.ndarray  # the end of each name in ``letters``, int64, shape (files,)

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> str:
        begin = self.ends[index - 1] if index else 0
        return os.fsdecode(self.letters[begin : self.ends[index]].tobytes())

    def relative_path(self, index: int) -> str:
        """The path of a file, relative to the root."""
        directory = self.directories[self.parents[index]]
        return f"{directory}/{self.name(index)}" if directory else self.name(index)

    def path(self, index: int) -> str:
        return f"{self.root}/{self.relative_path(index)}" if self.root else self.relative_path(index)


def list_directory(directory: str | Path, suffixes: tuple[str, ...]) -> FileList:
    """Returns the files below a directory whose names end in one of the suffixes, sorted by directory and name.
    ConfigurationError if there is none, or a directory cannot be read.
    """
    root = os.path.abspath(directory)
    key = ["files in a directory", root, suffixes]
    listed = _load(key, root)
    if listed is None:
        start_ns, files, times = time.time_ns(), {}, {}
        for path, modified_ns, names in walk(root):
            files[path], times[path] = [name for name in names if name.lower().endswith(suffixes)], modified_ns
        listed = _build(root, files)
        if len(listed) >= MIN_FILES and max(times.values()) < start_ns - TIMESTAMP_GRANULARITY_NS:
            arrays = [listed.parents, listed.letters, listed.ends]
            store(key, {"directories": listed.directories, "times": times}, arrays)
    if not len(listed):
        raise ConfigurationError(f"the directory {directory} holds no file that ends in {' or '.join(suffixes)}")
    return listed


def file_list_of(paths: Sequence[str], root: str = "") -> FileList:
    """Returns the given paths, sorted by directory, then by name; relative to ``root`` if all of them are below it."""
    root = root.rstrip("/")
    if not all(path.startswith(f"{root}/") for path in paths):
        root = ""
    files: dict[str, list[str]] = {}
    for path in paths:
        relative = path.removeprefix(f"{root}/") if root else path
        directory, name = relative.rsplit("/", 1) if "/" in relative else ("", relative)
        files.setdefault(directory, []).append(name)
    return _build(root, files)


def _build(root: str, files: dict[str, list[str]]) -> FileList:
    directories = sorted(directory for directory, names in files.items() if names)
    names = [os.fsencode(name) for directory in directories for name in sorted(files[directory])]
    counts = [len(files[directory]) for directory in directories]
    parents = numpy.repeat(numpy.arange(len(directories), dtype=numpy.int32), counts)
    letters = numpy.frombuffer(b"".join(names), numpy.uint8)
    return FileList(root, directories, parents, letters, numpy.cumsum([*map(len, names)], dtype=numpy.int64))


def _load(key: list, root: str) -> FileList | None:
    """Returns the cached list of a directory; None if there is none, or a directory in it has changed since."""
    entry = load(key)
    if entry is None:
        return None
    info, arrays = entry
    with suppress(OSError):
        if all(os.stat(os.path.join(root, path)).st_mtime_ns == ns for path, ns in info["times"].items()):
            return FileList(root, info["directories"], *arrays)
    return None
