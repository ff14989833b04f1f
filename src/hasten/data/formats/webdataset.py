"""Tar shards in the WebDataset layout.

Files whose names agree up to the first dot are one sample (``0017.jpg``, ``0017.cls``). The headers of a shard are read
once; then every sample is read by its position, in any order. Nothing is unpacked to disk.
Layout: https://github.com/webdataset/webdataset; tar headers: ``tar_headers.py``.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, format_error, suggest
from hasten.data.buffer_pool import acquire
from hasten.data.formats.decoding import PIXELS, decode_images, decoder_fingerprint, size_of
from hasten.data.formats.tar_headers import DamagedTarError, members
from hasten.data.io.conversion_manifest import stored_classes
from hasten.data.io.index_cache import IndexedFiles, ReportBytes, load_or_build_index, load_or_compute
from hasten.data.io.metadata_cache import CacheEntry
from hasten.data.io.paths import resolve_paths
from hasten.data.io.range_reader import read_ranges
from hasten.data.pipeline import Pipeline
from hasten.data.source import BadRow, Source, refuse_bad, split_target
from hasten.data.validation import check_name, check_names

PROBED_SAMPLES = 32  # read to find the shape of arrays
MEMBERS_PER_REPORT = 1 << 10  # members of a shard after which the index reports its progress
IMAGE_TYPES = ("jpg", "jpeg", "png")
DECODE_ERRORS = (ValueError, OverflowError, RecursionError, MemoryError)


def webdataset(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    target: str | None = None,
    resize: int | tuple[int, int] | None = None,
    pixels: int = PIXELS,
) -> Pipeline:
    """Samples from tar files; a batch is a dict with a column for each file extension.

    The last part of the extension determines the type: ``jpg``, ``jpeg``, ``png`` are images (uint8, shape
    (3, height, width)); ``cls`` integers (int64); ``npy`` arrays, one tensor if all have the same shape; ``json`` JSON
    values; ``txt`` text; everything else bytes. What is not a tensor is a list.

    If a sample lacks an image column but has an image with another image extension, that is used, unless some sample
    has both. A shard that is damaged, truncated or unreadable counts as one bad row after its complete samples.

    Args:
        paths: Files, directories or patterns, local or remote; not compressed. A remote file is read once to find its
            samples; the index is cached.
        columns: Extensions to read; None: all of the first sample.
        target: The extension to predict; a batch is then the tuple (other columns in order, target).
        resize: As in ``images``.
        pixels: As in ``images``.

    Raises:
        ConfigurationError: No complete sample, a member whose path leaves the archive, or an unknown extension.
    """
    return Pipeline(Shards(paths, columns, target, resize, pixels))


class Shards(IndexedFiles, Source):
    """Samples in tar files of the WebDataset layout (shards).

    The arguments are those of ``webdataset``; ``every_member`` adds columns for the extensions that the first sample
    lacks, also for an image that would replace another one if no sample had both.
    """

    def __init__(
        self,
        paths: Any,
        columns: Any = None,
        target: str | None = None,
        resize: Any = None,
        pixels: int = PIXELS,
        every_member: bool = False,
    ) -> None:
        self.size, self.pixels = size_of(resize, pixels), pixels
        columns = None if columns is None else check_names("columns=", columns)
        target = check_name("target=", target)
        target = None if target is None else _extension(target)
        files = resolve_paths(paths, (".tar",))
        self.classes = stored_classes(files)  # by index, if the shards were converted from them
        indices = load_or_build_index(files, ["samples"], _index_shard)
        super().__init__(files, indices, [len(info["keys"]) for _, (info, _), _ in indices], "sample")
        keys = [info["keys"] if why is None else [*info["keys"], ""] for _, (info, _), why in indices]
        self.keys = [*chain.from_iterable(keys)]  # the common part of the names of each sample's files
        samples = [index for _, index, _ in indices]
        self.columns, self.target = _select_columns(samples, columns, target), target
        self.left_out = [name for name in sorted(_extensions(samples)) if _column_of(name, self.columns) is None]
        if every_member:
            self.columns, self.left_out = [*self.columns, *self.left_out], []
        # extension -> (begin, end) of each row's file in its shard, int64, shape (rows, 2); -1 if missing
        self.positions = self._find_positions(samples, every_member)
        # of the arrays of a column; None: they differ
        self.shapes: dict[str, tuple[torch.Size, torch.dtype] | None] = {}
        for name in (name for name in self.columns if _type(name) == "npy"):
            common, _ = load_or_compute(["shape of arrays", name], self.signatures, partial(self._probe_shapes, name))
            self.shapes[name] = (torch.Size(common[0]), getattr(torch, common[1])) if common else None

    def fingerprint(self) -> dict:
        files = {"shards": self.signatures, "columns": self.columns, "target": self.target}
        return {**files, **decoder_fingerprint(self.size, self.pixels)}

    def read(self, rows: numpy.ndarray) -> Any:
        refuse_bad(rows, self.bad)
        columns = {name: self._column(name, rows) for name in self.columns}
        return split_target(columns, self.target)

    def _find_positions(self, samples: list[CacheEntry], every_member: bool) -> dict[str, numpy.ndarray]:
        """Merges the shards' indexes into ``positions``. For a missing image column another image file is used, unless
        some sample has both extensions, because then they mean different things: ``every_member`` makes the other a
        column, too.
        """
        column_of = {extension: _column_of(extension, self.columns) for extension in _extensions(samples)}
        wanted = [extension for extension, name in column_of.items() if name is not None]
        positions = {extension: numpy.full((len(self), 2), -1, numpy.int64) for extension in wanted}
        for first, (info, (files,)) in zip(self.offsets[:-1].tolist(), samples, strict=True):
            for index, extension in enumerate(info["endings"]):
                if extension in positions:
                    found = files[files[:, 1] == index]
                    positions[extension][first + found[:, 0]] = found[:, 2:]
        for extension in sorted(positions.keys() - set(self.columns)):
            column, other = positions[str(column_of[extension])], positions.pop(extension)
            if not ((column >= 0) & (other >= 0)).any():
                column[:] = numpy.maximum(column, other)
            elif every_member:
                self.columns.append(extension)
                positions[extension] = other
        return positions

    def _column(self, name: str, rows: numpy.ndarray) -> Any:
        contents = self.raw(name, rows)
        kind = _type(name)
        if kind in IMAGE_TYPES:
            where = [f"{self._where(row)}.{name}" for row in rows.tolist()]
            return decode_images(rows.tolist(), where, iter(contents), self.size, self.pixels)
        values = []
        for row, content in zip(rows.tolist(), contents, strict=True):
            try:
                values.append(DECODERS[kind](content) if kind in DECODERS else content)
            except DECODE_ERRORS as error:
                why = f"it is not a {kind} file ({format_error(error)})"
                raise BadRow(row, f"{self._where(row)}.{name}", why) from None
        if kind == "cls":
            return torch.tensor(values, dtype=torch.int64)
        return self._stack(name, rows, values) if kind == "npy" else values

    def _stack(self, name: str, rows: numpy.ndarray, values: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Stacks ``.npy`` arrays if probed ones share shape and dtype (BadRow for another); else returns the list."""
        common = self.shapes[name]
        if common is None:
            return values
        for row, value in zip(rows.tolist(), values, strict=True):
            if (value.shape, value.dtype) != common:
                why = f"its shape {list(value.shape)} or type {value.dtype} differs from {list(common[0])}, {common[1]}"
                raise BadRow(row, f"{self._where(row)}.{name}", why)
        batch = acquire((len(values), *common[0]), common[1])
        return torch.stack(values, out=batch) if values else batch

    def _probe_shapes(self, name: str) -> CacheEntry:
        """Returns ((shape, dtype) of up to 32 arrays of a column from all shards, None if they differ; no arrays)."""
        present = numpy.flatnonzero(self.positions[name][:, 0] >= 0)
        rows = present[numpy.unique(numpy.linspace(0, len(present) - 1, PROBED_SAMPLES).astype(numpy.int64))]
        forms = set()
        for content in self.raw(name, rows):
            with suppress(*DECODE_ERRORS):  # reported when the row is read
                array = _decode_array(content)
                forms.add((tuple(array.shape), str(array.dtype).removeprefix("torch.")))
        return forms.pop() if len(forms) == 1 else None, []

    def raw(self, name: str, rows: numpy.ndarray) -> list[bytes]:
        """Returns the bytes of the file with extension ``name`` of each row; BadRow if a row has none."""
        begins, ends = self.positions[name][rows].T
        if (begins < 0).any():
            row = int(rows[(begins < 0).argmax()])
            raise BadRow(row, self._where(row), f"it has no file that ends in .{name}")
        return read_ranges(self.signatures, self.file_of(rows), begins, ends)

    def _where(self, row: int) -> str:
        return f"{self.signatures[int(self.file_of(row))][0]}, {self.keys[row]}"


def _index_shard(content: memoryview, path: str, tell: ReportBytes) -> tuple[CacheEntry, str | None]:
    """Returns (({"keys" of the complete samples, "endings": the extensions}, [array of (sample, extension, begin,
    end)]), why a damaged shard has no more samples, or None). ConfigurationError if samples are ambiguous.
    """
    keys: list[str] = []
    extensions: dict[str, int] = {}
    files: list[tuple[int, int, int, int]] = []
    why = None
    try:
        for key, members_of_sample in groupby(_members_with_keys(content, path, tell), itemgetter(0)):
            parts: dict[str, tuple[int, int]] = {}
            for _, name, extension, begin, end in members_of_sample:
                if extension in parts:
                    advice = "the files of a sample must be adjacent and have different extensions"
                    raise ConfigurationError(f"{path} has two files {name}; {advice}")
                parts[extension] = begin, end
            for extension, span in parts.items():
                files.append((len(keys), extensions.setdefault(extension, len(extensions)), *span))
            keys.append(key)
    except DamagedTarError as error:
        why = f"{path} {error}"
    array = numpy.array(files, numpy.int64).reshape(-1, 4)
    return ({"keys": keys, "endings": [*extensions]}, [array]), why


def _members_with_keys(content: memoryview, path: str, tell: ReportBytes) -> Iterator[tuple[str, str, str, int, int]]:
    """Yields (key of the sample, name, extension, first byte, end) of files, without metadata and hidden ones;
    ConfigurationError for a path that leaves the archive.
    """
    for index, (name, begin, end) in enumerate(members(content)):
        if index % MEMBERS_PER_REPORT == 0:
            tell(begin)
        if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            problem = f"a member {name!r}, whose path leaves the archive"
            raise ConfigurationError(f"{path} has {problem}; do not trust this file")
        directory, slash, file = name.removeprefix("./").rpartition("/")
        stem, _, extension = file.partition(".")
        if stem and extension and not stem.startswith("__"):
            yield f"{directory}{slash}{stem}", name, extension.lower(), begin, end


def _select_columns(samples: list[CacheEntry], columns: Sequence[str] | None, target: str | None) -> list[str]:
    known = _extensions(samples)
    info, (files,) = next(index for index in samples if index[0]["keys"])
    of_first = [info["endings"][extension] for _, extension, *_ in files[files[:, 0] == 0].tolist()]
    names = [_extension(name) for name in (of_first if columns is None else columns)]
    for name in [*names, *([] if target is None else [target])]:
        if name not in known:
            raise ConfigurationError(f"no sample has a file that ends in .{name}{suggest(name, known)}")
    names = [name for name in names if name != target]
    if not names:
        why = f"there is no column to read besides the target {target!r}" if target else "columns= is empty"
        raise ConfigurationError(f"{why}; an input column is needed")
    return names if target is None else [*names, target]


def _extensions(samples: list[CacheEntry]) -> set[str]:
    """Returns all extensions in the indexes of some shards."""
    return {extension for info, _ in samples for extension in info["endings"]}


# ---- content of files


def _extension(name: str) -> str:
    return name.lstrip(".").lower()


def _column_of(extension: str, columns: list[str]) -> str | None:
    """Returns the column that files with this extension belong to; None if they are not read."""
    if extension in columns or _type(extension) not in IMAGE_TYPES:
        return extension if extension in columns else None
    stem = extension.rpartition(".")[0]
    return next((name for name in columns if _type(name) in IMAGE_TYPES and name.rpartition(".")[0] == stem), None)


def _type(name: str) -> str:
    return name.rpartition(".")[2]


def _decode_array(content: bytes) -> torch.Tensor:
    try:
        array = numpy.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # NumPy parses the header as Python, so a damaged one raises nearly any type
        raise ValueError(format_error(error)) from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"the array holds {array.dtype}, not numbers")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=False))


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": lambda content: int(numpy.int64(int(content))),
    "json": json.loads,
    "txt": lambda content: content.decode(),
    "npy": _decode_array,
}
