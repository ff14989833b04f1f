"""Pictures: folders and lists of JPEG and PNG files, with a class for each folder."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path

import numpy
import torch

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.data.formats.decoding import PIXELS, manner, pictures_of, size_of
from hasten.data.io.manifests import Manifest, manifest_of, manifest_of_paths
from hasten.data.io.paths import file_signature, is_lost, is_remote, open_file, resolve_paths
from hasten.data.io.remote import fetch_ranges
from hasten.data.pipeline import Pipeline
from hasten.data.source import Source

SUFFIXES = (".jpg", ".jpeg", ".png")


def images(
    paths: str | Path | Iterable[str | Path],
    resize: int | tuple[int, int] | None = None,
    labels: str | Mapping[str, float] | None = "folder",
    pixels: int = PIXELS,
) -> Pipeline:
    """Pictures from JPEG and PNG files, uint8, shape (3, height, width), red, green, blue.

    Args:
        paths: a folder, whose list of files is kept for the next time, or files and patterns, local or remote.
        resize: the side of a square, or (height, width), in pixels: the shorter side is made to fit, and the middle cut out. A
            batch of pictures is then one tensor (rows, 3, height, width), and otherwise a list of tensors, also where all are
            alike, which can be seen of a batch only when it has been read.
        labels: "folder" for the number (int64) of the sorted name of the folder right under ``paths``, or around a
            file of a pattern; a dict from file name (or path inside the folder) to a number; None for no label. With labels a
            batch is the tuple (pictures, labels).
        pixels: a picture of more pixels, also while it is resized, is a bad row: a small file can ask for all memory.

    Raises:
        Refusal: no picture, a picture without a label, a size of more pixels than are allowed.
    """
    return Pipeline(Images(paths, resize, labels, pixels))


class Images(Source):
    """Picture files.

    Attributes:
        classes: the names of the classes, in the order of their numbers; empty where labels are not folders.
    """

    def __init__(self, paths, resize=None, labels="folder", pixels: int = PIXELS):
        self.size, self.pixels = size_of(resize, pixels), pixels
        self.files = _files(paths)
        self.classes: list[str] = []
        if labels == "folder":
            self.classes, self.labels = _by_folder(self.files)
        else:
            self.labels = None if labels is None else _by_name(self.files, labels)
        self._marks = numpy.frombuffer(
            mmap.mmap(-1, 8 * len(self.files)), numpy.int64
        )  # 0: not known yet; processes share them

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: numpy.ndarray):
        paths = [self.files.path(row) for row in rows.tolist()]
        pictures = pictures_of(rows.tolist(), paths, self.raw(rows.tolist(), paths), self.size, self.pixels)
        return pictures if self.labels is None else (pictures, self.labels[torch.from_numpy(rows)])

    def fingerprint(self) -> dict:
        digest = hashlib.blake2b(digest_size=16)
        for number in range(len(self.files)):
            mark = _mark_of(self.files.path(number))
            digest.update(repr(mark).encode())
            about = mark[-1] if isinstance(mark[-1], list) else None  # of a local picture that is there
            self._marks[number] = (
                _number_of(mark[1], about[0]) if about else 0
            )  # what is told now is what is read from now on
        labels = None if self.labels is None else hashlib.blake2b(self.labels.numpy(), digest_size=16).hexdigest()
        return {"images": digest.hexdigest(), "labels": labels, **manner(self.size, self.pixels)}

    def raw(self, rows: list[int], paths: list[str]) -> Iterator[bytes]:
        """The bytes of some pictures; remote ones are asked for at once."""
        came = fetch_ranges([(path, None, None) for path in paths]) if is_remote(paths[0]) else [None] * len(paths)
        for row, path, content in zip(rows, paths, came, strict=True):
            yield self._content(row, path) if content is None else content

    def _content(self, row: int, path: str) -> bytes:
        """The bytes of a picture; those of a local one are the ones that were read before, or told of by ``identity``."""
        with _blaming(path), open_file(path) as file:
            if not is_remote(path):
                about = os.fstat(file.fileno())
                mark = _number_of(about.st_size, about.st_mtime_ns)
                if self._marks[row] not in (0, mark):
                    raise RunError(f"{path} changed since it was first read; start again when nobody writes to it")
                self._marks[row] = mark
            return file.read()


# ---- files and labels


def _files(paths) -> Manifest:
    if isinstance(paths, (str, os.PathLike)) and os.path.isdir(os.path.expanduser(paths)):
        return manifest_of(os.path.expanduser(paths), SUFFIXES)
    return manifest_of_paths(resolve_paths(paths, SUFFIXES))


def content_of(path: str) -> bytes:
    """The bytes of a picture's file.

    Raises:
        Refusal: they cannot be had. Failure: of none of these files.
    """
    with _blaming(path), open_file(path) as file:
        return file.read()


def _mark_of(path: str) -> list:
    """What changes when a picture does. One that cannot be had is a bad row; when it comes, that is a change."""
    try:
        with _blaming(path):
            return file_signature(path)
    except ConfigurationError:
        return [path]


def _number_of(size: int, changed: int) -> int:
    """What of a local file's stamp tells of its content, as one number that is not 0."""
    return hash((size, changed)) | 1


@contextmanager
def _blaming(path: str) -> Iterator[None]:
    """A Refusal inside blames this picture, if it is to blame; a login that has run out is no fault of it, nor is what the machine lacks."""
    try:
        yield
    except ConfigurationError as refused:
        if not is_lost(path, refused):
            raise RunError(str(refused)) from None
        raise


def _by_folder(files: Manifest) -> tuple[list[str], torch.Tensor]:
    """(names of the classes, class of each file)."""
    part = 0 if files.root else -1
    names = [folder.split("/")[part] for folder in files.folders]
    if "" in names:
        example = files.inside(int((files.parents == names.index("")).argmax()))
        raise ConfigurationError(
            f"{example} lies in no folder that would be its class; say labels=None, or labels={{file name: number}}"
        )
    classes = sorted(set(names))
    number = {name: place for place, name in enumerate(classes)}
    numbers = numpy.array([number[name] for name in names])
    return classes, torch.from_numpy(numbers[files.parents])


def _by_name(files: Manifest, labels: Mapping[str, float]) -> torch.Tensor:
    if not isinstance(labels, Mapping):
        raise ConfigurationError(f'labels is "folder", a dict from file name to number, or None; not {labels!r}')
    numbers = []
    for number in range(len(files)):
        label = labels.get(files.inside(number), labels.get(files.name(number)))
        if not isinstance(label, Real):
            raise ConfigurationError(
                f"{files.inside(number)} has no label"
                if label is None
                else f"the label of {files.inside(number)} is no number: {label!r}"
            )
        numbers.append(label)
    try:
        return torch.tensor(numbers)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"the labels are not what a tensor can hold: {format_error(error)}") from None
