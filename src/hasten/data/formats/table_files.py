"""Files that hold tables: their schema, the number of rows of each chunk, and the decoded rows of one chunk.

A *chunk* is what is read at once: a row group of Parquet (https://parquet.apache.org/docs/file-format), a record batch
of Feather (https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format), or in CSV one bad line or the good
lines between two bad ones.
"""

from __future__ import annotations

import codecs
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.data.io.paths import FILE_ERRNOS, FileMissingError, is_remote, open_file
from hasten.data.validation import check_names
from hasten.engine.resources import free_memory

MEMORY_FRACTION = 1 / 4  # of the free memory, for one table
MAX_ROWS = 1 << 48  # of a file
MAX_BAD_LINES = 100_000  # of a CSV file; with more the file is read wrongly, and every bad line takes memory
STREAM = b"\xff\xff\xff\xff"  # begins an Arrow stream, as Hugging Face's datasets store them
MISREAD = "are the delimiter and the header right?"
NO_DELIMITERS = ("\n", "\r", '"', "\0")  # characters that cannot separate the fields of a CSV file


@dataclass(frozen=True)
class FileMetadata:
    """One file of a table: schema, rows of each chunk, decompressed size, chunks that cannot be read."""

    schema: Any  # Arrow schema; None for a file that cannot be opened
    chunks: list[int]  # number of rows of each chunk
    bytes: int  # size after decompression
    # index of a chunk -> why it cannot be read, as far as known before reading
    bad: dict[int, str] = field(default_factory=dict)


class _ArrowFormat:
    """A format whose open files are held between two chunks. Several threads may call ``chunk`` at once."""

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        """Closes files and frees parsed rows that are kept to make the next ``chunk`` faster."""
        self._open_files = _OpenFile(self._open)

    def _open(self, path: str, *columns: str) -> Any:
        raise NotImplementedError


class Parquet(_ArrowFormat):
    """Reads Parquet files; a chunk is a row group."""

    name, chunk_name, suffixes, settings = "Parquet", "row group", (".parquet", ".parq", ".pq"), {}

    def metadata(self, path: str) -> FileMetadata:
        with opened_arrow(path) as file, _translate_errors(path, self.name):
            from pyarrow.parquet import read_metadata

            metadata = read_metadata(file)
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            return _checked_metadata(metadata.schema.to_arrow_schema(), [group.num_rows for group in groups], size)

    def chunk(self, path: str, index: int, columns: list[str]) -> Any:
        return self._open_files[path,].read_row_group(index, columns)

    def _open(self, path: str, *columns: str) -> Any:
        from pyarrow.parquet import ParquetFile

        return ParquetFile(opened_arrow(path), page_checksum_verification=True)  # free for pages without checksums


class Feather(_ArrowFormat):
    """Reads Feather (Arrow IPC) files; a chunk is a record batch."""

    name, chunk_name, suffixes, settings = "Feather", "record batch", (".feather", ".arrow", ".ipc"), {}

    def metadata(self, path: str) -> FileMetadata:
        import pyarrow as pa
        from pyarrow.ipc import MessageReader, read_record_batch

        with opened_arrow(path, mapped=True) as file, _translate_errors(path, self.name):
            if file.read(4) == STREAM:
                advice = "store it as Parquet (dataset.to_parquet) or with pyarrow.ipc.new_file"
                raise FileMissingError(f"{path} is an Arrow stream, which cannot be read by row number; {advice}")
            schema = self._open(path).schema
            file.seek(8)  # between the magic string and the footer the file is a stream of messages
            batches = (message for message in MessageReader.open_stream(file) if message.type == "record batch")
            without_columns = pa.schema([])  # a batch that is read without columns still has its number of rows
            rows = [read_record_batch(batch, without_columns).num_rows for batch in batches]
            return _checked_metadata(schema, rows, file.size())

    def chunk(self, path: str, index: int, columns: list[str]) -> Any:
        return self._open_files[path, *columns].get_batch(index)

    def _open(self, path: str, *columns: str) -> Any:
        """Opens a file so that only the given columns are decompressed. The file is not memory-mapped, because a
        process that truncates a mapped file would kill this one.
        """
        from pyarrow.ipc import IpcReadOptions, open_file

        file = opened_arrow(path)
        indices = [open_file(file).schema.get_field_index(name) for name in columns]
        return open_file(file, options=IpcReadOptions(included_fields=indices))


class Csv:
    """CSV files. A file is parsed completely when its rows are counted, and held until ``release``."""

    name, chunk_name, suffixes = "CSV", "", (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")

    def __init__(self, delimiter: str | None = None, header: Iterable[str] | None = None) -> None:
        is_character = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
        if delimiter is not None and (not is_character or delimiter in NO_DELIMITERS):
            what = "csv(delimiter=) must be one character that separates fields, as in delimiter=';'"
            raise ConfigurationError(f"{what}, not {delimiter!r:.80}")
        names = None if header is None else check_names("csv(header=)", header)
        self.settings: dict[str, Any] = {"delimiter": delimiter, "header": names}
        self._parsed: dict[str, _ParsedCsv] = {}

    def metadata(self, path: str) -> FileMetadata:
        parsed = self._parsed[path] = self._parse(path)
        chunks = list(pairwise(parsed.chunk_offsets))
        bad = {index: parsed.bad[first] for index, (first, _) in enumerate(chunks) if first in parsed.bad}
        return FileMetadata(parsed.good.schema, [last - first for first, last in chunks], parsed.good.nbytes, bad)

    def chunk(self, path: str, index: int, columns: list[str]) -> Any:
        if path not in self._parsed:
            self._parsed[path] = self._parse(path)
        return self._parsed[path].chunk(index, columns)

    def release(self) -> None:
        self._parsed = {}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_parsed": {}}

    def _parse(self, path: str) -> _ParsedCsv:
        import pyarrow as pa

        _check_fits(path)
        skipped = []

        def skip(row: Any) -> str:
            skipped.append(row)
            return "skip" if len(skipped) <= MAX_BAD_LINES else "error"

        # Arrow guesses types and finds the ends of rows block by block. If that fails, the whole file is one block in
        # which quoted fields may span lines. Only a single thread knows the numbers of the rows that it skips.
        in_blocks, in_one_block = {"block_size": 1 << 20}, {"block_size": 1 << 30}
        hint = "does each line have all its fields, are the delimiter and the header right, is it UTF-8?"
        with _translate_errors(path, self.name, hint):
            for reading, parsing in (in_blocks, {}), (in_one_block, {"newlines_in_values": True}):
                with suppress(pa.ArrowInvalid):
                    return _ParsedCsv(self._read(path, reading, parsing), {})
            _check_utf8(path)
            parsing = {"newlines_in_values": True, "invalid_row_handler": skip}
            try:
                table = self._read(path, in_one_block | {"use_threads": False}, parsing)
            except pa.ArrowInvalid:
                if len(skipped) <= MAX_BAD_LINES:
                    raise
                bad = "too few fields or too many"
                raise ConfigurationError(f"{path} has over {MAX_BAD_LINES:,} lines with {bad}; {MISREAD}") from None
            return _ParsedCsv(table, self._bad_rows(path, skipped, len(table)))

    def _read(self, path: str, reading: dict, parsing: dict) -> Any:
        from pyarrow.csv import ParseOptions, ReadOptions, read_csv

        delimiter = self.settings["delimiter"] or ("\t" if path.lower().removesuffix(".gz").endswith(".tsv") else ",")
        read_options = ReadOptions(column_names=self.settings["header"], **reading)
        with _decompressed(path) as file:
            table = read_csv(file, read_options, ParseOptions(delimiter=delimiter, **parsing))
            _ = table.schema.names  # raises here if they are not UTF-8
            if damaged := next((field.name for field in table.schema if str(field.type) == "binary"), None):
                raise ValueError(f"column {damaged!r} is not UTF-8")  # Arrow takes such text for bytes
            return table

    def _bad_rows(self, path: str, skipped: list, good: int) -> dict[int, str]:
        """Returns {index of the row in the file: error} of the rows with too few or too many fields.

        ValueError if the quote of a skipped row has swallowed other rows. ConfigurationError if at least as many rows
        are bad as good, so that the delimiter or the header is wrong.
        """
        first, bad = 1 if self.settings["header"] else 2, {}  # Arrow's number of the first row
        for row in skipped:
            position = row.number - first
            where = f"row {position} of the file, {row.text[:60]!r},"
            spans_lines = "\n" in row.text or "\r" in row.text  # within one line a quote may mean inches
            if row.text.count('"') % 2 and spans_lines:
                raise ValueError(f"{where} opens a quote that is never closed")
            fields = f"{row.actual_columns} field{'s' * (row.actual_columns != 1)}"
            bad[position] = f"{where} has {fields}, not {row.expected_columns}"
        if bad and len(bad) >= good:
            example = next(iter(bad.values()))
            raise ConfigurationError(f"{path} has no more good lines than bad ones: {example}; {MISREAD}")
        return bad


Format = Parquet | Feather | Csv
"""``name``: of the format; ``chunk_name``: of a chunk, if a file can have several; ``suffixes``: of the files;
``settings``: JSON values on which the rows depend besides the file."""


class _ParsedCsv:
    """The good rows of a CSV file as a table, and the errors of the bad ones by their positions among all rows."""

    def __init__(self, good: Any, bad: dict[int, str]) -> None:
        self.good, self.bad, self.positions = good, bad, sorted(bad)
        rows = len(good) + len(bad)
        inner = {offset for position in bad for offset in (position, position + 1)} - {0, rows}
        # first row of every chunk, and the end; each bad row is a chunk, and so are the good rows between two
        self.chunk_offsets = [0, *sorted(inner), rows]

    def chunk(self, index: int, columns: list[str]) -> Any:
        first, last = self.chunk_offsets[index : index + 2]
        return self.good.select(columns).slice(first - bisect_left(self.positions, first), last - first)


def _check_fits(path: str) -> None:
    """Raises ConfigurationError for a local CSV file that is larger than the memory that is free."""
    size, free = 0 if is_remote(path) or not os.path.isfile(path) else os.path.getsize(path), free_memory()
    if size > free:
        sizes = f"{size / 1e9:.3g} GB of CSV are parsed in memory, and {free / 1e9:.3g} GB are free"
        raise ConfigurationError(f"{path}: {sizes}; split the file, or store it as Parquet with pyarrow.csv.open_csv")


def _decompressed(path: str) -> Any:
    """Opens a CSV file for Arrow, decompressing it if its name ends in ``.gz``."""
    import pyarrow as pa

    file = opened_arrow(path)
    return pa.CompressedInputStream(file, "gzip") if path.lower().endswith(".gz") else file


def _check_utf8(path: str) -> None:
    """Raises ValueError if a file is not UTF-8: in a skipped row Arrow would only print that to stderr."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _decompressed(path) as file:
        while block := file.read(1 << 20):
            decoder.decode(block)
    decoder.decode(b"", final=True)


def check(chunk: Any, rows: int) -> None:
    """Raises ValueError unless a chunk has ``rows`` rows, and its text and lists do not point outside their columns."""
    from hasten.data.formats.table_types import has_references

    if chunk.num_rows != rows:
        raise ValueError(f"the chunk has {chunk.num_rows} rows, and the file declares {rows}")
    chunk.validate()
    for arrow_type, column in zip(chunk.schema.types, chunk.columns, strict=True):
        if has_references(arrow_type):
            column.validate(full=True)


def opened_arrow(path: str, mapped: bool = False) -> Any:
    """Opens a file for Arrow; a local one is memory-mapped if ``mapped``. ConfigurationError if it does not exist or
    must not be read, RunError if this machine cannot open it, for example because of too many open files.
    """
    import pyarrow as pa

    if is_remote(path):
        return pa.PythonFile(open_file(path), "r")
    try:
        name = os.fsencode(path)  # Arrow would encode it as strict UTF-8
        return pa.memory_map(name) if mapped else pa.OSFile(name)
    except OSError as error:
        error_class = FileMissingError if _is_about_file(error) else RunError
        raise error_class(f"cannot read {path}: {format_error(error)}") from None


def _checked_metadata(schema: Any, chunks: list[int], size: int) -> FileMetadata:
    """Returns the metadata; ValueError if the file declares impossible values."""
    _ = schema.names  # raises here if they are not UTF-8
    if min(chunks, default=0) < 0 or sum(chunks) > MAX_ROWS:
        raise ValueError("the file declares an impossible number of rows")
    return FileMetadata(schema, chunks, size)


@contextmanager
def _translate_errors(path: str, name: str, hint: str = "was it written or copied completely?") -> Iterator[None]:
    """Context manager: Arrow's errors become FileMissingError (bad file) or RunError (memory, file handles)."""
    import pyarrow as pa

    what = f"{path} is not a complete {name} file"
    try:
        yield
    except ConfigurationError:
        raise
    except MemoryError as error:
        if not asks_too_much(error):
            raise
        raise FileMissingError(f"{what}: {format_error(error)}; {hint}") from None
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        if not _is_about_file(error):
            raise RunError(f"cannot read {path}: {format_error(error)}") from None
        raise FileMissingError(f"{what}: {format_error(error)}; {hint}") from None


def asks_too_much(error: MemoryError) -> bool:
    """Whether Arrow asked for more memory than this machine has: sizes in the file must be damaged."""
    requested = re.search(r"size (\d+)", str(error))
    return requested is not None and int(requested[1]) > psutil.virtual_memory().total


def _is_about_file(error: Exception) -> bool:
    """Whether an error is about the content of a file (Arrow's have no errno), not about this machine."""
    errno = getattr(error, "errno", None)
    return errno is None or errno in FILE_ERRNOS


class _OpenFile(threading.local):
    """Thread-local: the file opened last, kept open because the next chunk is usually in the same file."""

    def __init__(self, open_file: Callable) -> None:
        self._open, self._key, self._file = open_file, None, None

    def __getitem__(self, args: tuple[str, ...]) -> Any:
        if (os.getpid(), args) != self._key:
            self._file, self._key = self._open(*args), (os.getpid(), args)
        return self._file

    def __reduce__(self) -> tuple:
        return type(self), (self._open,)  # open files cannot be pickled
