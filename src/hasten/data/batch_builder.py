"""Builds one batch from its index: row indices, columns, sample maps, collate, batch maps.

A ``BatchBuilder`` holds everything that a batch depends on as plain values, so any thread, process, rank or resumed run
builds the same batch.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from numbers import Number
from operator import is_
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.data.rng import SampleRng, isolated_rng
from hasten.data.source import BadRow, BadRowPolicy, Source, column_leaves, unbatch
from hasten.utils.rng import derive_seed, get_rng_state, preserve_rng_state
from hasten.utils.tree import bitwise_equal

Path = tuple[Any, ...]  # keys and indices that lead to a part of a sample


@dataclass(frozen=True)
class Map:
    """A function that is applied to every sample or batch."""

    function: Callable
    stage: int | None = None  # index among the maps that take ``rng``; None if this one does not


@dataclass(frozen=True)
class BatchBuilder:
    """Builds the batches of one epoch: ``index -> (batch, errors of its skipped rows)``. RunError if no row of a batch
    can be read, or more rows of it are bad than may be skipped.
    """

    source: Source
    rows: Callable[[int], numpy.ndarray]  # index of a batch -> row indices of the global batch
    size: int  # rows of a global batch, over all shards
    seed: int  # of random numbers, with the epoch and the position in it
    epoch: int
    sample_maps: tuple[Map, ...]  # applied to every sample before collate, in order
    batch_maps: tuple[Map, ...]  # applied to every batch, in order
    collate: Callable[[list], Any] | None  # ``(list of samples) -> batch``; None: ``collate_nested``
    num_shards: int  # number of nearly equal parts into which each global batch is split
    shard_index: int  # the part that is built here
    faults: BadRowPolicy  # which rows may be skipped
    # whether the global generators of torch, NumPy and Python are seeded for each batch; False in threads, which share
    # them
    seeded: bool

    def __call__(self, index: int) -> tuple[Any, list[BadRow]]:
        with self._seeded_generators(index):
            shard, positions = self._shard(index)
            columns, rows, bad = self.faults.readable(self.source, shard)
            if bad:
                positions = positions[numpy.isin(shard, rows)]
            if not len(rows):
                raise RunError(f"batch {index} of the epoch has no good row; repair this one: {bad[0]}")
            batch = self._collate(columns, positions) if self.sample_maps or self.collate else columns
            for stage in self.batch_maps:
                if stage.stage is None:
                    batch = stage.function(batch)
                else:
                    batch = stage.function(batch, rng=self._rng(positions, stage))
            return batch, bad

    def draws(self, index: int) -> bool:
        """Builds batch ``index`` and returns whether that drew from the global generators, which it restores."""
        with preserve_rng_state():
            before = get_rng_state()
            self(index)
            return not bitwise_equal(get_rng_state(), before)

    def _shard(self, index: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns (row indices in the source, positions in the epoch) of this shard of batch ``index``."""
        rows = self.rows(index)
        first, last = (len(rows) * shard // self.num_shards for shard in (self.shard_index, self.shard_index + 1))
        return rows[first:last], numpy.arange(index * self.size + first, index * self.size + last)

    def _collate(self, columns: Any, positions: numpy.ndarray) -> Any:
        samples, lists = self._map_samples(unbatch(columns), positions), lists_of(columns)
        if self.collate is not None:
            return self.collate(samples)
        try:
            return collate_nested(samples, lists, self._passthrough if lists else frozenset())
        except CollateError as error:
            hint = "give all samples the same form in .map(), or pass .batch(size, collate=...)"
            raise ConfigurationError(f"{error}; {hint}") from None

    def _map_samples(self, samples: list, positions: numpy.ndarray) -> list:
        for stage in self.sample_maps:
            if stage.stage is None:
                samples = [stage.function(sample) for sample in samples]
            else:
                rngs = self._rng(positions, stage)
                samples = [stage.function(sample, rng=rng) for sample, rng in zip(samples, rngs, strict=True)]
        return samples

    @cached_property
    def _passthrough(self) -> frozenset[Path]:
        """Paths in a sample at which maps return rows of list columns unchanged; found without drawing numbers."""
        with preserve_rng_state() if self.seeded else nullcontext(), self._seeded_generators(0):
            return passthrough_paths(self.source, self._map_samples)

    def _rng(self, positions: numpy.ndarray, stage: Map) -> SampleRng:
        assert stage.stage is not None
        return SampleRng(positions, self.seed, self.epoch, stage.stage)

    def _seeded_generators(self, index: int) -> AbstractContextManager:
        if not self._may_draw:
            return nullcontext()
        return isolated_rng(derive_seed(self.seed, self.epoch, index, self.shard_index))

    @cached_property
    def _may_draw(self) -> bool:
        """Whether a user's function may draw from the global generators, so that they must be seeded for a batch."""
        functions = (stage.function for stage in (*self.sample_maps, *self.batch_maps))
        return self.seeded and not all(map(is_builtin, (self.source, self.collate, *functions)))


class CollateError(ValueError):
    """Samples cannot be stacked into a batch; the message names the part of the samples that differs."""


def passthrough_paths(source: Source, maps: Callable[[list, numpy.ndarray], list]) -> frozenset[Path]:
    """Returns the paths in a sample at which ``maps(samples, rows)`` returns rows of list columns unchanged.

    Found with the first good row of the source. So whether a part of a batch is a list or a tensor does not depend on
    the other rows of the batch.
    """
    for row in range(len(source)):
        rows = numpy.array([row])
        try:
            columns = source.read(rows)
        except BadRow:
            continue
        sample = maps(unbatch(columns), rows)[0]
        return frozenset(_find_paths(sample, [column[0] for column in lists_of(columns)]))
    return frozenset()


def _find_paths(sample: Any, originals: list, path: Path = ()) -> Iterator[Path]:
    if isinstance(sample, Number):  # Python shares the objects of small integers
        return
    if any(sample is original for original in originals):
        yield path
    elif isinstance(sample, (Mapping, tuple, list)):
        for name, part in sample.items() if isinstance(sample, Mapping) else enumerate(sample):
            yield from _find_paths(part, originals, (*path, name))


def collate_nested(
    samples: list, lists: Sequence[list] = (), passthrough: frozenset[Path] = frozenset(), path: Path = ()
) -> Any:
    """Stacks samples into columns with the nesting of a sample: tensors and numbers as one tensor, text as a list.

    A row of a list column (rows of different lengths, images of any size) that the maps return unchanged is in a list
    again, whatever it holds. ``lists`` are the list columns before the maps, ``passthrough`` the paths at which the
    maps return their rows unchanged, ``path`` leads to these samples in those of the pipeline.

    Raises:
        CollateError: Shapes or names differ, a value fits into no tensor, or the maps return only some rows unchanged.
    """
    first = samples[0]
    if isinstance(first, (str, bytes)) or _are_unchanged(samples, lists, path in passthrough, path):
        return samples
    try:
        if isinstance(first, Mapping):
            if any(sample.keys() != first.keys() for sample in samples if isinstance(sample, Mapping)):
                raise ValueError("the names in the samples differ")
            parts = {name: [sample[name] for sample in samples] for name in first}
            return {name: collate_nested(part, lists, passthrough, (*path, name)) for name, part in parts.items()}
        if isinstance(first, (tuple, list)):
            parts = enumerate(list(zip(*samples, strict=True)))  # all at once, so that a wrong length is found first
            columns = [collate_nested(list(part), lists, passthrough, (*path, index)) for index, part in parts]
            return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
        return default_collate(samples)
    except CollateError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, OverflowError) as error:
        forms = " and ".join([*dict.fromkeys(map(_form, samples))][:2])
        reason = format_error(error, 100)
        raise CollateError(f"the samples cannot be stacked: {_format_path(path)} is {forms} ({reason})") from None


def _are_unchanged(samples: list, lists: Sequence[list], expected: bool, path: Path) -> bool:
    """Whether all samples are the very objects in one of ``lists``; CollateError unless all are where ``expected``, and
    none where not.
    """
    if isinstance(samples[0], Number) and not expected:
        return False
    unchanged = max((sum(map(is_, samples, column)) for column in lists), default=0)
    if unchanged != (len(samples) if expected else 0):
        others = "a new value for others; copy the unchanged ones, as with .clone()"
        raise CollateError(f"the map returns {_format_path(path)} unchanged for some rows and {others}")
    return expected


def _format_path(path: Path) -> str:
    return "sample" + "".join(f"[{part!r}]" for part in path)


def lists_of(columns: Any) -> list[list]:
    """Returns those of nested columns that are lists (rows that fit into no tensor), not tensors."""
    return [column for column in column_leaves(columns) if isinstance(column, list)]


def _form(value: Any) -> str:
    """Describes a value for errors: ``float32 (3, 4)``, ``tuple of 2``, ``NoneType``."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {', '.join(map(str, value))}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__


def wants_rng(function: Callable) -> bool:
    """Whether a function has a parameter named ``rng``. ConfigurationError if it requires two other arguments, as with
    tf.data's ``lambda image, label: ...``.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    others = [p for name, p in parameters.items() if name != "rng" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in others if p.default is p.empty]
    if len(required) > 1:
        what = "map() calls its function with one argument, a sample or a batch"
        hint = "unpack a tuple inside, and name the parameter for random numbers rng"
        raise ConfigurationError(f"{what}; this one requires {', '.join(required)}; {hint}")
    return "rng" in parameters


def is_builtin(thing: Any) -> bool:
    """Whether a source or function belongs to hasten, and so draws from ``SampleRng`` only; True for None."""
    return thing is None or (getattr(getattr(thing, "func", thing), "__module__", None) or "").startswith("hasten.")
