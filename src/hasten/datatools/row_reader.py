"""Reads the rows to convert, in their order, in the form that the target format needs.

``columns`` gives batches of columns, ``tables`` Arrow tables, which keep every type and missing values, and ``samples``
the files of a tar archive: a key, and bytes for each file ending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy
import torch

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.formats.decoding import PIXELS, decode_image, decode_images, size_of
from hasten.data.formats.images import content_of
from hasten.data.formats.table_files import Csv, Feather, Parquet, asks_too_much, check
from hasten.data.formats.table_layout import Layout
from hasten.data.formats.webdataset import IMAGE_TYPES
from hasten.data.io.paths import file_signature
from hasten.data.io.range_reader import read_ranges
from hasten.data.source import BadRow, Source, length_of
from hasten.datatools.encoders import arrow_table, jpeg
from hasten.datatools.format_detection import StorageFormat, named, opened

CHUNK = 16_000_000  # bytes of rows in memory at a time
PROBED = 4  # rows read to estimate the size of a row
LEAST = (1, 1)  # pixels: decoding to this size verifies all of an image at the least cost


@dataclass(frozen=True)
class RowReader:
    """Rows of files of one format.

    Attributes:
        kind: the format.
        where: the folder, or the files.
        files: the files.
        target: of a table, as in ``parquet``.
        fill: of a table, as in ``parquet``.
        resize: the side of images in pixels, or (height, width), or None to leave them as they are.
        most: read only this many rows from the beginning; None for all.
        faults: how many unreadable rows may be skipped, and which were.
    """

    kind: StorageFormat
    where: str | list[str]
    files: list[str]
    target: str | None = None
    fill: float | None = None
    resize: int | tuple[int, int] | None = None
    most: int | None = None
    faults: BadRowPolicy = field(default_factory=BadRowPolicy, compare=False)

    def fingerprint(self) -> dict:
        """What the rows are made of, JSON-serializable."""
        return {"files": self.stamps(), "target": self.target, "fill": self.fill, "resize": self.resize}

    def stamps(self) -> list[list]:
        """The stamp of each file; of a missing one that may be skipped, the reason."""
        return [stamped(file, self.faults) for file in self.files]

    def opened(self) -> Source:
        """A new source, which has read nothing yet.

        Raises:
            Refusal: a file cannot be opened or is damaged; ``openable`` has removed those that may be skipped.
        """
        source = opened(self.kind, self.where, target=self.target, fill=self.fill, resize=self.resize).source
        for why in getattr(source, "lost", {}).values():
            raise ConfigurationError(why)
        return source

    @cached_property
    def source(self) -> Source:
        return self.opened()

    @cached_property
    def rows(self) -> int:
        if self.kind.is_table:
            there = sum(rows for manifest in self._manifests.values() for rows in manifest.chunks)
        else:
            there = len(self.source)
        return there if self.most is None else min(there, self.most)

    @cached_property
    def first(self):
        """The columns of the first readable rows, as the source returns them.

        Raises:
            Failure: no row can be read.
        """
        for begin in range(0, self.rows, PROBED):
            if (columns := self.read(self.source, numpy.arange(begin, min(begin + PROBED, self.rows)))) is not None:
                return columns
        raise RunError("no row can be read; there is nothing to store")

    @cached_property
    def like(self) -> dict:
        """The columns of the first readable rows, by name."""
        return self._named(self.first)

    @cached_property
    def chunk(self) -> int:
        """Number of rows read at a time."""
        return max(1, CHUNK * length_of(self.first) // max(1, sum(map(_size, self.like.values()))))

    def probe(self, first: int, last: int) -> dict:
        """The columns of the rows from ``first`` to ``last``, by name; empty if none can be read."""
        columns = self.read(self.source, numpy.arange(first, last))
        return {} if columns is None else self._named(columns)

    def columns(self, first: int, last: int) -> Iterator[dict]:
        """The columns of the rows from ``first`` to ``last``, ``chunk`` rows at a time."""
        for begin in range(first, last, self.chunk):
            if columns := self.probe(begin, min(begin + self.chunk, last)):
                yield columns

    def read(self, source: Source, rows: numpy.ndarray):
        """The columns of some rows, without the skipped ones; None if none can be read.

        Raises:
            BadRow: a row cannot be read, and none may be skipped. Failure: more cannot be read than may be skipped.
        """
        if not self.faults.max_rows:
            return source.read(rows)
        columns, _, bad = self.faults.readable(source, rows)
        for fault in bad:
            self.faults.record(fault)
        return columns

    def _left_out(self, fault: BadRow) -> None:
        """Records a row that is skipped; raises it if none may be."""
        if not self.faults.max_rows:
            raise fault
        self.faults.record(fault)

    def _named(self, columns) -> dict:
        found = named(columns, self.kind, self.target)
        return (
            found
            if self.kind.name not in ("images", "shards")
            else {name: _in_one(column) for name, column in found.items()}
        )

    # ---- as Arrow tables

    def tables(self, first: int, last: int) -> Iterator:
        """The rows from ``first`` to ``last`` as Arrow tables of one schema."""
        if not self.kind.is_table:
            yield from map(arrow_table, self.columns(first, last))
            return
        import pyarrow as pa

        at, schema = 0, pa.schema(list(self._layout.types.items()))
        for file, manifest in self._manifests.items():
            for number, rows in enumerate(manifest.chunks):
                low, high = max(first, at), min(last, at + rows)
                if low < high and (run := self._readable_run(file, number, at, range(low, high))) is not None:
                    for begin in range(0, len(run), step := max(1, CHUNK * len(run) // max(1, run.nbytes))):
                        yield run.slice(begin, step).cast(schema)
                at += rows

    def _readable_run(self, file: str, number: int, first: int, rows: range):
        """Some rows of a run that begins at row ``first``; None if it cannot be read and may be skipped."""
        try:
            return self._run(file, number, first).slice(rows.start - first, len(rows))
        except BadRow as fault:
            for row in rows:
                self._left_out(BadRow(row, fault.where, fault.why))
            return None

    @cached_property
    def _run(self) -> Callable:
        """``_decoded``, which keeps the last run: a part may end in the middle of one."""
        return lru_cache(maxsize=1)(self._decoded)

    def _decoded(self, file: str, number: int, first: int):
        """Decodes a run, which begins at row ``first``, to an Arrow table."""
        import pyarrow as pa

        if number in (bad := self._manifests[file].bad):
            raise BadRow(first, file, bad[number])
        try:
            run = self._form.chunk(file, number, self._layout.names)
            check(run, self._manifests[file].chunks[number])
        except ConfigurationError:
            raise
        except MemoryError as error:
            if not asks_too_much(error):
                raise
            raise BadRow(first, f"{file}, {self._form.chunk_name} {number}", format_error(error)) from None
        except (OSError, ValueError, LookupError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:  # an error of the operating system, not of the row
                raise RunError(f"cannot read {file}: {format_error(error)}") from None
            raise BadRow(first, f"{file}, {self._form.chunk_name} {number}", format_error(error)) from None
        run = pa.Table.from_batches([run]) if isinstance(run, pa.RecordBatch) else run
        return run.select(self._layout.names)

    @cached_property
    def _form(self):
        return {"parquet": Parquet, "feather": Feather}[self.kind.name]() if self.kind.name != "csv" else Csv()

    @cached_property
    def _manifests(self) -> dict:
        return {file: self._form.manifest(file) for file in self.files}

    @cached_property
    def _layout(self) -> Layout:
        schemas = {file: manifest.schema for file, manifest in self._manifests.items()}
        return Layout.of(schemas, None, None, guessed=self.kind.name == "csv")

    # ---- as files in a tar

    def samples(self, first: int, last: int) -> Iterator[list[tuple[str, dict[str, bytes]]]]:
        """The rows from ``first`` to ``last`` as (key, {ending: bytes}); only resized images are encoded anew."""
        parts = self._parts_of_pictures if self.kind.name == "images" else self._parts_of_shards
        for begin in range(first, last, step := self._samples_at_a_time):
            rows = numpy.arange(begin, min(begin + step, last))
            made = (part and self._stored(row, *part) for row, part in zip(rows.tolist(), parts(rows), strict=True))
            yield [sample for sample in made if sample is not None]

    @cached_property
    def _samples_at_a_time(self) -> int:
        """Number of samples read at a time; of images that are not resized, only the files' bytes are in memory."""
        if self.resize is not None:
            return self.chunk
        return max(1, CHUNK * len(self.source) // max(1, sum(size for _, size, _ in self.stamps())))

    def _parts_of_pictures(self, rows: numpy.ndarray) -> Iterator[tuple[str, str, dict[str, bytes]] | None]:
        """(key, location, {ending: bytes}) of each row; None of a row that cannot be read and may be skipped."""
        for row in rows.tolist():
            path = self.source.files.path(row)
            try:
                files = {"png" if path.lower().endswith(".png") else "jpg": content_of(path)}
            except ConfigurationError as refused:
                self._left_out(BadRow(row, path, str(refused)))
                yield None
                continue
            if self.source.labels is not None:
                files["cls"] = str(self.source.labels[row].item()).encode()
            yield f"{row:09}", path, files

    def _parts_of_shards(self, rows: numpy.ndarray) -> Iterator[tuple[str, str, dict[str, bytes]]]:
        numbers = numpy.searchsorted(self.source.chunk_offsets(), rows, "right") - 1
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
            places = {name: self.source.positions[name][row] for name in self.source.columns}
            there = {name: place for name, place in places.items() if place[0] >= 0}
            contents = read_ranges(
                self.source.signatures, numpy.full(len(there), number), *numpy.array([*there.values()]).T
            )
            key = self.source.keys[row]
            yield key, f"{self.source.signatures[number][0]}, {key}", dict(zip(there, map(bytes, contents), strict=True))

    def _stored(self, row: int, key: str, place: str, files: dict[str, bytes]) -> tuple[str, dict[str, bytes]] | None:
        """A sample with its images resized or unchanged; None if one cannot be read and the sample may be skipped."""
        made = {}
        for ending, content in files.items():
            stem, _, last = ending.rpartition(".")
            if last in IMAGE_TYPES:
                where = place if self.kind.name == "images" else f"{place}.{ending}"
                try:
                    if self.resize is None:
                        _prove(row, where, content)
                    else:
                        (picture,) = decode_images([row], [where], iter([content]), size_of(self.resize), PIXELS)
                        ending, content = f"{stem}.jpg".lstrip("."), jpeg(picture)
                except BadRow as fault:
                    self._left_out(fault)
                    return None
            made[ending] = content
        return key, made


def _prove(row: int, where: str, content: bytes) -> None:
    """Checks that an image that is stored unchanged can be decoded.

    Raises:
        BadRow: it cannot.
    """
    try:
        decode_image(content, PIXELS, LEAST)
    except ValueError as error:
        raise BadRow(row, where, str(error)) from None


def stamped(file: str, faults: BadRowPolicy) -> list:
    """The stamp of a file; of a missing one that may be skipped, ``[path, 0, reason]``."""
    try:
        return file_signature(file)
    except ConfigurationError as refused:
        if not faults.max_rows:
            raise
        return [file, 0, str(refused)]


def _in_one(column):
    """Stacks images of one size to one tensor; images of several sizes stay a list."""
    if (
        isinstance(column, list)
        and column
        and all(isinstance(each, torch.Tensor) and each.ndim == 3 for each in column)
    ):
        return torch.stack(column) if len({each.shape for each in column}) == 1 else column
    return column


def _size(column) -> int:
    if isinstance(column, torch.Tensor):
        return column.nbytes
    return sum(
        _size(value) if isinstance(value, torch.Tensor) else len(value) if isinstance(value, (bytes, str)) else 64
        for value in column
    )
