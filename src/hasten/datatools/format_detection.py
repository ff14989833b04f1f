"""Detects the storage format of the files at a path by their names, and opens the pipeline that reads them."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.data.formats.arrays import arrays
from hasten.data.formats.images import SUFFIXES as IMAGE_SUFFIXES
from hasten.data.formats.images import NoClassDirectoryError, images
from hasten.data.formats.table_files import Csv, Feather, Parquet
from hasten.data.formats.tables import csv, feather, parquet
from hasten.data.formats.tfrecord import SUFFIXES as TFRECORD_SUFFIXES
from hasten.data.formats.tfrecord import tfrecord
from hasten.data.formats.token_files import tokens
from hasten.data.formats.webdataset import Shards
from hasten.data.io.conversion_manifest import MANIFEST, load_manifest, stored_classes
from hasten.data.io.paths import is_file_error, is_remote, resolve_paths
from hasten.data.io.remote import has_suffix
from hasten.data.pipeline import Pipeline
from hasten.data.source import Source

SKIPPED = "skipped.jsonl"  # a file that `hasten data convert` writes beside the data, as MANIFEST
WINDOW = 1024  # default number of tokens of a sample


@dataclass(frozen=True)
class StorageFormat:
    """A storage format of samples: its file names, and how its files are read."""

    name: str  # identifier; "rows" are ``.npy`` files, which ``arrays`` reads, "webdataset" are read by ``webdataset``
    title: str  # name in messages
    suffixes: tuple[str, ...]  # endings of the file names
    is_table: bool = False  # whether it has named columns and is read in runs of rows (row groups, record batches)
    # whether a file states where its rows are; otherwise opening it reads much of it, and a few files are measured
    # instead of all
    has_index: bool = True
    decodes: bool = True  # whether rows must be decoded before they are in a batch


FORMATS = {
    kind.name: kind
    for kind in (
        StorageFormat("parquet", "Parquet", Parquet.suffixes, is_table=True),
        StorageFormat("feather", "Feather", Feather.suffixes, is_table=True),
        StorageFormat("tfrecord", "TFRecord", TFRECORD_SUFFIXES, has_index=False),
        StorageFormat("webdataset", "tar shards", (".tar",), has_index=False),
        StorageFormat("images", "images", IMAGE_SUFFIXES),
        StorageFormat("rows", "rows (.npy)", (".npy",), decodes=False),
        StorageFormat("tokens", "tokens", (".bin",), decodes=False),
        StorageFormat("csv", "CSV", Csv.suffixes, is_table=True, has_index=False),
    )
}


UNKNOWN = StorageFormat("unknown", "unknown", ())


def formats_at(path: str | Path) -> list[tuple[StorageFormat, list[str]]]:
    """Returns (format, files) of every format at a path, the one with the most files first; ``UNKNOWN`` is last.
    ConfigurationError if there is no file, or none whose name has a known suffix.
    """
    files: dict[str, list[str]] = {}
    for file in resolve_paths(path):
        name = next((kind.name for kind in FORMATS.values() if has_suffix(file, kind.suffixes)), "")
        files.setdefault(name, []).append(file)
    unknown = files.pop("", [])
    others = [file for file in unknown if os.path.basename(file) not in (MANIFEST, SKIPPED)]
    if not files and any(os.path.basename(file) == MANIFEST for file in unknown):
        raise ConfigurationError(f"the conversion into {path} is incomplete; start it again to resume it")
    if not files:
        known = ", ".join(suffix for kind in FORMATS.values() for suffix in kind.suffixes)
        raise ConfigurationError(f"no file name of {path} has a known suffix; known are {known}")
    names = sorted((name for name in FORMATS if name in files), key=lambda name: -len(files[name]))
    return [(FORMATS[name], files[name]) for name in names] + ([(UNKNOWN, others)] if others else [])


def select_openable(kind: StorageFormat, files: list[str], max_bad: int) -> tuple[list[str], list[dict]]:
    """Returns (files that can be opened, ``{"row": None, "where", "why"}`` of each other file).

    Images are rows, which are skipped when they are read, and ``.npy`` files are columns, of which none may be missing.
    ConfigurationError if more than ``max_bad`` files cannot be opened, or none can.
    """
    if not max_bad or (kind.has_index and not kind.is_table) or _open_error(kind, files) is None:
        return files, []
    errors = {file: _open_error(kind, [file]) for file in files}
    bad = [{"row": None, "where": file, "why": error} for file, error in errors.items() if error is not None]
    if len(bad) > max_bad:
        limit = f"this is bad file {max_bad + 1}, and at most {max_bad} may be skipped"
        raise ConfigurationError(f"{bad[max_bad]['why']}; {limit}")
    if len(bad) == len(files):
        raise ConfigurationError(f"{bad[0]['why']}; no file can be opened")
    return [file for file, error in errors.items() if error is None], bad


def count_by_title(formats: list[tuple[StorageFormat, list[str]]]) -> dict[str, int]:
    """Returns {title of the format: number of files} of what ``formats_at`` returned."""
    return {kind.title: len(files) for kind, files in formats}


def class_names(source: Source, files: list[str]) -> list[str] | None:
    """Returns class names in the order of their indices, from the source or else from ``conversion.json`` beside its
    files; None if there are none.
    """
    return getattr(source, "classes", None) or stored_classes(files)


def open_pipeline(
    kind: StorageFormat,
    where: str | Path | list[str],
    *,
    target: str | None = None,
    fill: Any = None,
    resize: int | tuple[int, int] | None = None,
    every_member: bool = False,
) -> Pipeline:
    """Opens the pipeline that reads files of a format. Of Parquet and Feather, only the chunk (row group, record batch)
    that was read last stays in memory.

    ``where`` is a directory, a file, a pattern or a list of files; ``target`` and ``fill`` are those of ``parquet``,
    for a table; ``resize`` is that of ``images``; ``every_member`` reads all members of tar shards, not only those that
    the first sample has. ConfigurationError if the files cannot be opened, or have no columns for a target.
    """
    if target is not None and not kind.is_table:
        raise ConfigurationError(f"a target is a column of a table; {kind.title} have no columns")
    openers: dict[str, Callable[[], Pipeline]] = {
        "parquet": lambda: parquet(where, target=target, fill=fill, gigabytes=0),
        "feather": lambda: feather(where, target=target, fill=fill, gigabytes=0),
        "csv": lambda: csv(where, target=target, fill=fill),
        "tfrecord": lambda: tfrecord(where),
        "webdataset": lambda: Pipeline(Shards(where, resize=resize, every_member=every_member)),
        "images": lambda: _open_images(where, resize),
        "rows": lambda: _open_arrays(where),
        "tokens": lambda: tokens(where, WINDOW),
    }
    return openers[kind.name]()


def flatten_columns(columns: Any, kind: StorageFormat, target: str | None = None) -> dict[str, Any]:
    """Returns nested columns as one dict: those of a dict as ``{"address.street": ...}``, those of a tuple as "images"
    and "labels", or as "inputs" and the target (None: "targets").
    """
    if isinstance(columns, Mapping):
        flat = {}
        for name, column in columns.items():
            if isinstance(column, Mapping):
                flat |= {f"{name}.{inner}": leaf for inner, leaf in flatten_columns(column, kind).items()}
            else:
                flat[name] = column
        return flat
    if isinstance(columns, tuple) and isinstance(columns[0], Mapping):  # the inputs of a table, and its target
        return flatten_columns(columns[0], kind) | {target or "targets": columns[1]}
    parts = columns if isinstance(columns, tuple) else (columns,)
    names = ["images", "labels"] if kind.name == "images" else ["inputs", target or "targets"]
    names += [f"column{index}" for index in range(2, len(parts))]
    return dict(zip(names, parts, strict=False))


def _open_images(where: Any, resize: Any) -> Pipeline:
    """Opens images, with the names of their directories as labels if every image is in a directory."""
    try:
        return images(where, resize)
    except NoClassDirectoryError:
        return images(where, resize, labels=None)


def _open_error(kind: StorageFormat, files: list[str]) -> str | None:
    """Why these files cannot be opened together, or one of them cannot be opened at all; None if they can."""
    try:
        lost = getattr(open_pipeline(kind, files).source, "lost", {})
    except ConfigurationError as error:
        # A wrong request for a readable table is not the fault of its file, and is reported when the table is read.
        is_lost = is_file_error(files[0], error) or not (is_remote(files[0]) or os.path.exists(files[0]))
        return str(error) if is_lost or not kind.is_table or len(files) > 1 else None
    return next(iter(lost.values()), None)


def _open_arrays(where: Any) -> Pipeline:
    """Opens ``.npy`` files as a pipeline: (inputs, target) as ``convert`` stored them, else a dict by file name.
    ConfigurationError if two files have the same name.
    """
    files = resolve_paths(where, FORMATS["rows"].suffixes)
    by_stem: dict[str, str] = {}
    for file in files:
        if (other := by_stem.setdefault(Path(file).stem, file)) != file:
            problem = f"{other} and {file} would both be the column {Path(file).stem!r}"
            raise ConfigurationError(f"{problem}; pass one directory at a time, or rename one of them")
    manifest, by_name = load_manifest(os.path.dirname(files[0])), {os.path.basename(file): file for file in files}
    with suppress(LookupError, TypeError, AttributeError):
        columns = {name: by_name[file] for name, file in manifest["columns"].items()}
        if len(columns) == len(files):
            return arrays(*columns.values()) if manifest["is_tuple"] else arrays(columns)
    return arrays(files[0]) if len(files) == 1 else arrays(dict(by_stem))
