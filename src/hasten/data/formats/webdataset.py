"""Tar shards in WebDataset's layout: files whose names agree up to the first dot are one sample, ``0017.jpg`` and ``0017.cls``.

A shard's headers are walked through once, and nothing is ever unpacked to disk; after that every sample is read by its
position, in any order. Layout: https://github.com/webdataset/webdataset; headers: POSIX pax and ustar, GNU long names
(https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, format_error, suggest
from hasten.data.buffer_pool import acquire
from hasten.data.formats import argument_checks
from hasten.data.formats.decoding import PIXELS, manner, pictures_of, size_of
from hasten.data.formats.tar_headers import Damaged, members
from hasten.data.io.index_cache import Tell, load_or_build_index, once
from hasten.data.io.metadata_cache import Found
from hasten.data.io.paths import FileMissingError, is_lost, resolve_paths
from hasten.data.io.range_reader import read_ranges, whole
from hasten.data.pipeline import Pipeline
from hasten.data.source import BadRow, Source, refuse_bad

SAMPLED = 32  # samples that are looked at to learn what shape arrays have
TOLD = 1 << 10  # members, after which the walk tells how far it is
PICTURES = ("jpg", "jpeg", "png")
BROKEN = (ValueError, OverflowError, RecursionError, MemoryError)  # what decoders raise


def webdataset(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    target: str | None = None,
    resize: int | tuple[int, int] | None = None,
    pixels: int = PIXELS,
) -> Pipeline:
    """Samples from tar files, a column for each ending: a batch is a dict of them.

    What a column holds follows from the last part of its ending: ``jpg``, ``jpeg``, ``png`` pictures (uint8, shape (3, height,
    width)); ``cls`` whole numbers (int64); ``npy`` arrays, one tensor where all have the same shape; ``json`` what it says;
    ``txt`` text; anything else bytes. What is no tensor is a list.

    A sample that lacks the picture's ending and has a picture of another one gives that, unless some sample has both.
    A shard that is damaged, cut off, or cannot be read is one bad row after the samples that are whole in it.

    Args:
        paths: files, folders or patterns, local or remote; not compressed. A remote file is read once to find its samples; where they are
            is kept.
        columns: the endings that are wanted; None for all of the first sample.
        target: the ending to predict; a batch is then the tuple (other columns in their order, target).
        resize: as in ``images``.
        pixels: as in ``images``.

    Raises:
        Refusal: no file with a whole sample; a member whose path leads out of the folder; an ending that is not there.
    """
    return Pipeline(Shards(paths, columns, target, resize, pixels))


class Shards(Source):
    """Samples in tar files.

    Attributes:
        keys: what the names of each sample's files begin with.
        bad: {row: (file, why)} of what is damaged: each stands for the rest of its file.
        lost: the same, {file: why}.
    """

    def __init__(self, paths, columns=None, target=None, resize=None, pixels: int = PIXELS):
        self.size, self.pixels = size_of(resize, pixels), pixels
        columns = None if columns is None else argument_checks.names("columns=", columns)
        target = None if target is None else _ending(argument_checks.name("target=", target))
        files = resolve_paths(paths, (".tar",))
        walks = load_or_build_index(files, ["samples"], _walked)
        self.stamps = [mark for mark, _, _ in walks]
        keys = [words["keys"] if why is None else [*words["keys"], ""] for _, (words, _), why in walks]
        self.keys = [*chain.from_iterable(keys)]
        self._edges = numpy.cumsum([0, *map(len, keys)])
        ends = self._edges[1:].tolist()
        self.bad = {
            end - 1: (file, why) for file, end, (_, _, why) in zip(files, ends, walks, strict=True) if why is not None
        }
        self.lost = dict(self.bad.values())
        samples = [some for _, some, _ in walks]
        if not any(words["keys"] for words, _ in samples):
            raise (
                FileMissingError(next(iter(self.lost.values())))
                if self.lost
                else ConfigurationError(f"there is no sample in {', '.join(files[:3])}")
            )
        self.columns, self.target = _wanted(samples, columns, target), target
        self.places = self._placed(samples)
        self.shapes = {name: self._shape(name) for name in self.columns if _kind(name) == "npy"}

    def __len__(self) -> int:
        return len(self.keys)

    def chunk_offsets(self) -> numpy.ndarray:
        return self._edges

    def known_bad_rows(self) -> list[BadRow]:
        return [BadRow(row, *bad) for row, bad in self.bad.items()]

    def fingerprint(self) -> dict:
        return {"shards": self.stamps, "columns": self.columns, "target": self.target, **manner(self.size, self.pixels)}

    def read(self, rows: numpy.ndarray):
        refuse_bad(rows, self.bad)
        columns = {name: self._column(name, rows) for name in self.columns}
        if self.target is None:
            return columns
        target = columns.pop(self.target)
        return *columns.values(), target

    def _placed(self, samples: list[Found]) -> dict[str, numpy.ndarray]:
        """{column: (begin, end) of each row's file}, -1 where there is none.

        A picture is one whatever it ends in: where a sample has no ``.jpg``, its ``.png`` stands in the column. Not so where some sample has
        both, which then mean different things.
        """
        endings = {ending for words, _ in samples for ending in words["endings"]}
        column_of = {ending: _column_of(ending, self.columns) for ending in endings}
        places = {
            ending: numpy.full((len(self), 2), -1, numpy.int64)
            for ending, name in column_of.items()
            if name is not None
        }
        for first, (words, (files,)) in zip(self._edges[:-1].tolist(), samples, strict=True):
            for number, ending in enumerate(words["endings"]):
                if ending in places:
                    own = files[files[:, 1] == number]
                    places[ending][first + own[:, 0]] = own[:, 2:]
        for ending in sorted(places.keys() - set(self.columns)):
            stead, own = places[column_of[ending]], places.pop(ending)
            if not ((stead >= 0) & (own >= 0)).any():
                stead[:] = numpy.maximum(stead, own)
        return places

    def _column(self, name: str, rows: numpy.ndarray):
        contents = self.raw(name, rows)
        kind = _kind(name)
        if kind in PICTURES:
            where = [f"{self._where(row)}.{name}" for row in rows.tolist()]
            return pictures_of(rows.tolist(), where, iter(contents), self.size, self.pixels)
        values = []
        for row, content in zip(rows.tolist(), contents, strict=True):
            try:
                values.append(DECODERS[kind](content) if kind in DECODERS else content)
            except BROKEN as error:
                raise BadRow(
                    row, f"{self._where(row)}.{name}", f"it is no {kind} file ({format_error(error)})"
                ) from None
        if kind == "cls":
            return torch.tensor(values, dtype=torch.int64)
        return self._stacked(name, rows, values) if kind == "npy" else values

    def _stacked(self, name: str, rows: numpy.ndarray, values: list[torch.Tensor]):
        """Arrays in one tensor, where those that were looked at have one shape and type."""
        if (like := self.shapes[name]) is None:
            return values
        for row, value in zip(rows.tolist(), values, strict=True):
            if (value.shape, value.dtype) != like:
                shape, dtype = list(value.shape), value.dtype
                raise BadRow(
                    row,
                    f"{self._where(row)}.{name}",
                    f"its shape {shape} or type {dtype} differs from {list(like[0])}, {like[1]}",
                )
        batch = acquire((len(values), *like[0]), like[1])
        return torch.stack(values, out=batch) if values else batch

    def _shape(self, name: str) -> tuple[torch.Size, torch.dtype] | None:
        """The one (shape, type) that some arrays from everywhere have."""
        alike, _ = once(["shape of arrays", name], self.stamps, lambda: self._seen(name))
        return (torch.Size(alike[0]), getattr(torch, alike[1])) if alike else None

    def _seen(self, name: str) -> Found:
        """[shape, type] of these arrays; None where they differ."""
        there = numpy.flatnonzero(self.places[name][:, 0] >= 0)
        rows = there[numpy.unique(numpy.linspace(0, len(there) - 1, SAMPLED).astype(numpy.int64))]
        seen = set()
        for content in self.raw(name, rows):
            try:
                array = _array(content)
                seen.add((tuple(array.shape), str(array.dtype).removeprefix("torch.")))
            except BROKEN:
                continue  # told when it is read
        return seen.pop() if len(seen) == 1 else None, []

    def raw(self, name: str, rows: numpy.ndarray) -> list[bytes]:
        """The bytes of one file of each sample."""
        begins, ends = self.places[name][rows].T
        if (begins < 0).any():
            row = int(rows[(begins < 0).argmax()])
            raise BadRow(row, self._where(row), f"it has no file that ends in .{name}")
        return read_ranges(self.stamps, numpy.searchsorted(self._edges, rows, "right") - 1, begins, ends)

    def _where(self, row: int) -> str:
        return f"{self.stamps[int(numpy.searchsorted(self._edges, row, 'right')) - 1][0]}, {self.keys[row]}"


def _walked(mark: list, tell: Tell) -> tuple[Found, str | None]:
    """Where the files of each whole sample lie: {"keys" of the samples, "endings"}, and [sample, ending, begin, end] of each file."""
    keys, endings, files, why = [], {}, [], None
    try:
        for key, parts in _samples(mark, tell):
            for ending, place in parts.items():
                files += len(keys), endings.setdefault(ending, len(endings)), *place
            keys.append(key)
    except ConfigurationError as refused:
        if not is_lost(mark[0], refused):
            raise
        why = str(refused)
    return ({"keys": keys, "endings": [*endings]}, [numpy.array(files, numpy.int64).reshape(-1, 4)]), why


def _samples(mark: list, tell: Tell) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """(key, {ending: (begin, end)}) of each sample of a shard."""
    path = mark[0]
    before, parts = None, {}
    try:
        for number, (name, begin, end) in enumerate(members(whole(mark, tell))):
            if number % TOLD == 0:
                tell(begin)
            _inside(path, name)
            folder, slash, file = name.removeprefix("./").rpartition("/")
            stem, dot, ending = file.partition(".")
            if not dot or not stem or not ending or stem.startswith("__"):
                continue  # a note about the shard, or a hidden file
            key = f"{folder}{slash}{stem}"
            if key != before and parts:
                yield before, parts
                parts = {}
            if ending.lower() in parts:
                raise ConfigurationError(
                    f"{path} has two files {name}; a sample has each ending once, and its files stand together"
                )
            before, parts[ending.lower()] = key, (begin, end)
    except Damaged as error:
        raise FileMissingError(f"{path} {error}") from None
    if parts:
        yield before, parts


def _inside(path: str, name: str) -> None:
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        raise ConfigurationError(
            f"{path} has a member {name!r}, whose path leads out of the folder; do not trust this file"
        )


def _wanted(samples: list[Found], columns: Sequence[str] | None, target: str | None) -> list[str]:
    known = {name for words, _ in samples for name in words["endings"]}
    words, (files,) = next(some for some in samples if some[0]["keys"])
    of_first = [words["endings"][ending] for _, ending, *_ in files[files[:, 0] == 0].tolist()]
    names = [_ending(name) for name in (of_first if columns is None else columns)]
    for name in [*names, *([] if target is None else [target])]:
        if name not in known:
            raise ConfigurationError(f"no sample has a file that ends in .{name}{suggest(name, known)}")
    names = [name for name in names if name != target]
    if not names:
        raise ConfigurationError(
            "without another column than the target there is nothing to predict it from"
            if target
            else "no column was named"
        )
    return names if target is None else [*names, target]


# ---- what is in a file


def _ending(name: str) -> str:
    return name.lstrip(".").lower()


def _column_of(ending: str, columns: list[str]) -> str | None:
    """The column that files of an ending belong to."""
    if ending in columns or _kind(ending) not in PICTURES:
        return ending if ending in columns else None
    stem = ending.rpartition(".")[0]
    return next((name for name in columns if _kind(name) in PICTURES and name.rpartition(".")[0] == stem), None)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _array(content: bytes) -> torch.Tensor:
    try:
        array = numpy.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # a damaged header is parsed as Python, which raises nearly anything
        raise ValueError(format_error(error)) from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"it holds {array.dtype}, not numbers")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=False))


DECODERS: dict[str, Callable[[Any], Any]] = {
    "cls": lambda content: int(numpy.int64(int(content))),
    "json": lambda content: json.loads(content),
    "txt": lambda content: content.decode(),
    "npy": _array,
}
