"""Writers of the storage formats: how a part of the rows is written, and read back to verify it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
from hasten.datatools.shard_plan import PART, ShardPlan, Storage, Tell, fsync


@dataclass
class Files:
    """A storage format with one file for each part; formats differ in two functions.

    Attributes:
        plan: what is written, and where.
        suffix: of the files.
        write_file: ``(path, reading, first row, end row, tell) -> content hash``.
        read_file: ``(path) -> content hash``.
    """

    plan: ShardPlan
    suffix: str
    write_file: Callable[[Path, RowReader, int, int, Tell], ContentHash]
    read_file: Callable[[Path], ContentHash]

    def write(self, number: int, tell: Tell) -> ContentHash:
        path = self._path(number, PART)
        try:
            return self.write_file(path, self.plan.reading, *self.plan.range(number), tell)
        except BaseException:
            path.unlink(missing_ok=True)  # an incomplete part is useless, and the disk may be full
            raise

    def read_back(self, number: int) -> ContentHash:
        return self.read_file(self._path(number, PART))

    def finish(self) -> dict:
        paths = [self._path(number) for number in range(self.plan.parts)]
        for number, path in enumerate(paths):
            if (unnamed := self._path(number, PART)).exists():
                os.replace(unnamed, path)
        return {"files": [path.name for path in paths]}

    def _path(self, number: int, ending: str = "") -> Path:
        return self.plan.folder / f"{number:05}-of-{self.plan.parts:05}{self.suffix}{ending}"


# ---- tables


def write_feather(path: Path, reading: RowReader, first: int, last: int, tell: Tell) -> ContentHash:
    """Writes a Feather file without compression, so that readers can map it into memory."""
    import pyarrow as pa

    return _write_tables(path, reading.tables(first, last), lambda file, schema: pa.ipc.new_file(file, schema), tell)


def write_parquet(path: Path, reading: RowReader, first: int, last: int, tell: Tell) -> ContentHash:
    """Writes a Parquet file without compression and with dictionaries for text only, which is fastest to read."""
    from pyarrow.parquet import ParquetWriter

    def writer(file, schema):
        text = [name for name, kind in zip(schema.names, schema.types, strict=True) if str(kind) == "large_string"]
        return ParquetWriter(file, schema, compression="none", use_dictionary=text)

    return _write_tables(path, map(_as_parquet_holds_it, reading.tables(first, last)), writer, tell)


def _write_tables(path: Path, tables: Iterator, new: Callable, tell: Tell) -> ContentHash:
    digest, writer = ContentHash(), None
    with open(path, "wb") as file:
        try:
            for table in tables:
                writer = writer or new(file, table.schema)
                writer.write_table(table)  # one row group or record batch each
                digest.add_table(table)
                tell(len(table))
        finally:
            if writer is not None:
                writer.close()
        fsync(file)
    return digest


def _as_parquet_holds_it(table):
    """Casts times in seconds to milliseconds, and 64-bit dates to 32-bit ones: Parquet has no others."""
    import pyarrow as pa

    def held(kind):
        if pa.types.is_timestamp(kind) and kind.unit == "s":
            return pa.timestamp("ms", kind.tz)
        return {pa.time32("s"): pa.time32("ms"), pa.date64(): pa.date32()}.get(kind, kind)

    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        if pa.types.is_interval(kind):
            raise ConfigurationError(
                f"column {name!r} is of type {kind}, which Parquet has not; store the table as feather"
            )
    schema = pa.schema([(name, held(kind)) for name, kind in zip(table.schema.names, table.schema.types, strict=True)])
    return table if schema == table.schema else table.cast(schema)


def _reads_tables(form) -> Callable[[Path], ContentHash]:
    def read(path: Path) -> ContentHash:
        import pyarrow as pa

        digest, manifest = ContentHash(), form().manifest(str(path))
        for number in range(len(manifest.chunks)):
            run = form().chunk(str(path), number, manifest.schema.names)
            digest.add_table(pa.Table.from_batches([run]) if isinstance(run, pa.RecordBatch) else run)
        return digest

    return read


# ---- records


def write_records(path: Path, reading: RowReader, first: int, last: int, tell: Tell) -> ContentHash:
    digest = ContentHash()
    with open(path, "wb") as file:
        for columns in reading.columns(first, last):
            messages = [encode_example(row) for row in unbatch(columns)]
            file.write(frame_records(messages))
            digest.add({"messages": messages}, len(messages))
            tell(len(messages))
        fsync(file)
    return digest


def read_records(path: Path) -> ContentHash:
    digest, records = ContentHash(), Records([str(path)])
    for begin in range(0, len(records), MAX_SKIPPED):
        rows = numpy.arange(begin, min(begin + MAX_SKIPPED, len(records)))
        data, begins, ends = records.data_of(rows)
        messages = [data[first:last].tobytes() for first, last in zip(begins.tolist(), ends.tolist(), strict=True)]
        digest.add({"messages": messages}, len(messages))
    return digest


# ---- tars


def write_tar(path: Path, reading: RowReader, first: int, last: int, tell: Tell) -> ContentHash:
    digest = ContentHash()
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for samples in reading.samples(first, last):
                for key, files in samples:
                    for ending, content in files.items():
                        member = tarfile.TarInfo(f"{key}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
                        digest.add({"names": [member.name], "files": [content]}, 0)
                digest.rows += len(samples)
                tell(len(samples))
        fsync(file)
    return digest


def read_tar(path: Path) -> ContentHash:
    digest, content, before = ContentHash(), mapped_bytes(str(path)), None
    for name, begin, end in members(content):
        digest.add({"names": [name], "files": [content[begin:end]]}, 0)
        folder, slash, file = name.rpartition("/")
        key = f"{folder}{slash}{file.partition('.')[0]}"
        digest.rows += key != before
        before = key
    return digest


STORAGES: dict[str, Callable[[ShardPlan], Storage]] = {
    "parquet": lambda plan: Files(plan, ".parquet", write_parquet, _reads_tables(Parquet)),
    "feather": lambda plan: Files(plan, ".feather", write_feather, _reads_tables(Feather)),
    "tfrecord": lambda plan: Files(plan, ".tfrecord", write_records, read_records),
    "shards": lambda plan: Files(plan, ".tar", write_tar, read_tar),
    "rows": NpyWriter,
}
