"""What files a folder holds, remembered: opening a million pictures is instant the second time.

A folder is walked through once, and the names are kept. A kept list holds as long as the time of every folder in it: adding, removing
or renaming a file changes its folder's. Overwriting one does not, nor does it change the list. The list of a remote folder is asked for
every time: nothing tells that such a folder has changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy

from hasten.contract.errors import Refusal
from hasten.data.places.kept import SETTLED, keep, recalled
from hasten.data.places.walks import walked

WORTH = 1000  # files; a smaller folder is walked through in no time


@dataclass(frozen=True)
class Manifest:
    """Files by number.

    Attributes:
        root: what all paths begin with; may be empty.
        folders: relative to the root, sorted.
        parents: the number of each file's folder, int32.
        letters: the file names, one after the other, UTF-8 (uint8).
        ends: where each name ends in them, int64.
    """

    root: str
    folders: list[str]
    parents: numpy.ndarray
    letters: numpy.ndarray
    ends: numpy.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, number: int) -> str:
        begin = self.ends[number - 1] if number else 0
        return os.fsdecode(self.letters[begin : self.ends[number]].tobytes())

    def inside(self, number: int) -> str:
        """The path of a file, relative to the root."""
        folder = self.folders[self.parents[number]]
        return f"{folder}/{self.name(number)}" if folder else self.name(number)

    def path(self, number: int) -> str:
        return f"{self.root}/{self.inside(number)}" if self.root else self.inside(number)


def manifest_of(folder: str | Path, suffixes: tuple[str, ...]) -> Manifest:
    """The files in a folder and the folders in it whose names end in one of the suffixes, sorted by folder and name.

    Raises:
        Refusal: there is none.
    """
    root = os.path.abspath(folder)
    about = ["files in a folder", root, suffixes]
    manifest = _recalled(about, root)
    if manifest is None:
        begun = time.time_ns()
        files, times = _listed(root, suffixes)
        manifest = _made(root, files)
        if len(manifest) >= WORTH and max(times.values()) < begun - SETTLED:
            keep(about, {"folders": manifest.folders, "times": times}, [manifest.parents, manifest.letters, manifest.ends])
    if not len(manifest):
        raise Refusal(f"the folder {folder} holds no file that ends in {' or '.join(suffixes)}")
    return manifest


def manifest_of_paths(paths: Iterable[str]) -> Manifest:
    """Files that are named one by one."""
    files: dict[str, list[str]] = {}
    for path in paths:
        folder, name = path.rsplit("/", 1) if "/" in path else ("", path)
        files.setdefault(folder, []).append(name)
    return _made("", files)


def _listed(root: str, suffixes: tuple[str, ...]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """({folder: names of its files}, {folder: its time})."""
    files, times = {}, {}
    for folder, time_ns, names in walked(root):
        files[folder], times[folder] = [name for name in names if name.lower().endswith(suffixes)], time_ns
    return files, times


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


def _recalled(about: list, root: str) -> Manifest | None:
    """The list that was kept, if it still holds."""
    kept = recalled(about)
    with suppress(OSError):
        if kept is not None and all(os.stat(os.path.join(root, folder)).st_mtime_ns == time for folder, time in kept[0]["times"].items()):
            return Manifest(root, kept[0]["folders"], *kept[1])
    return None
