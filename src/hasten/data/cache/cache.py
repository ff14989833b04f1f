"""Caches: samples are read and decoded once, in memory or on disk.

A cache has the rows of its source in the same order, with the same chunks for a windowed shuffle. Columns that the
source returns as lists, such as images that were not resized, can be cached if all rows have one shape, and are
returned as lists.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, RunError
from hasten.data.array_source import gathered, signed
from hasten.data.batch_builder import CollateError, Map, collate_nested, is_builtin, lists_of, passthrough_paths
from hasten.data.cache.cache_disk import CacheDirectory, free_disk, nesting_of
from hasten.data.cache.fingerprints import fingerprint
from hasten.data.io.metadata_cache import default_directory
from hasten.data.io.paths import plain
from hasten.data.progress import rate_reporter
from hasten.data.rng import isolated_rng
from hasten.data.source import (
    BadRow,
    BadRowPolicy,
    Source,
    WrappedSource,
    column_leaves,
    map_columns,
    read_rows,
    refuse_bad,
    unbatch,
)
from hasten.data.validation import check_positive
from hasten.engine.resources import free_memory
from hasten.utils.rng import get_rng_state
from hasten.utils.tree import bitwise_equal

MAX_FREE_FRACTION = 0.5  # of the free memory or disk space, the default limit of a cache
CHUNK = 16_000_000  # bytes read at a time while filling
PROBED_ROWS = 4  # read to find the shape and dtype of all rows
UNIFORM_ROWS_HINT = "a cache requires rows of one shape and dtype: use images(resize=), or .map() before .cache()"


def cached(
    source: Source,
    maps: tuple[Map, ...],
    where: str,
    gigabytes: float | None,
    directory: str | Path | None,
) -> Cache:
    """Returns a cache of the source after its sample maps; arguments and errors are those of ``Pipeline.cache``."""
    if where not in ("memory", "disk"):
        raise ConfigurationError(f"cache(where=) is 'memory' or 'disk', not {where!r}")
    check_positive("cache(gigabytes=)", gigabytes)
    if directory is not None and where == "memory":
        raise ConfigurationError("cache(directory=) is for a cache on disk; use .cache('disk', directory=...)")
    if directory is not None and not (isinstance(directory, (str, Path)) and str(directory)):
        raise ConfigurationError(f"cache(directory=) is the path of a directory, not {directory!r:.80}")
    mapped_source = Mapped(source, maps) if maps else source
    if where == "memory":
        return MemoryCache(mapped_source, gigabytes)
    place = Path(plain(directory)) if directory else default_directory()
    return DiskCache(mapped_source, gigabytes, place)


class Mapped(WrappedSource):
    """A source that applies sample maps to another source's rows and stacks the results into columns."""

    def __init__(self, source: Source, maps: tuple[Map, ...]):
        if any(stage.stage is not None for stage in maps):
            raise ConfigurationError("a map with random numbers before cache() would be frozen; put it after the cache")
        super().__init__(source)
        self.functions = [stage.function for stage in maps]
        for function in self.functions:
            fingerprint(function)  # refuses now what cannot be hashed
        self._fingerprints: list[str] | None = None  # of the functions as they are when the cache is first used
        self._passthrough: frozenset[tuple] | None = None  # computed at the first read

    def read(self, rows: numpy.ndarray) -> Any:
        columns = read_rows(self.source, rows)
        samples, lists = self._mapped(unbatch(columns)), lists_of(columns)
        try:
            return collate_nested(samples, lists, self._passthrough_paths() if lists else frozenset())
        except CollateError as error:
            raise ConfigurationError(f"{error}; {UNIFORM_ROWS_HINT}") from None

    def fingerprint(self) -> dict:
        if self._fingerprints is None:
            self._fingerprints = [fingerprint(function) for function in self.functions]
        return {"of": source_identity(self.source), "maps": self._fingerprints}

    def prepare(self, runner: Callable, faults: BadRowPolicy) -> None:
        super().prepare(runner, faults)
        self._passthrough = None  # the data may have changed

    def _passthrough_paths(self) -> frozenset[tuple]:
        if self._passthrough is None:
            self._passthrough = passthrough_paths(self.source, self._mapped)
        return self._passthrough

    def _mapped(self, samples: list, rows: numpy.ndarray | None = None) -> list:
        for function in self.functions:
            samples = [function(sample) for sample in samples]
        return samples


class Cache(WrappedSource):
    """Base class of the caches.

    ``prepare``, called before every epoch, reads all rows of the source into ``columns``, again if a file
    has changed; ``read`` takes rows from them. Before the first ``prepare`` it reads the source.
    """

    def __init__(self, source: Source, gigabytes: float | None):
        super().__init__(source)
        self.gigabytes = gigabytes  # as in ``Pipeline.cache``
        self.identity: str | None = None  # identity of the source that the cache was filled from
        self.columns: Any = None  # the columns of all rows; None until the cache is filled
        self.lists: list[int] = []  # indices of the columns that are returned as lists of rows
        self.bad: dict[int, tuple[str, str]] = {}  # rows that could not be read: {row: (location, reason)}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"identity": None, "columns": None}  # a spawned process fills its own cache

    def read(self, rows: numpy.ndarray) -> Any:
        if self.columns is None:
            return self.source.read(rows)
        refuse_bad(rows, self.bad)
        index, column_indices = torch.from_numpy(rows), count()

        def select(column: torch.Tensor) -> torch.Tensor | list:
            selected = gathered(column, index)
            return list(selected) if next(column_indices) in self.lists else selected

        return map_columns(select, self.columns)

    def fingerprint(self) -> dict:
        return {"of": source_identity(self.source)}

    def prepare(self, runner: Callable, faults: BadRowPolicy) -> None:
        super().prepare(runner, faults)
        identity = source_identity(self.source)
        if identity != self.identity:
            self.identity, self.columns, self.bad = None, None, {}  # frees the memory before more is allocated
            faults.found.clear()  # rows of the old data
            self.columns, self.lists, self.bad = self.fill(identity, runner, faults)
            self.identity = identity
        faults.record(*(BadRow(row, *reason) for row, reason in self.bad.items()))

    @abstractmethod
    def fill(self, identity: str, runner: Callable, faults: BadRowPolicy) -> tuple[Any, list[int], dict]:
        """Reads all rows; returns (columns as tensors, indices of list columns, {bad row: (location, reason)})."""

    def chunks(
        self, like: Any, identity: str, runner: Callable, faults: BadRowPolicy, bad: dict, what: str
    ) -> Iterator[tuple[int, Any]]:
        """Yields all rows in order as (first row, columns). Bad rows are zeros and are recorded in ``bad``.

        RunError if more rows are bad than allowed or the data changed meanwhile, ConfigurationError if the shape or
        dtype of a row differs from the first rows.
        """
        size, rows = max(1, CHUNK // max(1, bytes_of(like, 1))), len(self)
        report = rate_reporter(what, rows)

        def make(index: int) -> tuple[Any, list[BadRow]]:
            chunk = numpy.arange(index * size, min((index + 1) * size, rows))
            return read_padded(self.source, chunk, like, faults)

        for index, (columns, bad_rows) in enumerate(runner(make, range(-(-rows // size)))):
            faults.record(*bad_rows)
            bad |= {bad_row.row: (bad_row.where, bad_row.why) for bad_row in bad_rows}
            yield index * size, columns
            report(min(rows, (index + 1) * size))
        self.source.prepare(runner, faults)
        if source_identity(self.source) != identity:
            raise RunError("the data changed while the cache was filled; start again when no process writes to them")

    def read_first_within(self, free: float, where: str, faults: BadRowPolicy) -> tuple[Any, list[int]]:
        """Returns (first readable rows as tensors, indices of the list columns). ConfigurationError if all rows of this
        size exceed ``gigabytes`` (None: half of the ``free`` bytes), or the first rows have no common shape.
        """
        with isolated_rng(0):
            before = get_rng_state()
            first, lists = read_first(self.source, faults)
            draws = isinstance(self.source, Mapped) and not bitwise_equal(get_rng_state(), before)
        if draws:
            raise ConfigurationError("a map with random numbers before cache() would be frozen; put it after the cache")
        needed = bytes_of(first, len(self))
        allowed = self.gigabytes * 1e9 if self.gigabytes else free * MAX_FREE_FRACTION
        if needed > allowed:
            limit = "were allowed" if self.gigabytes else f"are half of what is free {where}"
            limit = f"{allowed / 1e9:.3g} GB {limit}; allow more with gigabytes=, or cache less of every sample"
            raise ConfigurationError(f"a cache of {len(self)} rows needs {needed / 1e9:.3g} GB, and {limit}")
        return first, lists


class MemoryCache(Cache):
    """A cache that holds all rows in memory, one tensor per column."""

    def fill(self, identity: str, runner: Callable, faults: BadRowPolicy) -> tuple[Any, list[int], dict]:
        first, lists = self.read_first_within(free_memory(), "in memory", faults)
        filled = map_columns(lambda column: torch.zeros((len(self), *column.shape[1:]), dtype=column.dtype), first)
        bad = {}
        for begin, columns in self.chunks(first, identity, runner, faults, bad, "filling the cache in memory"):
            targets: list[Any] = column_leaves(filled)
            for column, chunk in zip(targets, column_leaves(columns), strict=True):
                column[begin : begin + len(chunk)] = chunk
        return filled, lists, bad


class DiskCache(Cache):
    """A cache on disk: one memory-mapped, row-major file per column, whose pages all processes share."""

    def __init__(self, source: Source, gigabytes: float | None, directory: Path):
        super().__init__(source, gigabytes)
        self.directory = directory

    def fill(self, identity: str, runner: Callable, faults: BadRowPolicy) -> tuple[Any, list[int], dict]:
        def write_all(write: Callable) -> tuple[list[int], dict]:
            bad, what = {}, f"in {self.directory}"
            first, lists = self.read_first_within(free_disk(self.directory), what, faults)
            nesting_of(first)  # refuses what cannot be stored before all rows are read
            for _, columns in self.chunks(first, identity, runner, faults, bad, f"filling the cache {what}"):
                write(columns)
            return lists, bad

        return CacheDirectory(self.directory, identity).open(write_all)


def source_identity(source: Source) -> str:
    """Returns what identifies the rows of a source, as JSON: class, code, length and fingerprint."""
    kind = type(source)
    name, code = f"{kind.__module__}.{kind.__qualname__}", None if is_builtin(kind) else fingerprint(kind)
    content = {"source": name, "code": code, "rows": len(source), "of": source.fingerprint()}
    return json.dumps(_to_json(content), sort_keys=True)


def _to_json(value: Any) -> Any:
    """Converts to JSON values: arrays and tensors become numbers or lists, keys and unknown types their ``repr``."""
    if isinstance(value, Mapping):
        return {repr(name): _to_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(part) for part in value]
    if isinstance(value, (numpy.generic, numpy.ndarray, torch.Tensor)):
        return _to_json(value.tolist())
    return value if value is None or type(value) in (bool, int, float, str) else repr(value)


# ---- rows of one shape and dtype


def read_first(source: Source, faults: BadRowPolicy) -> tuple[Any, list[int]]:
    """Returns the first readable rows as (columns as tensors, indices of the columns that the source returns as lists).

    Records the bad rows before them; RunError if these are more than allowed, ConfigurationError if no row can be read
    or the rows have no common shape.
    """
    for begin in range(0, len(source), PROBED_ROWS):
        columns, _, bad_rows = faults.readable(source, numpy.arange(begin, min(begin + PROBED_ROWS, len(source))))
        faults.record(*bad_rows)
        if columns is not None:
            lists = [index for index, column in enumerate(column_leaves(columns)) if isinstance(column, list)]
            return _as_tensors(columns), lists
    raise ConfigurationError("there is no row to cache: all rows are bad, or there are none")


def read_padded(source: Source, rows: numpy.ndarray, like: Any, faults: BadRowPolicy) -> tuple[Any, list[BadRow]]:
    """Returns (columns as tensors of shape (rows, ...) with zeros for the bad rows, errors of the bad rows).
    ConfigurationError if the shape or dtype of a row differs from that of the columns ``like``.
    """
    columns, good, bad_rows = faults.readable(source, rows)
    if columns is not None:
        columns = _as_tensors(columns)
        _check_like(columns, like, rows)
        if not bad_rows:
            return columns, bad_rows
    padded = map_columns(lambda column: torch.zeros((len(rows), *column.shape[1:]), dtype=column.dtype), like)
    if columns is not None:
        index = torch.from_numpy(numpy.searchsorted(rows, good))
        targets: list[Any] = column_leaves(padded)
        tensors: list[Any] = column_leaves(columns)
        for target, column in zip(targets, tensors, strict=True):
            signed(target)[index] = signed(column)
    return padded, bad_rows


def bytes_of(columns: Any, rows: int) -> int:
    """Returns the bytes of ``rows`` rows with the shapes and dtypes of these columns, which are tensors."""
    leaves: list[Any] = column_leaves(columns)
    return sum(column[:1].nbytes for column in leaves) * rows


def _check_like(columns: Any, like: Any, rows: numpy.ndarray) -> None:
    """Raises ConfigurationError if the shape or dtype of a column differs from the first rows."""
    for index, (column, first) in enumerate(zip(column_leaves(columns), column_leaves(like), strict=True)):
        expected, actual = _describe(first[0]), _describe(column[0])
        if actual != expected:
            later = f"{actual} in rows {rows[0]} to {rows[-1]}; {UNIFORM_ROWS_HINT}"
            raise ConfigurationError(f"column {index} is {expected} in the first rows and {later}")


def _describe(row: torch.Tensor) -> str:
    return f"{row.dtype} {tuple(row.shape)}".removeprefix("torch.")


def _as_tensors(columns: Any) -> Any:
    """Stacks the columns that are lists of tensors; ConfigurationError for other lists, and for several shapes or
    dtypes.
    """
    indices = count()

    def stack(column: torch.Tensor | list) -> torch.Tensor:
        index = next(indices)
        if isinstance(column, torch.Tensor):
            return column
        others = [type(row).__name__ for row in column if not isinstance(row, torch.Tensor)]
        if others:
            raise ConfigurationError(f"column {index} of the samples holds {others[0]}s; {UNIFORM_ROWS_HINT}")
        kinds = [*dict.fromkeys(map(_describe, column))]
        if len(kinds) > 1:
            both = f"rows of {kinds[0]} and of {kinds[1]}"
            raise ConfigurationError(f"column {index} of the samples holds {both}; {UNIFORM_ROWS_HINT}")
        return torch.stack(column)

    return map_columns(stack, columns)
