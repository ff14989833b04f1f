"""Files that hold tables: how many rows they have in which runs, of what types, and one run of them.

A *run* is what is read in one go: a row group of Parquet (https://parquet.apache.org/docs/file-format), a record batch of
Feather (the Arrow file format, https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format), a whole file of CSV.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hasten.contract.errors import Refusal, one_line
from hasten.data.formats import settings
from hasten.data.formats.table_types import leads_elsewhere
from hasten.data.places.files import is_remote, opened

MOST_ROWS = 1 << 48  # of a file
NEVER = ("\n", "\r", '"', "\0")  # what cannot divide the fields of a CSV file


@dataclass(frozen=True)
class Manifest:
    """What one file holds: its Arrow schema, the rows of each run, and its bytes once unpacked."""

    schema: Any
    runs: list[int]
    bytes: int


class Format(Protocol):
    """How one format is read. ``run`` is called from several threads at once."""

    name: str  # of the format
    run_name: str  # of a run, where a file can have several
    suffixes: tuple[str, ...]
    settings: dict  # what its rows depend on, as plain JSON

    def manifest(self, path: str) -> Manifest: ...

    def run(self, path: str, number: int, columns: list[str]) -> Any: ...

    def let_go(self) -> None:
        """The rows have been read: what is kept only to read them faster may go."""


class Parquet:
    name, run_name, suffixes, settings = "Parquet", "row group", (".parquet", ".parq", ".pq"), {}

    def __init__(self):
        self._kept = _Kept(self._open)

    def manifest(self, path: str) -> Manifest:
        with opened_arrow(path) as file, _refusing(path, self.name):
            from pyarrow.parquet import read_metadata

            about = read_metadata(file)
            groups = [about.row_group(number) for number in range(about.num_row_groups)]
            return _manifest(about.schema.to_arrow_schema(), [g.num_rows for g in groups], sum(g.total_byte_size for g in groups))

    def run(self, path: str, number: int, columns: list[str]):
        return self._kept[path,].read_row_group(number, columns)

    def let_go(self) -> None:
        self._kept = _Kept(self._open)

    def _open(self, path: str):
        from pyarrow.parquet import ParquetFile

        return ParquetFile(opened_arrow(path), page_checksum_verification=True)  # costs nothing where the pages have none


class Feather:
    name, run_name, suffixes, settings = "Feather", "record batch", (".feather", ".arrow", ".ipc"), {}

    def __init__(self):
        self._kept = _Kept(self._open)

    def manifest(self, path: str) -> Manifest:
        from pyarrow.ipc import MessageReader

        with opened_arrow(path, mapped=True) as file, _refusing(path, self.name):
            schema = self._open(path).schema
            file.seek(8)  # what lies between the mark at the start and the footer is a stream of messages
            messages = MessageReader.open_stream(file)
            runs = [_rows_in(message.metadata) for message in messages if message.type == "record batch"]
            return _manifest(schema, runs, file.size())

    def run(self, path: str, number: int, columns: list[str]):
        return self._kept[path, *columns].get_batch(number)

    def let_go(self) -> None:
        self._kept = _Kept(self._open)

    def _open(self, path: str, *columns: str):
        """Only the chosen columns are unpacked; not mapped into memory: who cuts off a file that is kills the process."""
        from pyarrow.ipc import IpcReadOptions, open_file

        file = opened_arrow(path)
        chosen = [open_file(file).schema.get_field_index(name) for name in columns]
        return open_file(file, options=IpcReadOptions(included_fields=chosen))


class Csv:
    """Parsed once, whole, when its rows are counted; kept until the rows are asked for."""

    name, run_name, suffixes = "CSV", "", (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")

    def __init__(self, delimiter: str | None = None, header: Iterable[str] | None = None):
        said = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii() and delimiter not in NEVER
        if delimiter is not None and not said:
            raise Refusal(f"csv(delimiter=) is one character that divides fields, as in delimiter=';', not {delimiter!r:.80}")
        header = None if header is None else settings.names("csv(header=)", header)
        self.settings, self._parsed = {"delimiter": delimiter, "header": header}, {}

    def manifest(self, path: str) -> Manifest:
        table = self._parsed[path] = self._parse(path)
        return Manifest(table.schema, [len(table)], table.nbytes)

    def run(self, path: str, number: int, columns: list[str]):
        if path not in self._parsed:
            self._parsed[path] = self._parse(path)
        return self._parsed[path].select(columns)

    def let_go(self) -> None:
        self._parsed = {}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_parsed": {}}

    def _parse(self, path: str):
        import pyarrow as pa
        from pyarrow.csv import ParseOptions, ReadOptions, read_csv

        delimiter = self.settings["delimiter"] or ("\t" if path.removesuffix(".gz").endswith(".tsv") else ",")
        reading, parsing = {"column_names": self.settings["header"]}, {"delimiter": delimiter}
        with _refusing(path, self.name, "has each line all its fields, are the delimiter and the header right, is it UTF-8?"):
            # types are guessed, and rows told apart, block by block: where that misleads, all is one block, and lines may end in quotes
            for block, across_lines in ((1 << 20, False), (1 << 30, True)):
                file = opened_arrow(path)
                with pa.CompressedInputStream(file, "gzip") if path.endswith(".gz") else file as file:
                    try:
                        options = ReadOptions(block_size=block, **reading), ParseOptions(newlines_in_values=across_lines, **parsing)
                        table = read_csv(file, *options)
                        _ = table.schema.names  # here it is told that they are no text
                        return table
                    except pa.ArrowInvalid as error:
                        misled = error
            raise misled


def check(run, rows: int) -> None:
    """Makes sure that a decoded run has the rows that the file told of, and that no text or list leads out of its column.

    Raises:
        ValueError: it is damaged.
    """
    if run.num_rows != rows:
        raise ValueError(f"it has {run.num_rows} rows, and the file tells of {rows}")
    run.validate()
    for kind, column in zip(run.schema.types, run.columns, strict=True):
        if leads_elsewhere(kind):
            column.validate(full=True)


def opened_arrow(path: str, mapped: bool = False):
    """A file for Arrow to read; ``mapped`` into memory where it is local."""
    import pyarrow as pa

    if is_remote(path):
        return pa.PythonFile(opened(path), "r")
    try:
        return pa.memory_map(path) if mapped else pa.OSFile(path)
    except OSError as error:
        raise Refusal(f"cannot read {path}: {one_line(error)}") from None


def _manifest(schema, runs: list[int], size: int) -> Manifest:
    """What a file tells of itself, if it can be true.

    Raises:
        ValueError: it cannot.
    """
    _ = schema.names  # here it is told that they are no text
    if min(runs, default=0) < 0 or sum(runs) > MOST_ROWS:
        raise ValueError("it tells of numbers of rows that cannot be")
    return Manifest(schema, runs, size)


@contextmanager
def _refusing(path: str, name: str, hint: str = "was writing or copying it broken off?"):
    """Arrow's complaints about a whole file as one clear line."""
    import pyarrow as pa

    try:
        yield
    except Refusal:
        raise
    except (pa.ArrowException, OSError, MemoryError, ValueError, struct.error) as error:
        raise Refusal(f"{path} is no whole {name} file: {one_line(error)}; {hint}") from None


def _rows_in(message) -> int:
    """The length in the flat buffer of a record batch's message (Message.header.length of Arrow's Message.fbs)."""

    def number(form: str, place: int) -> int:
        return struct.unpack_from(form, message, place)[0]

    def field(table: int, index: int) -> int:
        """Where a field of a table lies; 0 where it is left out, as defaults are."""
        directory = table - number("<i", table)
        offset = number("<H", directory + 4 + 2 * index) if 4 + 2 * index < number("<H", directory) else 0
        return offset and table + offset

    header = field(number("<I", 0), 2)
    length = field(header + number("<I", header), 0)
    return number("<q", length) if length else 0


class _Kept(threading.local):
    """What a thread opened last, still open: runs are read in their order."""

    def __init__(self, open_file: Callable):
        self._open, self._what, self._file = open_file, None, None

    def __getitem__(self, what: tuple[str, ...]):
        if (os.getpid(), what) != self._what:
            self._file, self._what = self._open(*what), (os.getpid(), what)
        return self._file

    def __reduce__(self):
        return type(self), (self._open,)  # open files do not travel
