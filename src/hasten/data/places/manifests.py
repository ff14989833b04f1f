"""What files a folder holds, remembered: opening a million pictures is instant the second time.

A folder is walked through once; the names are kept, as plain arrays, in the user's cache folder. A kept list holds as long
as the time of every folder in it: adding, removing or renaming a file changes its folder's. Overwriting one does not, nor
does it change the list.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy

from hasten.contract.errors import Refusal
from hasten.data.caching.cache_disk import default_folder
from hasten.data.places.walks import walked

FORM = 1  # of the kept file; a change of the code below is a change of this number
WORTH = 1000  # files; a smaller folder is walked through in no time
SETTLED = 2_000_000_000  # nanoseconds; a folder that changed just now may change again without a new time


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
    key = json.dumps([FORM, root, suffixes])
    kept = default_folder() / "manifests" / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.manifest"
    manifest = _loaded(kept, root)
    if manifest is None:
        begun = time.time_ns()
        files, times = _listed(root, suffixes)
        manifest = _made(root, files)
        if len(manifest) >= WORTH and max(times.values()) < begun - SETTLED:
            _keep(kept, manifest, times)
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


# ---- keeping


def _keep(kept: Path, manifest: Manifest, times: dict[str, int]) -> None:
    """Writes beside and renames, so that nobody reads half a list. Where that is not possible, the next start walks again."""
    about = json.dumps({"folders": manifest.folders, "times": times}).encode()
    beside = kept.with_suffix(f".{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            for array in (numpy.frombuffer(about, numpy.uint8), manifest.parents, manifest.letters, manifest.ends):
                numpy.save(file, array, allow_pickle=False)
        os.replace(beside, kept)
    except OSError:
        beside.unlink(missing_ok=True)


def _loaded(kept: Path, root: str) -> Manifest | None:
    """The list that was kept, if it still holds."""
    try:
        with open(kept, "rb") as file:
            about, parents, letters, ends = (numpy.load(file, allow_pickle=False) for _ in range(4))
        about = json.loads(about.tobytes())
        if any(os.stat(os.path.join(root, folder)).st_mtime_ns != time for folder, time in about["times"].items()):
            return None
        return Manifest(root, about["folders"], parents, letters, ends)
    except (OSError, ValueError, EOFError, KeyError):
        return None
