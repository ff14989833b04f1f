"""Images: directories and lists of JPEG and PNG files, with a class for each directory."""

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, cast

import numpy
import torch

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.data.formats.decoding import PIXELS, decode_images, decoder_fingerprint, size_of
from hasten.data.io.file_list import FileList, file_list_of, list_directory
from hasten.data.io.paths import file_signature, is_file_error, is_remote, open_file, plain, resolve_paths
from hasten.data.io.remote import MAX_REQUESTS, address_of, fetch_ranges
from hasten.data.pipeline import Pipeline
from hasten.data.source import Source

SUFFIXES = (".jpg", ".jpeg", ".png")


class NoClassDirectoryError(ConfigurationError):
    """No image is in a directory that could be its class."""


def images(
    paths: str | Path | Iterable[str | Path],
    resize: int | tuple[int, int] | None = None,
    labels: str | Mapping[str, float] | None = "directory",
    pixels: int = PIXELS,
) -> Pipeline:
    """Images from JPEG and PNG files: uint8, RGB, shape (3, height, width).

    With labels a batch is the tuple (images, labels).

    Args:
        paths: A directory, whose list of files is cached, or files and patterns, local or remote.
        resize: Side of a square, or (height, width), in pixels: the shorter side is scaled to fit and the center
            cropped. A batch of images is then one tensor (rows, 3, height, width). Without it a batch is a list of
            tensors, even if all images have one size, because that is known only after reading them.
        labels: "directory": the index (int64) of the file's class among the sorted class names. The class is the
            directory directly under ``paths``, or the parent directory of a file from a pattern. A dict maps file
            names, or paths relative to the directory, to numbers. None: no labels.
        pixels: An image with more pixels, also during resizing, is a bad row, because a small file can decode to
            more than the memory.

    Raises:
        ConfigurationError: No image, an image without a label, or ``resize`` has more than ``pixels`` pixels.
    """
    return Pipeline(Images(paths, resize, labels, pixels))


class Images(Source):
    """A data source over image files; ``classes`` are the names of directories by class index, or else empty."""

    def __init__(self, paths: Any, resize: Any = None, labels: Any = "directory", pixels: int = PIXELS) -> None:
        self.size, self.pixels = size_of(resize, pixels), pixels
        directory = plain(cast(Any, paths)) if isinstance(paths, (str, os.PathLike)) else ""
        is_directory = os.path.isdir(directory)
        if is_directory:
            self.files = list_directory(directory, SUFFIXES)
        else:
            files = resolve_paths(cast(Any, paths), SUFFIXES)
            self.files = file_list_of(files, address_of(directory) if is_remote(directory) else "")
        self.classes: list[str] = []
        self.labels: torch.Tensor | None = None
        if isinstance(labels, str) and labels == "directory":
            self.classes, self.labels = _label_by_directory(self.files)
        elif labels is not None:
            self.labels = _label_by_name(self.files, labels)
        # version of each local file when it was first read, 0 before; worker processes share this memory
        self._versions = numpy.frombuffer(mmap.mmap(-1, 8 * len(self.files)), numpy.int64)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: numpy.ndarray) -> Any:
        paths = [self.files.path(row) for row in rows.tolist()]
        batch = decode_images(rows.tolist(), paths, self.raw(rows.tolist(), paths), self.size, self.pixels)
        return batch if self.labels is None else (batch, self.labels[torch.from_numpy(rows)])

    def fingerprint(self) -> dict:
        digest = hashlib.blake2b(digest_size=16)
        paths = map(self.files.path, range(len(self.files)))
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:  # a remote signature takes a round trip
            signatures = (pool.map if is_remote(self.files.path(0)) else map)(_signature, paths)
            for row, signature in enumerate(signatures):
                digest.update(repr(signature).encode())
                times = signature[-1] if isinstance(signature[-1], list) else None  # of a local file that exists
                # read checks against this version
                self._versions[row] = _version(signature[1], times[0]) if times else 0
        labels = None if self.labels is None else hashlib.blake2b(self.labels.numpy().data, digest_size=16).hexdigest()
        return {"images": digest.hexdigest(), "labels": labels, **decoder_fingerprint(self.size, self.pixels)}

    def raw(self, rows: list[int], paths: list[str]) -> Iterator[bytes]:
        """Yields the undecoded bytes of the files ``paths`` of ``rows`` in order; ``RunError`` if one has changed."""
        fetched = fetch_ranges([(path, None, None) for path in paths]) if is_remote(paths[0]) else [None] * len(paths)
        for row, path, content in zip(rows, paths, fetched, strict=True):
            yield self._read_file(row, path) if content is None else content

    def _read_file(self, row: int, path: str) -> bytes:
        """Reads a file; RunError if a local one has changed since it was first read or since ``fingerprint``."""
        with _blame_file(path), open_file(path) as file:
            if not is_remote(path):
                status = os.fstat(file.fileno())
                version = _version(status.st_size, status.st_mtime_ns)
                if self._versions[row] not in (0, version):
                    raise RunError(f"{path} changed since it was first read; start again when nothing writes to it")
                self._versions[row] = version
            return file.read()


def content_of(path: str) -> bytes:
    """Returns the bytes of an image file. ConfigurationError if only this file cannot be read, RunError if the cause,
    such as an expired login, concerns others, too.
    """
    with _blame_file(path), open_file(path) as file:
        return file.read()


# ---- files and labels


def _signature(path: str) -> list:
    """Returns [path, size, version] of a file; [path] for one that cannot be read, which will be a bad row."""
    try:
        with _blame_file(path):
            return file_signature(path)
    except ConfigurationError:
        return [path]


def _version(size: int, modified_ns: int) -> int:
    """Returns size and modification time of a local file as one nonzero integer."""
    return hash((size, modified_ns)) | 1


@contextmanager
def _blame_file(path: str) -> Iterator[None]:
    """Context manager: makes a ConfigurationError a RunError if the cause is not this file but, say, the login."""
    try:
        yield
    except ConfigurationError as error:
        if not is_file_error(path, error):
            raise RunError(str(error)) from None
        raise


def _label_by_directory(files: FileList) -> tuple[list[str], torch.Tensor]:
    """Returns (sorted class names, index of each file's class, int64). The class is the first directory below the root,
    or, without a root, the file's own directory; ConfigurationError if a file has none, NoClassDirectoryError if all.
    """
    part = 0 if files.root else -1
    names = [directory.split("/")[part] for directory in files.directories]
    if "" in names:
        example = files.relative_path(int((files.parents == names.index("")).argmax()))
        advice = "pass labels=None, or labels={file name: number}"
        kind = ConfigurationError if any(names) else NoClassDirectoryError  # one stray file must not cost all labels
        raise kind(f"{example} is in no directory that could be its class; move it into one, or {advice}")
    classes = sorted(set(names))
    index_of = {name: index for index, name in enumerate(classes)}
    indices = numpy.array([index_of[name] for name in names])
    return classes, torch.from_numpy(indices[files.parents])


def _label_by_name(files: FileList, labels: Any) -> torch.Tensor:
    if not isinstance(labels, Mapping):
        expected = '"directory", a dict from file name to number, or None'
        raise ConfigurationError(f"labels= must be {expected}, not {' '.join(repr(labels).split()):.80}")
    values = []
    for row in range(len(files)):
        label = labels.get(files.relative_path(row), labels.get(files.name(row)))
        if label is None:
            raise ConfigurationError(f"{files.relative_path(row)} has no label; add it to labels=")
        if not isinstance(label, Real):
            raise ConfigurationError(f"the label of {files.relative_path(row)} is not a number: {label!r}")
        values.append(label)
    try:
        return torch.tensor(values)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"a tensor cannot hold the labels: {format_error(error)}") from None
