"""The source of tables in files.

A table that fits into the memory budget is read once, chunk by chunk, into row-major tensors; then a batch is one
gather of rows at the speed of memory. Of a larger table only recently used chunks (row groups, record batches) are
held. To read one row its whole chunk must be decoded, so with rows in random order nearly every row of a batch would
decode a chunk: shuffle such a table with ``.shuffle(window=)``, which uses a few chunks at a time, or store its rows
once with ``.cache("disk")``.
"""

import os
import re
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy
import pyarrow
import pyarrow.types as types
import torch

from hasten.core.errors import ConfigurationError, HastenWarning, RunError, format_error
from hasten.data.formats.missing_values import MISSING_WORDS, cast_incomplete_columns, check_fill, words_to_null
from hasten.data.formats.table_files import MEMORY_FRACTION, FileMetadata, Format, asks_too_much, check
from hasten.data.formats.table_layout import Layout, Rows, merged
from hasten.data.formats.table_types import plain, shape_of
from hasten.data.io.paths import FileMissingError, check_unchanged, file_signature, is_file_error, resolve_paths
from hasten.data.progress import rate_reporter
from hasten.data.source import BadRow, BadRowPolicy, Source
from hasten.data.validation import check_names
from hasten.engine.resources import free_memory

NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
MAX_DECODE_RATIO = 4  # rows decoded for each row returned, before a warning
CONCURRENT_CHUNKS = 4  # decoded at a time, at most


def _warn_of_numbers(target: str, classes: list[str]) -> None:
    """Warns of a target whose values are mostly numbers: one stray word, such as ``?``, has made classes of them."""
    others = [word for word in classes if not NUMBER.fullmatch(word)]
    if others and len(others) < len(classes) / 2:
        what = f"the target {target!r} holds {others[0]!r} besides numbers, so that each value is a class, not a number"
        warnings.warn(f"{what}; replace it, or remove its rows", HastenWarning, stacklevel=2)


def _warn_of_partitions(files: list[str], columns: list[str]) -> None:
    """Warns of columns that pandas and Spark have stored in the names of directories, as in ``year=2020/x.parquet``."""
    parts = {part.partition("=")[0] for file in files for part in file.split("/")[:-1] if "=" in part}
    if lost := sorted(parts.difference(columns)):
        what = f"the names of directories hold values of {', '.join(map(repr, lost))} ({files[0]}), which are not read"
        warnings.warn(f"{what}; write the files again with these columns in them", HastenWarning, stacklevel=5)


class Table(Source):
    """A data source over the rows of table files of one format.

    The arguments are those of ``parquet``. The attribute ``columns`` holds the names of the columns that are read,
    without the target; ``target`` is the name of the target, or None.
    """

    def __init__(
        self,
        form: Format,
        paths: Any,
        columns: Any = None,
        target: str | None = None,
        fill: Any = None,
        classes: Any = None,
        gigabytes: float | None = None,
    ) -> None:
        self._format = form
        files = resolve_paths(paths, form.suffixes)
        with ThreadPoolExecutor(min(len(files), 16)) as pool:
            opened = dict(zip(files, pool.map(self._inspect_file, files), strict=True))
        self._signatures = {file: signature for file, (signature, _) in opened.items()}
        metadata = {file: entry for file, (_, entry) in opened.items()}
        # {file: reason} of the files that cannot be opened; each counts as one bad row
        self.lost = {file: entry.bad[0] for file, entry in metadata.items() if entry.schema is None}
        if len(self.lost) == len(files):
            raise FileMissingError(self.lost[files[0]])
        schemas = {file: entry.schema for file, entry in metadata.items() if entry.schema is not None}
        _warn_of_partitions(files, next(iter(schemas.values())).names)
        self._guessed_types = form.name == "CSV"
        self._layout = Layout.of(schemas, columns, target, self._guessed_types)
        if classes is not None and not self._layout.has_classes:
            raise ConfigurationError("classes= are the values of a text target, and there is none; omit classes=")
        self._given_classes = None if classes is None else check_names("classes=", classes)
        has_words = self._guessed_types and self._layout.has_classes
        # of a text target in CSV: they mean a missing class, unless they are classes
        self._missing_words = sorted(MISSING_WORDS.difference(self._given_classes or ())) if has_words else []
        self._fill = check_fill(fill, self._layout.types, next(iter(schemas.values())).names)
        if gigabytes is not None and not (isinstance(gigabytes, (int, float)) and gigabytes >= 0):
            raise ConfigurationError(f"gigabytes= must be a number of at least 0, not {gigabytes!r}")
        self.columns, self.target = self._layout.inputs, target
        if columns is not None and (others := self._layout.blocking_columns):
            what = f"columns= contains {' and '.join(map(repr, others))} besides numbers"
            hint = "so batches are (dict of columns, target); with numbers alone they are (matrix, target)"
            warnings.warn(f"{what}, {hint}", HastenWarning, stacklevel=4)
        chunks = [(file, index) for file, entry in metadata.items() for index in range(len(entry.chunks))]
        self._chunks = chunks  # (file, index in the file)
        self._chunk_rows = numpy.array([rows for entry in metadata.values() for rows in entry.chunks], numpy.int64)
        self._offsets = numpy.cumsum([0, *self._chunk_rows], dtype=numpy.int64)
        self._bytes = self._layout.bytes(len(self), sum(entry.bytes for entry in metadata.values()))
        self._budget = free_memory() * MEMORY_FRACTION if gigabytes is None else gigabytes * 10**9
        self._processes = 1  # that share the budget
        # rows returned and decoded while the table does not fit
        self._returned, self._decoded_rows, self._warned = 0, 0, False
        reasons = [(file, metadata[file].bad.get(index)) for file, index in chunks]
        # chunks that cannot be read: (where, why)
        self._bad = {chunk: (file, why) for chunk, (file, why) in enumerate(reasons) if why is not None}
        self._known_bad = list(self._bad)  # before anything was read
        self._loaded: Rows | None = None  # the whole table
        self._init_locks()

    def _inspect_file(self, file: str) -> tuple[list, FileMetadata]:
        """Returns ([path, size, version], FileMetadata) of a file; one that cannot be opened counts as one bad row."""
        try:
            return file_signature(file), self._format.metadata(file)
        except ConfigurationError as error:
            if not is_file_error(file, error):
                raise
            return [file, 0, None], FileMetadata(None, [1], 0, {0: str(error)})

    def _init_locks(self) -> None:
        self._lock = threading.RLock()
        self._recent: OrderedDict[int, Future] = OrderedDict()  # decoded chunks, the last used one at the end
        _tables.add(self)

    def __getstate__(self) -> dict:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_recent")}
        return state | {"_loaded": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._init_locks()

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def chunk_offsets(self) -> numpy.ndarray:
        return self._offsets

    def fingerprint(self) -> dict:
        return {
            "table": self._format.name,
            "settings": self._format.settings,
            "files": list(self._signatures.values()),
            "columns": self.columns,
            "target": self.target,
            "fill": self._fill,
            "classes": self._given_classes,
        }

    def any_fill(self) -> dict[str, Any]:
        """A ``fill`` for all inputs, also inside of lists and structs: zeros and empty strings."""

        def fills(name: str, kind: Any) -> Iterator[tuple[str, Any]]:
            if types.is_struct(kind):
                for field in kind:
                    yield from fills(f"{name}.{field.name}", plain(field.type))
                return
            element = shape_of(kind)[1]
            element = plain(element.value_type if types.is_large_list(element) else element)
            yield name, {"large_string": "", "large_binary": b""}.get(str(element), 0)

        return dict(pair for name in self._layout.inputs for pair in fills(name, self._layout.types[name]))

    @cached_property
    def classes(self) -> list[str] | None:
        """The values of a text target by class index, read from all files unless given; None for a numeric target."""
        if not self._layout.has_classes or self._given_classes is not None:
            return self._given_classes
        words: set[str | None] = set()
        for chunk in range(len(self._chunks)):
            table = self._decode_if_good(chunk, [str(self.target)])
            if table is not None:
                words.update(table.column(self.target).unique().to_pylist())
        if None in words and isinstance(self._fill, dict):
            words.add(self._fill.get(self.target))
        classes = sorted(word for word in words if isinstance(word, str))
        if self._guessed_types:
            _warn_of_numbers(str(self.target), classes)
        return classes

    @property
    def matrix_columns(self) -> list[str] | None:
        """The columns of the matrix of a batch, in order; None if batches are dicts."""
        return self.columns if self._layout.is_matrix else None

    def known_bad_rows(self) -> list[BadRow]:
        return [BadRow(self._offsets[chunk], *self._bad[chunk]) for chunk in self._known_bad]  # chunks of one row

    def prepare(self, runner: Callable, faults: BadRowPolicy) -> None:
        for file, signature in self._signatures.items():
            if isinstance(signature[-1], list):  # a local file that exists; others are checked when they are read
                check_unchanged(file, signature)
        self._processes = max(1, runner.workers.processes)
        if self._fits():
            self._load()  # before worker processes start, each of which would read the table again
        else:
            _ = self.classes

    def read(self, rows: numpy.ndarray) -> Any:
        if not self._fits():
            return self._read_chunks(rows)
        table = self._load()
        if self._bad:
            self._refuse_bad(rows)
            rows = rows - self._bad_rows_before(rows)
        return table.read(torch.from_numpy(rows))

    def chunk_as_arrow(self, chunk: int) -> Any:
        """Returns a chunk (row group, record batch) as an Arrow table; BadRow if it cannot be decoded."""
        self._refuse_bad(self._offsets[chunk : chunk + 1])
        columns = self._decode(chunk, self._layout.names)
        table = columns if isinstance(columns, pyarrow.Table) else pyarrow.Table.from_batches([columns])
        schema = pyarrow.schema(list(self._layout.types.items()))
        # integers of a CSV file that are fractions in another one are rounded, as in a batch
        return table.select(self._layout.names).cast(schema, safe=not self._guessed_types)

    # ---- a table that fits into the memory budget

    def _fits(self) -> bool:
        return self._bytes <= self._budget

    def _load(self) -> Rows:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._read_all()
        return self._loaded

    def _read_all(self) -> Rows:
        """Returns the rows of the whole table without the chunks that cannot be read; reports progress."""
        rows = Rows(self._layout, len(self), self.classes)
        report = rate_reporter(f"reading the table of {next(iter(self._signatures))}", len(self))
        with ThreadPoolExecutor(CONCURRENT_CHUNKS) as pool:
            pending: deque[Future] = deque()
            for submitted in range(len(self._chunks) + CONCURRENT_CHUNKS):
                if submitted < len(self._chunks):
                    pending.append(pool.submit(self._decode_if_good, submitted, self._layout.names))
                chunk = submitted - CONCURRENT_CHUNKS
                if chunk < 0:
                    continue
                if (table := pending.popleft().result()) is not None:
                    rows.put(table, self._fill, self._where(chunk))
                report(int(self._offsets[chunk + 1]))
        self._format.release()
        return rows

    def _decode_if_good(self, chunk: int, columns: list[str]) -> Any:
        """Returns some columns of a chunk; None if it cannot be decoded, which is recorded in ``_bad``."""
        if chunk in self._bad:
            return None
        try:
            return self._decode(chunk, columns)
        except BadRow:
            return None

    def _bad_rows_before(self, rows: numpy.ndarray) -> numpy.ndarray:
        """Returns for each row how many rows of unreadable chunks precede it: int64, shape (rows,)."""
        lost, bad = numpy.zeros(len(self._chunks), dtype=numpy.int64), list(self._bad)
        lost[bad] = self._chunk_rows[bad]
        return (numpy.cumsum(lost) - lost)[self._chunk_of(rows)]

    # ---- a table that does not fit

    def _read_chunks(self, rows: numpy.ndarray) -> Any:
        """Returns the batch of ``rows``, decoding the chunks that contain them unless they are in memory."""
        if not len(rows):
            return Rows(self._layout, 0, self.classes).read(torch.from_numpy(rows))
        self._refuse_bad(rows)
        chunks = self._chunk_of(rows)
        order = numpy.argsort(chunks, kind="stable")
        groups = numpy.split(order, numpy.flatnonzero(numpy.diff(chunks[order])) + 1)  # positions in the batch by chunk
        parts = [self._read_chunk(int(chunks[group[0]]), rows[group]) for group in groups]
        self._returned += len(rows)
        self._warn_of_repeated_decoding()
        return parts[0] if len(parts) == 1 else merged(parts, torch.from_numpy(numpy.argsort(order)))

    def _read_chunk(self, chunk: int, rows: numpy.ndarray) -> Any:
        try:
            return self._decoded_chunk(chunk).read(torch.from_numpy(rows - self._offsets[chunk]))
        except BadRow:  # names the first row of the chunk; raise it for the requested rows instead
            self._refuse_bad(rows)
            raise

    def _decoded_chunk(self, chunk: int) -> Rows:
        """Returns a decoded chunk from memory, or decodes it (in one of the threads that wait for it)."""
        with self._lock:
            is_new = chunk not in self._recent
            future = self._recent[chunk] = Future() if is_new else self._recent.pop(chunk)
            while is_new and len(self._recent) > 1 and self._chunk_rows[[*self._recent]].sum() > self._rows_in_budget():
                self._recent.popitem(last=False)
        if is_new:
            try:
                count = int(self._chunk_rows[chunk])
                self._decoded_rows += count
                table = self._decode(chunk, self._layout.names)
                rows = Rows(self._layout, count, self.classes)
                rows.put(table, self._fill, self._where(chunk))
                future.set_result(rows)
            except BaseException as error:
                future.set_exception(error)
                self._recent.pop(chunk, None)
        return future.result()

    def _rows_in_budget(self) -> float:
        return len(self) * self._budget / self._processes / self._bytes

    def _warn_of_repeated_decoding(self) -> None:
        allowed = MAX_DECODE_RATIO * (self._returned + self._rows_in_budget() + self._chunk_rows.max())
        if self._warned or self._decoded_rows < allowed:
            return
        self._warned = True
        what = f"{self._decoded_rows} rows were decoded to return {self._returned}"
        why = f"every {self._format.chunk_name} is decoded repeatedly"
        hint = "use .shuffle(window=) with a smaller window, or .cache('disk')"
        warnings.warn(f"{what}: {why}; {hint}", HastenWarning, stacklevel=2)

    # ---- chunks

    def _refuse_bad(self, rows: numpy.ndarray) -> None:
        """Raises BadRow if rows are in a chunk that is known to be unreadable, for all rows in that chunk at once."""
        if not self._bad:
            return
        chunks = self._chunk_of(rows)
        if (bad := numpy.isin(chunks, list(self._bad))).any():
            chunk = int(chunks[bad.argmax()])
            raise BadRow(rows[bad.argmax()], *self._bad[chunk], rows[chunks == chunk].tolist())

    def _chunk_of(self, rows: numpy.ndarray) -> numpy.ndarray:
        return numpy.searchsorted(self._offsets, rows, side="right") - 1

    def _where(self, chunk: int) -> str:
        file, index = self._chunks[chunk]
        return f"{file}, {self._format.chunk_name} {index}" if self._format.chunk_name else file

    def _decode(self, chunk: int, columns: list[str]) -> Any:
        """Returns some columns of a chunk as an Arrow table. BadRow if they cannot be decoded, which is recorded in
        ``_bad``; RunError if the file has changed, or this machine lacks memory or file handles.
        """
        file, index = self._chunks[chunk]
        try:
            table = self._format.chunk(file, index, columns)
            check(table, int(self._chunk_rows[chunk]))
        except MemoryError as error:
            if not asks_too_much(error):
                raise
            raise self._damaged(chunk, error) from None
        except ConfigurationError:
            check_unchanged(file, self._signatures[file])  # a file that disappeared is a RunError
            raise
        except (OSError, ValueError, LookupError, pyarrow.ArrowException) as error:
            raise self._damaged(chunk, error) from None
        check_unchanged(file, self._signatures[file])
        if self._guessed_types:
            table = cast_incomplete_columns(table, self._layout.types)
        return words_to_null(table, str(self.target), self._missing_words) if self._missing_words else table

    def _damaged(self, chunk: int, error: Exception) -> Exception:
        """Returns what to raise for the error of a chunk: RunError if it is one of the system (it has an errno), else
        BadRow, and the chunk is recorded in ``_bad``. Raises RunError if the file has changed.
        """
        file, _ = self._chunks[chunk]
        check_unchanged(file, self._signatures[file])
        if getattr(error, "errno", None) is not None:
            return RunError(f"cannot read {self._where(chunk)}: {format_error(error)}")
        self._bad[chunk] = (self._where(chunk), format_error(error))
        return BadRow(self._offsets[chunk], *self._bad[chunk])


_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def _reset_locks() -> None:
    """Replaces the locks of all tables in a forked child: threads that held them do not exist there."""
    for table in _tables:
        table._init_locks()


os.register_at_fork(after_in_child=_reset_locks)
