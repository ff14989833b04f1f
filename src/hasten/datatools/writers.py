"""Writers of the storage formats: how a part of the rows is written, and read back to verify it."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy

from hasten.core.errors import ConfigurationError
from hasten.data.formats.table_files import Feather, Parquet
from hasten.data.formats.tar_headers import members
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import MAX_SKIPPED, Records, frame_records
from hasten.data.io.paths import mapped_bytes
from hasten.data.source import unbatch
from hasten.datatools.content_hash import ContentHash
from hasten.datatools.npy_writer import NpyWriter
from hasten.datatools.row_reader import RowReader
from hasten.datatools.shard_plan import PART, ReportRows, ShardPlan, Writer, fsync


@dataclass
class FilePerPart:
    """Writer of one file for each part; formats differ in two functions."""

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
    """Writes rows [``first``, ``last``) as Feather, uncompressed so that readers can map it into memory."""
    import pyarrow as pa

    return _write_tables(path, reader.tables(first, last), lambda file, schema: pa.ipc.new_file(file, schema), report)


def write_parquet(path: Path, reader: RowReader, first: int, last: int, report: ReportRows) -> ContentHash:
    """Writes rows [``first``, ``last``) as Parquet: uncompressed, dictionaries for text only (fastest to read)."""
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
    """Casts times in s to ms and 64-bit dates to 32-bit ones, as Parquet requires; ConfigurationError for intervals."""
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
    for begin in range(0, len(records), MAX_SKIPPED):
        rows = numpy.arange(begin, min(begin + MAX_SKIPPED, len(records)))
        data, begins, ends = records.data_of(rows)
        messages = [data[first:last].tobytes() for first, last in zip(begins.tolist(), ends.tolist(), strict=True)]
        digest.add({"messages": messages}, len(messages))
    return digest


# ---- tars


def write_tar(path: Path, reader: RowReader, first: int, last: int, report: ReportRows) -> ContentHash:
    """Writes rows [``first``, ``last``) as a tar file in WebDataset's layout; returns the hash of its content."""
    digest = ContentHash()
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for samples in reader.samples(first, last):
                for key, files in samples:
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


WRITERS: dict[str, Callable[[ShardPlan], Writer]] = {
    "parquet": lambda plan: FilePerPart(plan, ".parquet", write_parquet, _table_reader(Parquet)),
    "feather": lambda plan: FilePerPart(plan, ".feather", write_feather, _table_reader(Feather)),
    "tfrecord": lambda plan: FilePerPart(plan, ".tfrecord", write_tfrecord, read_tfrecord),
    "webdataset": lambda plan: FilePerPart(plan, ".tar", write_tar, read_tar),
    "rows": NpyWriter,
}
