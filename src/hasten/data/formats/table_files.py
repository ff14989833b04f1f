"""Files that hold tables: how many rows they have in which runs, of what types, and one run of them.

A *run* is what is read in one go: a row group of Parquet (https://parquet.apache.org/docs/file-format), a record batch of
Feather (the Arrow file format, https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format), the good lines of a CSV file that
follow one another, or a bad one.
"""

from __future__ import annotations

import codecs
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import psutil

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.data.formats import argument_checks
from hasten.data.formats.table_types import leads_elsewhere
from hasten.data.io.paths import BLAMING, FileMissingError, is_remote, open_file

MOST_ROWS = 1 << 48  # of a file
MOST_BAD = 100_000  # lines of a CSV file: with more it is rather read wrongly, and each is handed over and kept
MISREAD = "are the delimiter and the header right?"
NEVER = ("\n", "\r", '"', "\0")  # what cannot divide the fields of a CSV file


@dataclass(frozen=True)
class Manifest:
    """What one file holds: its Arrow schema, the rows of each run, and its bytes once unpacked.

    Attributes:
        bad: runs that cannot be read, as far as it is known before they are, and why.
    """

    schema: Any
    runs: list[int]
    bytes: int
    bad: dict[int, str] = field(default_factory=dict)


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
            return _manifest(
                about.schema.to_arrow_schema(), [g.num_rows for g in groups], sum(g.total_byte_size for g in groups)
            )

    def run(self, path: str, number: int, columns: list[str]):
        return self._kept[path,].read_row_group(number, columns)

    def let_go(self) -> None:
        self._kept = _Kept(self._open)

    def _open(self, path: str):
        from pyarrow.parquet import ParquetFile

        return ParquetFile(
            opened_arrow(path), page_checksum_verification=True
        )  # costs nothing where the pages have none


class Feather:
    name, run_name, suffixes, settings = "Feather", "record batch", (".feather", ".arrow", ".ipc"), {}

    def __init__(self):
        self._kept = _Kept(self._open)

    def manifest(self, path: str) -> Manifest:
        import pyarrow as pa
        from pyarrow.ipc import MessageReader, read_record_batch

        with opened_arrow(path, mapped=True) as file, _refusing(path, self.name):
            schema = self._open(path).schema
            file.seek(8)  # the bytes between the magic string and the footer are a stream of messages
            messages = MessageReader.open_stream(file)
            without_columns = pa.schema([])  # a batch read without columns still has its number of rows
            runs = [
                read_record_batch(message, without_columns).num_rows
                for message in messages
                if message.type == "record batch"
            ]
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
            raise ConfigurationError(
                f"csv(delimiter=) is one character that divides fields, as in delimiter=';', not {delimiter!r:.80}"
            )
        header = None if header is None else argument_checks.names("csv(header=)", header)
        self.settings, self._parsed = {"delimiter": delimiter, "header": header}, {}

    def manifest(self, path: str) -> Manifest:
        lines = self._parsed[path] = self._parse(path)
        runs = list(pairwise(lines.chunk_offsets))
        bad = {number: lines.bad[first] for number, (first, _) in enumerate(runs) if first in lines.bad}
        return Manifest(lines.good.schema, [last - first for first, last in runs], lines.good.nbytes, bad)

    def run(self, path: str, number: int, columns: list[str]):
        if path not in self._parsed:
            self._parsed[path] = self._parse(path)
        return self._parsed[path].run(number, columns)

    def let_go(self) -> None:
        self._parsed = {}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_parsed": {}}

    def _parse(self, path: str) -> _Lines:
        import pyarrow as pa

        odd = []

        def skip(row) -> str:
            odd.append(row)
            return "skip" if len(odd) <= MOST_BAD else "error"

        # Arrow guesses types and finds the ends of rows block by block. Where that fails, the whole file is one block in which quoted
        # fields may span lines. Only a single thread knows the numbers of the rows that it skips.
        blocks, whole = {"block_size": 1 << 20}, {"block_size": 1 << 30}
        with _refusing(
            path, self.name, "has each line all its fields, are the delimiter and the header right, is it UTF-8?"
        ):
            for reading, parsing in (blocks, {}), (whole, {"newlines_in_values": True}):
                with suppress(pa.ArrowInvalid):
                    return _Lines(self._table(path, reading, parsing), {})
            _check_utf8(path)
            try:
                table = self._table(
                    path, whole | {"use_threads": False}, {"newlines_in_values": True, "invalid_row_handler": skip}
                )
            except pa.ArrowInvalid:
                if len(odd) > MOST_BAD:
                    raise ConfigurationError(
                        f"{path} has more than {MOST_BAD:,} lines with too few fields or too many; {MISREAD}"
                    ) from None
                raise
            return _Lines(table, self._bad_rows(path, odd, len(table)))

    def _table(self, path: str, reading: dict, parsing: dict):
        from pyarrow.csv import ParseOptions, ReadOptions, read_csv

        delimiter = self.settings["delimiter"] or ("\t" if path.removesuffix(".gz").endswith(".tsv") else ",")
        options = (
            ReadOptions(column_names=self.settings["header"], **reading),
            ParseOptions(delimiter=delimiter, **parsing),
        )
        with _unpacked(path) as file:
            table = read_csv(file, *options)
            _ = table.schema.names  # raises here if they are not UTF-8
            return table

    def _bad_rows(self, path: str, odd: list, good: int) -> dict[int, str]:
        """Returns {position among all rows: error} of the rows that Arrow skipped.

        Raises:
            ValueError: The quote of a skipped row has swallowed other rows.
            Refusal: At least as many rows are bad as good, so the delimiter or the header is wrong.
        """
        first, bad = 1 if self.settings["header"] else 2, {}  # Arrow's number of the first row
        for row in odd:
            position = row.number - first
            where = f"row {position} of the file, {row.text[:60]!r},"
            if row.text.count('"') % 2 and (
                "\n" in row.text or "\r" in row.text
            ):  # within one line, a quote may stand for inches
                raise ValueError(f"{where} opens a quote that is never closed")
            bad[position] = (
                f"{where} has {row.actual_columns} field{'s' * (row.actual_columns != 1)}, not {row.expected_columns}"
            )
        if bad and len(bad) >= good:
            raise ConfigurationError(
                f"{path} has no more good lines than bad ones: {next(iter(bad.values()))}; {MISREAD}"
            )
        return bad


@dataclass(frozen=True)
class _Lines:
    """The rows of a CSV file: a table of the good ones, and the errors of the bad ones by their positions among all rows."""

    good: Any
    bad: dict[int, str]

    @cached_property
    def positions(self) -> list[int]:
        """The positions of the bad rows, ascending."""
        return sorted(self.bad)

    @cached_property
    def chunk_offsets(self) -> list[int]:
        """The first row of every run, and the end. A bad row is a run, and so are the good rows between two bad ones."""
        rows = len(self.good) + len(self.bad)
        return [
            0,
            *sorted({edge for position in self.positions for edge in (position, position + 1)} - {0, rows}),
            rows,
        ]

    def run(self, number: int, columns: list[str]):
        first, last = self.chunk_offsets[number : number + 2]
        return self.good.select(columns).slice(first - bisect_left(self.positions, first), last - first)


def _unpacked(path: str):
    """Opens a CSV file for Arrow; a gzipped one is decompressed."""
    import pyarrow as pa

    file = opened_arrow(path)
    return pa.CompressedInputStream(file, "gzip") if path.endswith(".gz") else file


def _check_utf8(path: str) -> None:
    """Raises ValueError if a file is not UTF-8: about a skipped row that is not, Arrow complains on standard error only."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _unpacked(path) as file:
        while block := file.read(1 << 20):
            decoder.decode(block)
    decoder.decode(b"", final=True)


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
    """A file for Arrow to read; ``mapped`` into memory where it is local.

    Raises:
        Refusal: it is not there, or may not be read. Failure: this machine cannot open it.
    """
    import pyarrow as pa

    if is_remote(path):
        return pa.PythonFile(open_file(path), "r")
    try:
        return pa.memory_map(path) if mapped else pa.OSFile(path)
    except OSError as error:
        raise (FileMissingError if _blames_file(error) else RunError)(
            f"cannot read {path}: {format_error(error)}"
        ) from None


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
    """Arrow's complaints about a whole file as one clear line; what the machine lacks is no fault of the file."""
    import pyarrow as pa

    try:
        yield
    except ConfigurationError:
        raise
    except MemoryError as error:
        if not asks_too_much(error):
            raise
        raise FileMissingError(f"{path} is no whole {name} file: {format_error(error)}; {hint}") from None
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        if not _blames_file(error):
            raise RunError(f"cannot read {path}: {format_error(error)}") from None
        raise FileMissingError(f"{path} is no whole {name} file: {format_error(error)}; {hint}") from None


def asks_too_much(error: MemoryError) -> bool:
    """Whether more was asked for than this machine has in all: then numbers in the file are broken, and it is not the machine that is small."""
    asked = re.search(r"size (\d+)", str(error))
    return asked is not None and int(asked[1]) > psutil.virtual_memory().total


def _blames_file(error: Exception) -> bool:
    """Whether it says something of the file: what Arrow, or an unpacker, says of its own accord has no number of the system's."""
    number = getattr(error, "errno", None)
    return number is None or number in BLAMING


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
