"""Detects the storage format of the files at a path by their names, and opens the pipeline that reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hasten.core.errors import ConfigurationError
from hasten.data.formats.arrays import arrays
from hasten.data.formats.images import SUFFIXES as PICTURES
from hasten.data.formats.images import images
from hasten.data.formats.table_files import Csv, Feather, Parquet
from hasten.data.formats.tables import csv, feather, parquet
from hasten.data.formats.tfrecord import SUFFIXES as RECORDS
from hasten.data.formats.tfrecord import tfrecord
from hasten.data.formats.token_files import tokens
from hasten.data.formats.webdataset import webdataset
from hasten.data.io.paths import FileMissingError, resolve_paths
from hasten.data.pipeline import Pipeline
from hasten.data.source import Source

MANIFEST, SKIPPED = "conversion.json", "skipped.jsonl"  # files that `hasten data convert` writes beside the data
WINDOW = 1024  # default number of tokens of a sample


@dataclass(frozen=True)
class StorageFormat:
    """A storage format of samples.

    Attributes:
        name: of the function that reads it; "rows" are ``.npy`` files, which ``arrays`` reads.
        title: for people.
        suffixes: of the files' names.
        is_table: it has named columns, and is read in runs of rows (row groups, record batches).
        walked: it has no index, so opening a file reads much of it; a few files are measured in place of all.
        decodes: rows must be decoded before they are in a batch.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    is_table: bool = False
    walked: bool = False
    decodes: bool = True


KINDS = {
    kind.name: kind
    for kind in (
        StorageFormat("parquet", "Parquet", Parquet.suffixes, is_table=True),
        StorageFormat("feather", "Feather", Feather.suffixes, is_table=True),
        StorageFormat("tfrecord", "TFRecord", RECORDS, walked=True),
        StorageFormat("shards", "tar shards", (".tar",), walked=True),
        StorageFormat("images", "pictures", PICTURES),
        StorageFormat("rows", "rows (.npy)", (".npy",), decodes=False),
        StorageFormat("tokens", "tokens", (".bin",), decodes=False),
        StorageFormat("csv", "CSV", Csv.suffixes, is_table=True, walked=True),
    )
}


def detect_format(path: str | Path) -> tuple[StorageFormat, list[str]]:
    """(format, files) of a path, a folder or a pattern; of several formats the one with the most files.

    Raises:
        Refusal: there is no file, or none whose name has a known suffix.
    """
    return kinds_at(path)[0]


def kinds_at(path: str | Path) -> list[tuple[StorageFormat | None, list[str]]]:
    """(format, files) of every format at a path, the one with the most files first; last, under None, unknown files."""
    files: dict[str, list[str]] = {}
    for file in resolve_paths(path):
        name = next((kind.name for kind in KINDS.values() if file.lower().endswith(kind.suffixes)), "")
        files.setdefault(name, []).append(file)
    unknown = files.pop("", [])
    others = [file for file in unknown if os.path.basename(file) not in (MANIFEST, SKIPPED)]
    if not files and any(os.path.basename(file) == MANIFEST for file in unknown):
        raise ConfigurationError(f"the conversion into {path} did not come to its end; start it again, and it goes on")
    if not files:
        known = ", ".join(suffix for kind in KINDS.values() for suffix in kind.suffixes)
        raise ConfigurationError(f"no file name of {path} tells what it holds; known are names that end in {known}")
    names = sorted((name for name in KINDS if name in files), key=lambda name: -len(files[name]))
    return [(KINDS[name], files[name]) for name in names] + ([(None, others)] if others else [])


def openable(kind: StorageFormat, files: list[str], at_most: int) -> tuple[list[str], list[dict]]:
    """(files that can be opened, ``{"row": None, "where", "why"}`` of each other); at most ``at_most`` may be skipped.

    Images are rows, which are skipped when they are read, and ``.npy`` files are columns, of which none may be missing.

    Raises:
        Refusal: more cannot be opened, or none can.
    """
    if not at_most or not (kind.is_table or kind.walked) or _trouble(kind, files) is None:
        return files, []
    troubles = {file: _trouble(kind, [file]) for file in files}
    lost = [{"row": None, "where": file, "why": why} for file, why in troubles.items() if why is not None]
    if len(lost) > at_most:
        raise ConfigurationError(
            f"{lost[at_most]['why']}; it is bad file number {at_most + 1}, and {at_most} may be left out"
        )
    if len(lost) == len(files):
        raise ConfigurationError(f"{lost[0]['why']}; there is no file that can be opened")
    return [file for file, why in troubles.items() if why is None], lost


def counted(kinds: list[tuple[StorageFormat | None, list[str]]]) -> dict[str, int]:
    """{title: number of files} of each format."""
    return {kind.title if kind else "unknown": len(files) for kind, files in kinds}


def classes_of(source: Source, files: list[str]) -> list[str] | None:
    """Class names in the order of their numbers: the source's, or those that a conversion stored beside its files."""
    noted = _about(os.path.dirname(files[0])).get("classes")
    return getattr(source, "classes", None) or ([str(word) for word in noted] if isinstance(noted, list) else None)


def opened(
    kind: StorageFormat, where: str | Path | list[str], *, target: str | None = None, fill=None, resize=None
) -> Pipeline:
    """The pipeline that reads files of a format. Of a table, only the run that was read last is kept in memory.

    Args:
        kind: the format.
        where: a folder, a file, a pattern or a list of files.
        target: of a table, as in ``parquet``.
        fill: of a table, as in ``parquet``.
        resize: of images, as in ``images``.

    Raises:
        Refusal: the files cannot be opened, or ``target`` is given for a format without columns.
    """
    if target is not None and not kind.is_table:
        raise ConfigurationError(f"a target is a column of a table; {kind.title} have none")
    if kind.name in ("parquet", "feather"):
        return {"parquet": parquet, "feather": feather}[kind.name](where, target=target, fill=fill, gigabytes=0)
    if kind.name == "csv":
        return csv(where, target=target, fill=fill)
    if kind.name == "images":
        return _pictures(where, resize)
    if kind.name == "rows":
        return _rows(where)
    if kind.name == "tokens":
        return tokens(where, WINDOW)
    return webdataset(where, resize=resize) if kind.name == "shards" else tfrecord(where)


def named(columns, kind: StorageFormat, target: str | None = None) -> dict:
    """Flattens nested columns to one name each: ``{"address.street": ...}``."""
    if isinstance(columns, Mapping):
        return {
            name if not more else f"{name}.{more}": column
            for name, inner in columns.items()
            for more, column in (named(inner, kind).items() if isinstance(inner, Mapping) else [("", inner)])
        }
    if isinstance(columns, tuple) and isinstance(columns[0], Mapping):  # the inputs of a table, and its target
        return named(columns[0], kind) | {target or "targets": columns[1]}
    parts = columns if isinstance(columns, tuple) else (columns,)
    names = ["pictures", "labels"] if kind.name == "images" else ["inputs", target or "targets"]
    names += [f"column{number}" for number in range(2, len(parts))]
    return dict(zip(names, parts, strict=False))


def _pictures(where, resize) -> Pipeline:
    """Images with their folders as labels, if every image is in one."""
    try:
        return images(where, resize)
    except ConfigurationError as error:
        if "lies in no folder" not in str(error):
            raise
        return images(where, resize, labels=None)


def _trouble(kind: StorageFormat, files: list[str]) -> str | None:
    """Why these files cannot be opened together, or one of them cannot be opened at all; None if they can."""
    try:
        lost = getattr(opened(kind, files).source, "lost", {})
    except ConfigurationError as refused:
        wrong_request = (
            kind.is_table and not isinstance(refused, FileMissingError) and os.path.exists(files[0])
        )  # which reading it reports
        return None if wrong_request and len(files) == 1 else str(refused)
    return next(iter(lost.values()), None)


def _rows(where) -> Pipeline:
    """The columns as ``convert`` noted them, or a dict by file name."""
    files = resolve_paths(where, KINDS["rows"].suffixes)
    about, by_name = _about(os.path.dirname(files[0])), {os.path.basename(file): file for file in files}
    with suppress(LookupError, TypeError, AttributeError):
        columns = {name: by_name[file] for name, file in about["columns"].items()}
        if len(columns) == len(files):
            return arrays(*columns.values()) if about["is_tuple"] else arrays(columns)
    return arrays(files[0]) if len(files) == 1 else arrays({Path(file).stem: file for file in files})


def _about(folder: str) -> dict:
    """The manifest of the conversion that wrote a folder; empty if there is none."""
    try:
        about = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
