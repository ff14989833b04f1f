"""What is converted: rows of some files, in their order, in the form that a storage wants them in.

``columns`` are those of a batch, ``tables`` Arrow's, which keep every type and what is missing, and ``samples`` the files of a
tar: a name and some bytes for each ending.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy
import torch

from hasten.contract.errors import Refusal, one_line
from hasten.data.formats.decoding import PIXELS, pictures_of, size_of
from hasten.data.formats.table_files import Csv, Feather, Parquet
from hasten.data.formats.table_layout import Layout
from hasten.data.formats.tars import PICTURES
from hasten.data.places.files import opened as opened_file
from hasten.data.places.files import stamp
from hasten.data.places.ranges import read_ranges
from hasten.data.source import BadRow, Source
from hasten.data.storing.kinds import Kind, named, opened

CHUNK = 16_000_000  # bytes of rows that are in hand at a time
PROBED = 4  # rows that are read to know the size of all
QUALITY = 90  # of a JPEG that is written


@dataclass(frozen=True)
class Reading:
    """Rows of files of one kind.

    Attributes:
        where: the folder, or the files.
        target, fill: of a table, as in ``parquet``.
        resize: the side of pictures in pixels, or (height, width), or None to leave them.
        most: only so many first rows; None for all.
    """

    kind: Kind
    where: str | list[str]
    files: list[str]
    target: str | None = None
    fill: float | None = None
    resize: int | tuple[int, int] | None = None
    most: int | None = None

    def identity(self) -> dict:
        """What the rows are made of, as plain JSON."""
        made_of = [stamp(file) for file in self.files]
        return {"files": made_of, "target": self.target, "fill": self.fill, "resize": self.resize}

    def opened(self) -> Source:
        """A new source, which has read nothing yet."""
        return opened(self.kind, self.where, target=self.target, fill=self.fill, resize=self.resize).source

    @cached_property
    def source(self) -> Source:
        return self.opened()

    @cached_property
    def rows(self) -> int:
        if self.kind.is_table:
            there = sum(rows for manifest in self._manifests.values() for rows in manifest.runs)
        else:
            there = len(self.source)
        return there if self.most is None else min(there, self.most)

    @cached_property
    def chunk(self) -> int:
        """Rows that are read at a time."""
        first = self.some(0, min(PROBED, self.rows))
        return max(1, CHUNK * min(PROBED, self.rows) // max(1, sum(map(_size, first.values()))))

    def some(self, first: int, last: int) -> dict:
        """The columns of neighbouring rows, by name."""
        return named(self.source.read(numpy.arange(first, last)), self.kind, self.target)

    def columns(self, first: int, last: int) -> Iterator[dict]:
        """The rows from ``first`` to ``last``, some at a time."""
        for begin in range(first, last, self.chunk):
            yield self.some(begin, min(begin + self.chunk, last))

    # ---- as Arrow tables

    def tables(self, first: int, last: int) -> Iterator:
        """The same rows as Arrow tables, all of one schema."""
        if not self.kind.is_table:
            yield from map(arrow_table, self.columns(first, last))
            return
        import pyarrow as pa

        at, schema = 0, pa.schema(list(self._layout.types.items()))
        for file, manifest in self._manifests.items():
            for number, rows in enumerate(manifest.runs):
                low, high = max(first, at), min(last, at + rows)
                if low < high:
                    run = self._run(file, number, at).slice(low - at, high - low)
                    for begin in range(0, len(run), step := max(1, CHUNK * len(run) // max(1, run.nbytes))):
                        yield run.slice(begin, step).cast(schema)
                at += rows

    @cached_property
    def _run(self) -> Callable:
        """As ``_decoded``; the last run is kept, as a part may end in the middle of one."""
        return lru_cache(maxsize=1)(self._decoded)

    def _decoded(self, file: str, number: int, first: int):
        """An Arrow table of a run, whose first row has this number."""
        import pyarrow as pa

        try:
            run = self._form.run(file, number, self._layout.names)
        except (OSError, pa.ArrowException) as error:
            raise BadRow(first, f"{file}, {self._form.run_name} {number}", one_line(error)) from None
        run = pa.Table.from_batches([run]) if isinstance(run, pa.RecordBatch) else run
        return run.select(self._layout.names)

    @cached_property
    def _form(self):
        return {"parquet": Parquet, "feather": Feather}[self.kind.name]() if self.kind.name != "csv" else Csv(None, None)

    @cached_property
    def _manifests(self) -> dict:
        return {file: self._form.manifest(file) for file in self.files}

    @cached_property
    def _layout(self) -> Layout:
        schemas = {file: manifest.schema for file, manifest in self._manifests.items()}
        return Layout.of(schemas, None, None, guessed=self.kind.name == "csv")

    # ---- as files in a tar

    def samples(self, first: int, last: int) -> Iterator[list[tuple[str, dict[str, bytes]]]]:
        """The same rows as (key, {ending: bytes}); resized pictures are JPEGs, all others the bytes that they were."""
        parts = self._parts_of_pictures if self.kind.name == "images" else self._parts_of_shards
        for begin in range(first, last, self.chunk):
            rows = numpy.arange(begin, min(begin + self.chunk, last))
            some = parts(rows)
            yield [(key, self._resized(row, key, files)) for row, (key, files) in zip(rows.tolist(), some, strict=True)]

    def _parts_of_pictures(self, rows: numpy.ndarray) -> Iterator[tuple[str, dict[str, bytes]]]:
        for row in rows.tolist():
            path = self.source.files.path(row)
            with opened_file(path) as file:
                files = {"png" if path.lower().endswith(".png") else "jpg": file.read()}
            if self.source.labels is not None:
                files["cls"] = str(self.source.labels[row].item()).encode()
            yield f"{row:09}", files

    def _parts_of_shards(self, rows: numpy.ndarray) -> Iterator[tuple[str, dict[str, bytes]]]:
        numbers = numpy.searchsorted(self.source.edges(), rows, "right") - 1
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
            places = {name: self.source.places[name][row] for name in self.source.columns}
            there = {name: place for name, place in places.items() if place[0] >= 0}
            contents = read_ranges(self.source.stamps, numpy.full(len(there), number), *numpy.array([*there.values()]).T)
            yield self.source.keys[row], dict(zip(there, map(bytes, contents), strict=True))

    def _resized(self, row: int, key: str, files: dict[str, bytes]) -> dict[str, bytes]:
        if self.resize is None:
            return files
        made = {}
        for ending, content in files.items():
            stem, _, last = ending.rpartition(".")
            if last in PICTURES:
                (picture,) = pictures_of([row], [key], iter([content]), size_of(self.resize), PIXELS)
                ending, content = f"{stem}.jpg".lstrip("."), jpeg(picture)
            made[ending] = content
        return made


def jpeg(picture: torch.Tensor) -> bytes:
    """A picture, uint8 (3, height, width), as a JPEG file."""
    colours = numpy.ascontiguousarray(picture.permute(1, 2, 0).numpy())
    try:
        from simplejpeg import encode_jpeg

        return encode_jpeg(colours, quality=QUALITY, colorspace="RGB", colorsubsampling="420")
    except ImportError:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(colours).save(file, "JPEG", quality=QUALITY)
        return file.getvalue()


def arrow_table(columns: dict):
    """Columns of a batch as an Arrow table."""
    import pyarrow as pa

    return pa.table({name: _arrow(name, column) for name, column in columns.items()})


def _arrow(name: str, column):
    import pyarrow as pa

    if isinstance(column, torch.Tensor):
        array = pa.array(_numbers(name, column).reshape(-1))
        for size in reversed(column.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array
    if column and isinstance(column[0], torch.Tensor):
        edges = numpy.cumsum([0, *map(len, column)])
        return pa.LargeListArray.from_arrays(pa.array(edges, pa.int64()), pa.array(_numbers(name, torch.cat(column))))
    if not all(isinstance(value, (bytes, str)) for value in column):
        raise Refusal(f"column {name!r} holds {type(column[0]).__name__}s, which no table holds")
    return pa.array(column, pa.large_binary() if column and isinstance(column[0], bytes) else pa.large_string())


def _numbers(name: str, column: torch.Tensor) -> numpy.ndarray:
    try:
        return column.numpy()
    except TypeError:
        raise Refusal(f"column {name!r} holds {column.dtype}, which no file format here knows; store float32 or float16") from None


def _size(column) -> int:
    if isinstance(column, torch.Tensor):
        return column.nbytes
    return sum(
        _size(value) if isinstance(value, torch.Tensor) else len(value) if isinstance(value, (bytes, str)) else 64 for value in column
    )
