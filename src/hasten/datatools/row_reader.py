"""Reads the rows to convert, in order, in the form that the target format requires.

``columns`` yields batches of columns, ``tables`` Arrow tables, which preserve all types and missing values, and
``samples`` the files of a tar archive: a key, and bytes for each file ending.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.data.formats.decoding import PIXELS, decode_image, decode_images, size_of
from hasten.data.formats.images import content_of
from hasten.data.formats.webdataset import IMAGE_TYPES
from hasten.data.io.paths import content_version, file_signature
from hasten.data.io.range_reader import read_ranges
from hasten.data.source import BadRow, BadRowPolicy, Source, length_of
from hasten.datatools.format_detection import StorageFormat, flatten_columns, open_pipeline

CHUNK = 16_000_000  # bytes of rows in memory at a time
QUALITY = 90  # of JPEG files, from 0 to 100
PROBED_ROWS = 4  # read to estimate the size of a row
MIN_SIZE = (1, 1)  # pixels: decoding to this size verifies all of an image at the least cost


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of files of one format; skips and counts unreadable ones as far as allowed."""

    kind: StorageFormat  # format of the files
    where: str | list[str]  # what is opened: the directory, a pattern, or the files
    files: list[str]  # paths of all files
    target: str | None = None  # of a table, as in ``parquet``
    fill: Any = None  # of a table, as in ``parquet``
    # the side of images in pixels, or (height, width); None keeps their size
    resize: int | tuple[int, int] | None = None
    max_rows: int | None = None  # read only this many rows from the beginning; None for all
    # how many unreadable rows may be skipped, and which were
    faults: BadRowPolicy = field(default_factory=BadRowPolicy, compare=False)
    every_member: bool = False  # read all members of tar shards, not only those that the first sample has

    def fingerprint(self) -> dict:
        """What identifies the rows: versions of the files, and the options; JSON-serializable."""
        files = [[signature[0], *content_version(signature)] for signature in self.signatures()]
        return {"files": files, "target": self.target, "fill": self.fill, "resize": self.resize}

    def signatures(self) -> list[list]:
        """[path, size, version] of each file; [path, 0, reason] for a missing file that may be skipped."""
        return [signature_or_reason(file, self.faults) for file in self.files]

    def open(self) -> Any:
        """Returns a new source, which has read nothing yet. ConfigurationError if a file cannot be opened or is
        damaged; ``select_openable`` has removed those that may be skipped.
        """
        of_table: dict[str, Any] = {"target": self.target, "fill": self.fill}
        options: dict[str, Any] = {"resize": self.resize, "every_member": self.every_member}
        source = open_pipeline(self.kind, self.where, **of_table, **options).source
        for reason in getattr(source, "lost", {}).values():
            raise ConfigurationError(reason)
        return source

    @cached_property
    def source(self) -> Any:
        """The opened source of the rows, cached; its class depends on the format."""
        return self.open()

    @cached_property
    def rows(self) -> int:
        return len(self.source) if self.max_rows is None else min(len(self.source), self.max_rows)

    @cached_property
    def first(self) -> Any:
        """The columns of the first readable rows, as the source returns them; RunError if no row can be read."""
        for begin in range(0, self.rows, PROBED_ROWS):
            columns = self.read(self.source, numpy.arange(begin, min(begin + PROBED_ROWS, self.rows)))
            if columns is not None:
                return columns
        raise RunError("no row can be read; there is nothing to store")

    @cached_property
    def like(self) -> dict:
        """{name: column} of the first readable rows, which show types and shapes."""
        return self._named(self.first)

    @cached_property
    def chunk(self) -> int:
        """Number of rows read at a time, from the size of the first ones."""
        return max(1, CHUNK * length_of(self.first) // max(1, sum(map(_num_bytes, self.like.values()))))

    def columns(self, first: int, last: int) -> Iterator[dict]:
        """Yields the columns of rows [``first``, ``last``), by name, some rows at a time; without the skipped ones."""
        for begin in range(first, last, self.chunk):
            columns = self.read(self.source, numpy.arange(begin, min(begin + self.chunk, last)))
            if columns is not None:
                yield self._named(columns)

    def read(self, source: Source, rows: numpy.ndarray) -> Any:
        """Returns the columns of some rows, without the skipped ones; None if none can be read. BadRow if a row cannot
        be read and none may be skipped, RunError if more cannot be read than may be skipped.
        """
        if not self.faults.max_rows:
            return source.read(rows)
        columns, _, bad_rows = self.faults.readable(source, rows)
        self.faults.record(*bad_rows)
        return columns

    def _skip(self, bad_row: BadRow) -> None:
        """Counts a skipped row; raises ``bad_row`` if none may be skipped, RunError if too many were."""
        if not self.faults.max_rows:
            raise bad_row
        self.faults.record(bad_row)

    def check_members(self, to: str) -> None:
        """ConfigurationError if samples of tar shards would lose a member in format ``to``: in "webdataset" if two
        images become one, in "rows" if a sample that may not be skipped lacks a column. HastenWarning if it is one that
        the first sample lacks, which is no column.
        """
        if self.kind.name == to == "webdataset":
            _check_distinct_images(self.source.columns)
        elif self.kind.name == "webdataset":
            if left_out := ", ".join(f".{name}" for name in self.source.left_out):
                message = (
                    f"the first sample has no {left_out}: a matrix needs one of each sample, so these are left out"
                )
                warnings.warn(message, HastenWarning, stacklevel=2)
            if not self.faults.max_rows:
                _check_every_column(self.source)

    def _named(self, columns: Any) -> dict[str, Any]:
        flat = flatten_columns(columns, self.kind, self.target)
        if self.kind.name in ("images", "webdataset"):
            return {name: _stack_images(column) for name, column in flat.items()}
        return flat

    # ---- as Arrow tables

    def tables(self, first: int, last: int) -> Iterator:
        """Yields rows [``first``, ``last``) as Arrow tables of one schema."""
        if not self.kind.is_table:
            yield from map(arrow_table, self.columns(first, last))
            return
        for chunk, (begin, end) in enumerate(pairwise(self.source.chunk_offsets().tolist())):
            if not (rows := range(max(first, begin), min(last, end))):
                continue
            try:
                table = self._chunk(chunk).slice(rows.start - begin, len(rows))
            except BadRow as bad_row:
                for row in rows:
                    self._skip(BadRow(row, bad_row.where, bad_row.why))
                continue
            step = max(1, CHUNK * len(table) // max(1, table.nbytes))
            yield from (table.slice(row, step) for row in range(0, len(table), step))

    @cached_property
    def _chunk(self) -> Callable:
        return lru_cache(maxsize=1)(self.source.chunk_as_arrow)  # two parts may share a chunk

    # ---- as files in a tar

    def samples(self, first: int, last: int) -> Iterator[list[tuple[str, dict[str, bytes]]]]:
        """Yields lists of (key, {ending: bytes}) of rows [``first``, ``last``); only resized images are re-encoded."""
        read = self._read_images if self.kind.name == "images" else self._read_shards
        for begin in range(first, last, self._sample_chunk):
            rows = numpy.arange(begin, min(begin + self._sample_chunk, last))
            found = zip(rows.tolist(), read(rows), strict=True)
            samples = (files and self._encode(row, *files) for row, files in found)
            yield [sample for sample in samples if sample is not None]

    @cached_property
    def _sample_chunk(self) -> int:
        """Number of samples read at a time; larger if images are copied as files instead of being decoded. Samples of
        tar shards are not probed for it, because some may lack a member that others have.
        """
        size = size_of(self.resize)
        if size is not None and self.kind.name == "images":
            return self.chunk
        sample = sum(size for _, size, _ in self.signatures()) / len(self.source)  # bytes
        if size is not None:
            sample += 3 * math.prod(size) * len(_image_columns(self.source.columns))
        return max(1, int(CHUNK / max(1, sample)))

    def _read_images(self, rows: numpy.ndarray) -> Iterator[tuple[str, str, dict[str, bytes]] | None]:
        """Yields (key, location, {file ending: bytes}) of each row; None for a row that is skipped as bad."""
        for row in rows.tolist():
            path = self.source.files.path(row)
            try:
                files = {"png" if path.lower().endswith(".png") else "jpg": content_of(path)}
            except ConfigurationError as error:
                self._skip(BadRow(row, path, str(error)))
                yield None
                continue
            if self.source.labels is not None:
                files["cls"] = str(self.source.labels[row].item()).encode()
            yield f"{row:09}", path, files

    def _read_shards(self, rows: numpy.ndarray) -> Iterator[tuple[str, str, dict[str, bytes]]]:
        shards = numpy.searchsorted(self.source.chunk_offsets(), rows, "right") - 1
        for row, shard in zip(rows.tolist(), shards.tolist(), strict=True):
            ranges = {name: self.source.positions[name][row] for name in self.source.columns}
            ranges = {name: span for name, span in ranges.items() if span[0] >= 0}  # the members that the sample has
            begins, ends = numpy.array([*ranges.values()]).T
            contents = read_ranges(self.source.signatures, numpy.full(len(ranges), shard), begins, ends)
            key = self.source.keys[row]
            where = f"{self.source.signatures[shard][0]}, {key}"
            yield key, where, dict(zip(ranges, map(bytes, contents), strict=True))

    def _encode(self, row: int, key: str, where: str, files: dict[str, bytes]) -> tuple[str, dict[str, bytes]] | None:
        """(key, {file ending: bytes}) with images resized if requested; None if the sample is skipped as bad."""
        encoded = {}
        for ending, content in files.items():
            stem, _, last = ending.rpartition(".")
            if last in IMAGE_TYPES:
                location = where if self.kind.name == "images" else f"{where}.{ending}"
                try:
                    if self.resize is None:
                        _check_decodable(row, location, content)
                    else:
                        (image,) = decode_images([row], [location], iter([content]), size_of(self.resize), PIXELS)
                        ending, content = f"{stem}.jpg".lstrip("."), jpeg(image)
                except BadRow as bad_row:
                    self._skip(bad_row)
                    return None
            encoded[ending] = content
        return key, encoded


def _image_columns(columns: list[str]) -> list[str]:
    return [name for name in columns if name.rpartition(".")[2] in IMAGE_TYPES]


def _check_distinct_images(columns: list[str]) -> None:
    """Raises ConfigurationError if several image columns of tar shards would have one name as resized JPEG files."""
    names: dict[str, str] = {}
    for column in _image_columns(columns):
        stem = column.rpartition(".")[0]
        if (other := names.setdefault(stem, column)) != column:
            ending = f"{stem}.jpg".lstrip(".")
            problem = f"samples hold images .{other} and .{column}, which with --resize both become .{ending}"
            raise ConfigurationError(f"{problem}; give one of them another name, such as mask.png, or use --to rows")


def _check_every_column(source: Any) -> None:
    """Raises ConfigurationError if a sample of tar shards lacks a file that is a column of others."""
    lacking = {name: spans[:, 0] < 0 for name, spans in source.positions.items()}
    if not (bad := numpy.any([*lacking.values()], axis=0)).any():
        return
    name = next(name for name, rows in lacking.items() if rows.any())
    first = source.keys[lacking[name].argmax()]
    problem = f"{lacking[name].sum()} of {len(source)} samples, the first is {first}, have no file .{name}"
    rule = f"the matrix of column {name!r} requires one of each"
    advice = f"remove these samples or all .{name} files, or skip the samples: --max-bad-rows {bad.sum()}"
    raise ConfigurationError(f"{problem}, and {rule}; {advice}")


def _check_decodable(row: int, where: str, content: bytes) -> None:
    """Raises BadRow if an image that is stored unchanged cannot be decoded."""
    try:
        decode_image(content, PIXELS, MIN_SIZE)
    except ValueError as error:
        raise BadRow(row, where, str(error)) from None


def signature_or_reason(file: str, faults: BadRowPolicy) -> list:
    """Returns [path, size, version] of a file; [path, 0, reason] for a missing one that may be skipped."""
    try:
        signature = file_signature(file)
    except ConfigurationError as error:
        if not faults.max_rows:
            raise
        return [file, 0, str(error)]
    if signature[1] is None:
        raise ConfigurationError(f"the server does not report the size of {file}; download the file first")
    return signature


def _stack_images(column: Any) -> Any:
    """Stacks images of one size to one tensor; images of several sizes stay a list."""
    if not isinstance(column, list) or not column:
        return column
    are_images = all(isinstance(image, torch.Tensor) and image.ndim == 3 for image in column)
    return torch.stack(column) if are_images and len({image.shape for image in column}) == 1 else column


def _num_bytes(value: Any) -> int:
    """Approximate bytes in memory of a column, or of a value in it."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (bytes, str)):
        return len(value)
    return sum(map(_num_bytes, value)) if isinstance(value, list) else 64


# ---- encoders


def jpeg(image: torch.Tensor) -> bytes:
    """Encodes an image, uint8, shape (3, height, width), as a JPEG file; ConfigurationError without Pillow."""
    pixels = numpy.ascontiguousarray(image.permute(1, 2, 0).numpy())
    try:
        from simplejpeg import encode_jpeg

        return encode_jpeg(pixels, quality=QUALITY, colorspace="RGB", colorsubsampling="420")
    except ImportError:
        try:
            from PIL import Image
        except ImportError:
            raise ConfigurationError("writing JPEG files requires Pillow: pip install 'hasten[images]'") from None
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
        return file.getvalue()


def arrow_table(columns: dict) -> Any:
    """Converts {name: tensor or list} to an Arrow table; ConfigurationError for values or a dtype that no format
    stores.
    """
    import pyarrow as pa

    return pa.table({name: _arrow(name, column) for name, column in columns.items()})


def _arrow(name: str, column: Any) -> Any:
    import pyarrow as pa

    if isinstance(column, torch.Tensor):
        array = pa.array(_to_numpy(name, column).reshape(-1))
        for size in reversed(column.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array
    if column and isinstance(column[0], torch.Tensor):
        offsets = pa.array(numpy.cumsum([0, *map(len, column)]), pa.int64())
        return pa.LargeListArray.from_arrays(offsets, pa.array(_to_numpy(name, torch.cat(column))))
    if not all(isinstance(value, (bytes, str)) for value in column):
        raise ConfigurationError(f"column {name!r} holds {type(column[0]).__name__}s, which a table cannot store")
    return pa.array(column, pa.large_binary() if column and isinstance(column[0], bytes) else pa.large_string())


def _to_numpy(name: str, column: torch.Tensor) -> numpy.ndarray:
    try:
        return column.numpy()
    except TypeError:
        problem = f"column {name!r} holds {column.dtype}, which no file format here supports"
        raise ConfigurationError(f"{problem}; store float32 or float16") from None
