"""A conversion in parts, and the writers of the storage formats: how a part is written, and read back to verify it.

Each part is written under a temporary name (``.part``) and read back. Parts get their final names when all are written:
a file with a final name is complete, and no reader mistakes a part of the data for all of it.
"""

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.array_source import from_numpy_array
from hasten.data.formats.table_files import Feather, Parquet
from hasten.data.formats.tar_headers import members
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import CHUNK as RECORDS_CHUNK
from hasten.data.formats.tfrecord import Records, frame_records
from hasten.data.formats.webdataset import IMAGE_TYPES
from hasten.data.io.paths import mapped_bytes
from hasten.data.source import unbatch
from hasten.datatools.content_hash import ContentHash
from hasten.datatools.row_reader import CHUNK, RowReader

PART = ".part"
OWN_PART = re.compile(rf"\d+-of-\d+\.\w+\{PART}|.+\.npy\{PART}")  # the names that the writers give to their parts
ReportRows = Callable[[int], None]  # called with the number of rows written since the last call


@dataclass
class ShardPlan:
    """Rows that are written into a directory in several parts."""

    reader: RowReader  # reads the rows
    directory: Path  # where they are written
    parts: int  # number of parts
    # (number of rows, content hash) of each part that is written; skipped rows are not counted
    done: list[tuple[int, str]] = field(default_factory=list)

    def range(self, part: int) -> tuple[int, int]:
        """Returns (first row, end) of a part; the end is exclusive."""
        rows = self.reader.rows
        return rows * part // self.parts, rows * (part + 1) // self.parts

    def rows_before(self, part: int) -> int:
        """Returns the number of rows written in the parts before this one."""
        return sum(rows for rows, _ in self.done[:part])


def fsync(file: IO) -> None:
    """Flushes a file to the disk, so that its content survives a power failure."""
    file.flush()
    os.fsync(file.fileno())


@dataclass
class FilePerPart:
    """Writer of one file for each part; formats differ in two functions.

    ``write`` and ``read_back`` (of the part written last) return the hash of the content, not of the file. ``finish``
    gives all parts their final names and returns ``{"files": names}``.
    """

    plan: ShardPlan  # what is written, and where
    suffix: str  # ending of the file names
    # ``(path, reader, first row, end row, report) -> content hash``
    write_file: Callable[[Path, RowReader, int, int, ReportRows], ContentHash]
    read_file: Callable[[Path], ContentHash]  # ``(path) -> content hash``

    def write(self, part: int, report: ReportRows) -> ContentHash:
        path = self._path(part, PART)
        try:
            return self.write_file(path, self.plan.reader, *self.plan.range(part), report)
        except BaseException:
            path.unlink(missing_ok=True)  # an incomplete part is useless, and the disk may be full
            raise

    def read_back(self, part: int) -> ContentHash:
        return self.read_file(self._path(part, PART))

    def finish(self) -> dict:
        paths = [self._path(part) for part in range(self.plan.parts)]
        for part, path in enumerate(paths):
            temporary = self._path(part, PART)
            if temporary.exists():
                os.replace(temporary, path)
        return {"files": [path.name for path in paths]}

    def _path(self, part: int, ending: str = "") -> Path:
        return self.plan.directory / f"{part:05}-of-{self.plan.parts:05}{self.suffix}{ending}"


# ---- tables


def write_feather(path: Path, reader: RowReader, first: int, last: int, report: ReportRows) -> ContentHash:
    """Writes rows [``first``, ``last``) as Feather, uncompressed, so it can be mapped; returns the content hash."""
    import pyarrow as pa

    return _write_tables(path, reader.tables(first, last), lambda file, schema: pa.ipc.new_file(file, schema), report)


def write_parquet(path: Path, reader: RowReader, first: int, last: int, report: ReportRows) -> ContentHash:
    """Writes rows [``first``, ``last``) as Parquet: uncompressed, dictionaries for text only, which is the fastest to
    read. Returns the content hash.
    """
    from pyarrow.parquet import ParquetWriter

    def new_writer(file: IO, schema: Any) -> ParquetWriter:
        text = [name for name, kind in zip(schema.names, schema.types, strict=True) if str(kind) == "large_string"]
        columns: Any = text  # names of columns are documented, though annotated as bool
        return ParquetWriter(file, schema, compression="none", use_dictionary=columns)

    return _write_tables(path, map(_cast_for_parquet, reader.tables(first, last)), new_writer, report)


def _write_tables(path: Path, tables: Iterator, new_writer: Callable, report: ReportRows) -> ContentHash:
    digest, writer = ContentHash(), None
    with open(path, "wb") as file:
        try:
            for table in tables:
                writer = writer or new_writer(file, table.schema)
                writer.write_table(table)  # one row group or record batch each
                digest.add_table(table)
                report(len(table))
        finally:
            if writer is not None:
                writer.close()
        fsync(file)
    return digest


def _cast_for_parquet(table: Any) -> Any:
    """Returns the table with times in s cast to ms and 64-bit dates to 32-bit ones, as Parquet requires;
    ConfigurationError for intervals.
    """
    import pyarrow as pa

    def cast(kind: Any) -> Any:
        if pa.types.is_timestamp(kind) and kind.unit == "s":
            return pa.timestamp("ms", kind.tz)
        return {pa.time32("s"): pa.time32("ms"), pa.date64(): pa.date32()}.get(kind, kind)

    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        if pa.types.is_interval(kind):
            advice = "store the table as feather"
            raise ConfigurationError(f"column {name!r} is of type {kind}, which Parquet does not support; {advice}")
    schema = pa.schema([(name, cast(kind)) for name, kind in zip(table.schema.names, table.schema.types, strict=True)])
    return table if schema == table.schema else table.cast(schema)


def _table_reader(form: Any) -> Callable[[Path], ContentHash]:
    def read(path: Path) -> ContentHash:
        import pyarrow as pa

        digest, metadata = ContentHash(), form().metadata(str(path))
        for index in range(len(metadata.chunks)):
            chunk = form().chunk(str(path), index, metadata.schema.names)
            digest.add_table(pa.Table.from_batches([chunk]) if isinstance(chunk, pa.RecordBatch) else chunk)
        return digest

    return read


# ---- TFRecord


def write_tfrecord(path: Path, reader: RowReader, first: int, last: int, report: ReportRows) -> ContentHash:
    """Writes rows [``first``, ``last``) as a TFRecord file of ``tf.train.Example`` messages; returns their hash."""
    digest = ContentHash()
    with open(path, "wb") as file:
        for columns in reader.columns(first, last):
            messages = [encode_example(row) for row in unbatch(columns)]
            file.write(frame_records(messages))
            digest.add({"messages": messages}, len(messages))
            report(len(messages))
        fsync(file)
    return digest


def read_tfrecord(path: Path) -> ContentHash:
    """Reads a TFRecord file back; returns the hash of its messages."""
    digest, records = ContentHash(), Records([str(path)])
    for begin in range(0, len(records), RECORDS_CHUNK):
        rows = numpy.arange(begin, min(begin + RECORDS_CHUNK, len(records)))
        data, begins, ends = records.raw(rows)
        messages = [data[first:last].tobytes() for first, last in zip(begins.tolist(), ends.tolist(), strict=True)]
        digest.add({"messages": messages}, len(messages))
    return digest


# ---- tars


def write_tar(path: Path, reader: RowReader, first: int, last: int, report: ReportRows) -> ContentHash:
    """Writes rows [``first``, ``last``) as a tar file in WebDataset's layout; returns the hash of its content.
    ConfigurationError if a sample has the same key as the one before it, perhaps the last one of another tar file.
    """
    digest, previous_key = ContentHash(), None
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for samples in reader.samples(first, last):
                for key, files in samples:
                    if key == previous_key:
                        problem = f"two samples in succession have the key {key!r} and would become one"
                        raise ConfigurationError(f"{problem}; rename the members of one of them")
                    previous_key = key
                    for ending, content in files.items():
                        member = tarfile.TarInfo(f"{key}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
                        digest.add({"names": [member.name], "files": [content]}, 0)
                digest.rows += len(samples)
                report(len(samples))
        fsync(file)
    return digest


def read_tar(path: Path) -> ContentHash:
    """Returns the content hash of the members of a tar file."""
    digest, content, previous_key = ContentHash(), mapped_bytes(str(path)), None
    for name, begin, end in members(content):
        digest.add({"names": [name], "files": [content[begin:end]]}, 0)
        directory, slash, file = name.rpartition("/")
        key = f"{directory}{slash}{file.partition('.')[0]}"
        digest.rows += key != previous_key
        previous_key = key
    return digest


# ---- matrices


class NpyWriter:
    """Writer of ``.npy`` files, one for each column, whose first dimension is the row.

    Each part is appended to the parts before it. Files are written, not mapped (``numpy.lib.format.open_memmap``),
    because a full disk would end a process that writes to a mapping with SIGBUS. ``finish`` returns ``{"files": names,
    "columns": {column: file name}, "is_tuple": whether a row is a tuple}``.
    """

    def __init__(self, plan: ShardPlan):
        self.plan, self.rows = plan, 0  # rows of the part that was written last
        self.like = {name: column[:1] for name, column in plan.reader.like.items()}
        for name, column in self.like.items():
            self._check(name, column)
        self.names: dict[str, str] = {}
        for index, name in enumerate(self.like):
            file = re.sub(r"^[.-]|[^\w.-]", "_", name) or "unnamed"  # a file that begins with a dot is hidden
            while f"{file}.npy" in self.names.values():
                file = f"{file}-{index}"
            self.names[name] = f"{file}.npy"

    def write(self, part: int, report: ReportRows) -> ContentHash:
        digest = ContentHash()
        with self._open(part, "r+b" if part else "w+b") as files:
            for columns in self.plan.reader.columns(*self.plan.range(part)):
                for name, file in files.items():
                    self._check(name, columns[name])
                    file.write(columns[name].contiguous().reshape(-1).view(torch.uint8).numpy())
                rows = len(next(iter(columns.values())))
                digest.add(columns, rows)
                report(rows)
            for file in files.values():
                fsync(file)
        self.rows = digest.rows
        return digest

    def read_back(self, part: int) -> ContentHash:
        digest = ContentHash()
        with self._open(part, "r+b") as files:
            for name, file in files.items():
                like = self.like[name]
                step = max(1, CHUNK // max(1, like.nbytes))
                for begin in range(0, self.rows, step):
                    rows = min(step, self.rows - begin)
                    content = numpy.frombuffer(file.read(rows * like.nbytes), like.numpy().dtype)
                    digest.add({name: from_numpy_array(content).view(-1, *like.shape[1:])}, 0)
        digest.rows = self.rows
        return digest

    def finish(self) -> dict:
        rows = self.plan.rows_before(self.plan.parts)
        for name, file in self.names.items():
            if (unfinished := self.plan.directory / f"{file}{PART}").exists():
                with open(unfinished, "r+b") as content:
                    self._write_header(content, name, rows)
                    content.truncate(content.tell() + rows * self.like[name].nbytes)
                    fsync(content)
                os.replace(unfinished, self.plan.directory / file)
        return {
            "files": [*self.names.values()],
            "columns": self.names,
            "is_tuple": isinstance(self.plan.reader.first, tuple),
        }

    @contextmanager
    def _open(self, part: int, mode: str) -> Iterator[dict[str, BinaryIO]]:
        """Opens the files of all columns: {name: file}, each positioned where ``part`` begins."""
        before = self.plan.rows_before(part)
        with ExitStack() as open_files:
            files = {}
            for name, file in self.names.items():
                files[name] = open_files.enter_context(open(self.plan.directory / f"{file}{PART}", mode))
                self._write_header(files[name], name, self.plan.reader.rows)
                files[name].seek(before * self.like[name].nbytes, os.SEEK_CUR)
            yield files

    def _write_header(self, file: BinaryIO, name: str, rows: int) -> None:
        """Writes the ``.npy`` header for ``rows`` rows. Its length is fixed, so that it can be overwritten."""
        like = self.like[name]
        descr = numpy.lib.format.dtype_to_descr(like.numpy().dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (rows, *like.shape[1:])}
        numpy.lib.format.write_array_header_2_0(file, header)

    def _check(self, name: str, column: Any) -> None:
        like = self.like[name]
        advice = "resize images with --resize" if name == "images" or name.rpartition(".")[2] in IMAGE_TYPES else ""
        if not isinstance(column, torch.Tensor) or column.dtype == torch.bfloat16:
            kind = "bfloat16" if isinstance(column, torch.Tensor) else "text, bytes or rows of unequal shapes"
            rule = f"a matrix requires numbers of one shape; {advice or 'store the table as feather'}"
            raise ConfigurationError(f"column {name!r} holds {kind}, and {rule}")
        if column.dtype != like.dtype or column.shape[1:] != like.shape[1:]:
            later = f"{_describe(column)} later; {advice or 'a matrix requires rows of one shape and dtype'}"
            raise ConfigurationError(f"column {name!r} is {_describe(like)} in the first row and {later}")


def _describe(column: torch.Tensor) -> str:
    return f"{column.dtype} {tuple(column.shape[1:])}".removeprefix("torch.")


Writer = FilePerPart | NpyWriter
WRITERS: dict[str, Callable[[ShardPlan], Writer]] = {
    "parquet": lambda plan: FilePerPart(plan, ".parquet", write_parquet, _table_reader(Parquet)),
    "feather": lambda plan: FilePerPart(plan, ".feather", write_feather, _table_reader(Feather)),
    "tfrecord": lambda plan: FilePerPart(plan, ".tfrecord", write_tfrecord, read_tfrecord),
    "webdataset": lambda plan: FilePerPart(plan, ".tar", write_tar, read_tar),
    "rows": NpyWriter,
}
