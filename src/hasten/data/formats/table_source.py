"""The rows of tables in files.

A table that fits into memory is read once, run by run, into row-major tensors; from then on a batch is one gathering of
rows, at the speed of memory. Of a bigger one only runs (row groups, record batches) are held, the last used ones. To read
one row, its whole run has to be decoded, so rows in any order would decode a run for nearly every row of a batch: shuffle
such a table with ``.shuffle(window=)``, which asks for the rows of a few runs at a time, or store its rows once, with
``.cache("disk")``.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from time import perf_counter

import numpy
import torch

from hasten.core.errors import ConfigurationError, HastenWarning, RunError, format_error
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.cache.populate import noticing, paced
from hasten.data.formats import argument_checks
from hasten.data.formats.missing_values import checked_fill, typed, without_empty
from hasten.data.formats.table_files import Format, Manifest, asks_too_much, check
from hasten.data.formats.table_layout import Layout, Rows, merged
from hasten.data.io.paths import FileMissingError, check_unchanged, file_signature, is_lost, resolve_paths
from hasten.data.source import BadRow, Source
from hasten.engine.resources import free_memory

SHARE = 4  # a table may take this part of the free memory
WASTE = 4  # times the rows that are given may be decoded before it is told
AHEAD = 4  # runs that are decoded at a time, at most


class Table(Source):
    """The rows of files of one format, as columns.

    Attributes:
        columns, target: the names of what is read.
        lost: files that cannot be opened, and why; each is a bad row.
    """

    def __init__(self, form: Format, paths, columns, target, fill, classes, gigabytes):
        _arrow_error()
        self._form = form
        files = resolve_paths(paths, form.suffixes)
        with ThreadPoolExecutor(min(len(files), 16)) as pool:
            marked = dict(zip(files, pool.map(self._opened, files), strict=True))
        self._stamps = {file: mark for file, (mark, _) in marked.items()}
        manifests = {file: manifest for file, (_, manifest) in marked.items()}
        self.lost = {file: manifest.bad[0] for file, manifest in manifests.items() if manifest.schema is None}
        if len(self.lost) == len(files):
            raise FileMissingError(self.lost[files[0]])
        schemas = {file: manifest.schema for file, manifest in manifests.items() if manifest.schema is not None}
        self._guessed = form.name == "CSV"
        self._layout = Layout.of(schemas, columns, target, self._guessed)
        if classes is not None and not self._layout.has_classes:
            raise ConfigurationError("classes= are the words of a target of text; there is none")
        self._chosen_classes = None if classes is None else argument_checks.names("classes=", classes)
        self._empty_is_missing = self._guessed and self._layout.has_classes and "" not in (self._chosen_classes or ())
        self._fill = checked_fill(fill, self._layout.types, next(iter(schemas.values())).names)
        if gigabytes is not None and not (isinstance(gigabytes, (int, float)) and gigabytes >= 0):
            raise ConfigurationError(f"gigabytes= is a number of at least 0, not {gigabytes!r}")
        self.columns, self.target = self._layout.inputs, target
        if columns is not None and (odd := self._layout.blocking_columns):
            what = f"columns= takes in {' and '.join(map(repr, odd))} beside numbers, so batches are (dict of columns, target)"
            warnings.warn(f"{what}; with numbers alone they are (matrix, target)", HastenWarning, stacklevel=3)
        self._runs = [(file, number) for file, manifest in manifests.items() for number in range(len(manifest.runs))]
        self._edges = numpy.cumsum(
            [0, *(rows for manifest in manifests.values() for rows in manifest.runs)], dtype=numpy.int64
        )
        self._bytes = self._layout.bytes(len(self), sum(manifest.bytes for manifest in manifests.values()))
        self._room = free_memory() / SHARE if gigabytes is None else gigabytes * 10**9
        self._processes = 1  # that share the room
        self._given, self._unpacked, self._warned = 0, 0, False  # rows, while the table does not fit
        known = [
            (file, manifest.bad.get(number))
            for file, manifest in manifests.items()
            for number in range(len(manifest.runs))
        ]
        self._bad = {
            run: bad for run, bad in enumerate(known) if bad[1] is not None
        }  # runs that cannot be read: (where, why)
        self._known = list(self._bad)  # those of which it is known now
        self._held = None  # the whole table
        self._begin()

    def _opened(self, file: str) -> tuple[list, Manifest]:
        """What marks a file, and what it holds; of one that cannot be opened, a bad row."""
        try:
            return file_signature(file), self._form.manifest(file)
        except ConfigurationError as refused:
            if not is_lost(file, refused):
                raise
            return [file, 0, None], Manifest(None, [1], 0, {0: str(refused)})

    def _begin(self) -> None:
        self._lock, self._recent = threading.RLock(), OrderedDict()  # runs that were used last
        _tables.add(self)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_recent")} | {
            "_held": None
        }

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self._begin()

    def __len__(self) -> int:
        return int(self._edges[-1])

    def chunk_offsets(self) -> numpy.ndarray:
        return self._edges

    def fingerprint(self) -> dict:
        return {
            "table": self._form.name,
            "settings": self._form.settings,
            "files": list(self._stamps.values()),
            "columns": self.columns,
            "target": self.target,
            "fill": self._fill,
            "classes": self._chosen_classes,
        }

    @cached_property
    def classes(self) -> list[str] | None:
        """The words of a text target, in the order of their numbers; None for a target of numbers."""
        if not self._layout.has_classes or self._chosen_classes is not None:
            return self._chosen_classes
        words: set[str | None] = set()
        for run in range(len(self._runs)):
            if (table := self._attempted(run, [self.target])) is not None:
                words.update(table.column(self.target).unique().to_pylist())
        if None in words and isinstance(self._fill, dict):
            words.add(self._fill.get(self.target))
        return sorted(word for word in words if isinstance(word, str))

    def known_bad_rows(self) -> list[BadRow]:
        return [BadRow(self._edges[run], *self._bad[run]) for run in self._known]  # one row each

    def prepare(self, runner: Callable, faults: BadRowPolicy) -> None:
        for file, mark in self._stamps.items():
            if isinstance(mark[-1], list):  # a local one that is there; of others it is noticed when they are read
                check_unchanged(file, mark)
        self._processes = max(1, getattr(runner, "processes", 1))
        if self._fits():
            self._whole()  # before there are processes that would each read it again
        else:
            _ = self.classes

    def read(self, rows: numpy.ndarray):
        if not self._fits():
            return self._from_runs(rows)
        whole = self._whole()
        if self._bad:
            self._refuse_bad(rows)
            rows = rows - self._lost_before(rows)
        return whole.read(torch.from_numpy(rows))

    # ---- a table that fits

    def _fits(self) -> bool:
        return self._bytes <= self._room

    def _whole(self) -> Rows:
        with self._lock:
            if self._held is None:
                self._held = self._loaded()
        return self._held

    def _loaded(self) -> Rows:
        """The whole table, without the runs that cannot be read."""
        rows = self._layout.rows(len(self), self.classes)
        watch, began, what = noticing(), perf_counter(), f"reading the table of {next(iter(self._stamps))}"
        with ThreadPoolExecutor(AHEAD) as pool:
            waiting: deque[Future] = deque()
            for run in range(len(self._runs) + AHEAD):
                if run < len(self._runs):
                    waiting.append(pool.submit(self._attempted, run, self._layout.names))
                if run >= AHEAD and (table := waiting.popleft().result()) is not None:
                    rows.put(table, self._fill, self._where(run - AHEAD))
                if run >= AHEAD and (read := int(self._edges[run - AHEAD + 1])):
                    done, spent = read / len(self), perf_counter() - began
                    watch(paced(what, read, spent), done, spent * (1 - done) / done)
        self._form.let_go()
        return rows

    def _attempted(self, run: int, columns: list[str]):
        """Some columns of a run; None where they cannot be read, which is noted."""
        if run in self._bad:
            return None
        try:
            return self._decoded(run, columns)
        except BadRow:
            return None

    def _lost_before(self, rows: numpy.ndarray) -> numpy.ndarray:
        """How many rows that could not be read come before each row."""
        lost, bad = numpy.zeros(len(self._runs), dtype=numpy.int64), list(self._bad)
        lost[bad] = numpy.diff(self._edges)[bad]
        return (numpy.cumsum(lost) - lost)[self._run_of(rows)]

    # ---- a table that does not fit

    def _from_runs(self, rows: numpy.ndarray):
        """The rows, from the runs that they are in."""
        if not len(rows):
            return self._layout.rows(0, self.classes).read(torch.from_numpy(rows))
        self._refuse_bad(rows)
        runs = self._run_of(rows)
        order = numpy.argsort(runs, kind="stable")
        together = numpy.split(order, numpy.flatnonzero(numpy.diff(runs[order])) + 1)  # places in the batch, run by run
        parts = [self._from_run(int(runs[places[0]]), rows[places]) for places in together]
        self._given += len(rows)
        self._warn_of_waste()
        return parts[0] if len(parts) == 1 else merged(parts, torch.from_numpy(numpy.argsort(order)))

    def _from_run(self, run: int, rows: numpy.ndarray):
        try:
            return self._recently(run).read(torch.from_numpy(rows - self._edges[run]))
        except BadRow:  # the run's first row; those to blame are the ones asked for
            self._refuse_bad(rows)
            raise

    def _recently(self, run: int) -> Rows:
        """A decoded run, kept until others need its room. Of several threads that want it, one decodes."""
        with self._lock:
            mine = run not in self._recent
            kept = self._recent[run] = Future() if mine else self._recent.pop(run)
            while mine and len(self._recent) > 1 and self._bytes_of(self._recent) > self._room / self._processes:
                self._recent.popitem(last=False)
        if mine:
            try:
                count = int(self._edges[run + 1] - self._edges[run])
                self._unpacked += count
                table = self._decoded(run, self._layout.names)
                rows = self._layout.rows(count, self.classes)
                rows.put(table, self._fill, self._where(run))
                kept.set_result(rows)
            except BaseException as error:
                kept.set_exception(error)
                self._recent.pop(run, None)
        return kept.result()

    def _warn_of_waste(self) -> None:
        fitting = len(self) * self._room / self._processes / self._bytes
        if self._warned or self._unpacked < WASTE * (self._given + fitting + numpy.diff(self._edges).max()):
            return
        self._warned = True
        what = f"{self._unpacked} rows were decoded to give {self._given}: each {self._form.run_name} is decoded again and again"
        warnings.warn(
            f"{what}; use .shuffle(window=) with a smaller window, or .cache('disk')", HastenWarning, stacklevel=2
        )

    def _bytes_of(self, runs: Iterable[int]) -> float:
        return sum(self._bytes * (self._edges[run + 1] - self._edges[run]) / len(self) for run in runs)

    # ---- runs

    def _refuse_bad(self, rows: numpy.ndarray) -> None:
        """Raises a BadRow where rows are in a run of which it is known that it cannot be read: for all of that run at once."""
        if not self._bad:
            return
        runs = self._run_of(rows)
        if (bad := numpy.isin(runs, list(self._bad))).any():
            run = int(runs[bad.argmax()])
            raise BadRow(rows[bad.argmax()], *self._bad[run], rows[runs == run].tolist())

    def _run_of(self, rows: numpy.ndarray) -> numpy.ndarray:
        return numpy.searchsorted(self._edges, rows, side="right") - 1

    def _where(self, run: int) -> str:
        file, number = self._runs[run]
        return f"{file}, {self._form.run_name} {number}" if self._form.run_name else file

    def _decoded(self, run: int, columns: list[str]):
        """Some columns of a run, as an Arrow table.

        Raises:
            BadRow: they cannot be decoded; noted in ``_bad``.
            Failure: the file is not what it was, or this machine lacks what it takes.
        """
        file, number = self._runs[run]
        try:
            table = self._form.run(file, number, columns)
            check(table, int(self._edges[run + 1] - self._edges[run]))
        except MemoryError as error:
            if not asks_too_much(error):
                raise
            raise self._damaged(run, error) from None
        except ConfigurationError:
            check_unchanged(file, self._stamps[file])  # what went away, or may no longer be read, was no wrong request
            raise
        except (OSError, ValueError, LookupError, _arrow_error()) as error:
            raise self._damaged(run, error) from None
        check_unchanged(file, self._stamps[file])
        if self._guessed:
            table = typed(table, self._layout.types)
        return without_empty(table, self.target) if self._empty_is_missing else table

    def _damaged(self, run: int, error: Exception) -> Exception:
        """What to raise of a run that cannot be decoded: noted, unless the file is another by now or the system is to blame."""
        file, _ = self._runs[run]
        check_unchanged(file, self._stamps[file])
        if getattr(error, "errno", None) is not None:  # the system's: Arrow's own about a file have none
            return RunError(f"cannot read {self._where(run)}: {format_error(error)}")
        self._bad[run] = (self._where(run), format_error(error))
        return BadRow(self._edges[run], *self._bad[run])


def _arrow_error() -> type[Exception]:
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise ConfigurationError("tables are read by pyarrow: pip install 'hasten[data]'") from None
    return ArrowException


_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked process nobody will ever open the locks that threads of the parent held."""
    for table in _tables:
        table._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
