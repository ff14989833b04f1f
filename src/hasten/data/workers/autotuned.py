"""The runner of ``prefetch("auto")``: the autotuner chooses threads or processes, and whether to cache samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from hasten.core.data import WorkerConfig
from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.data.array_source import Arrays
from hasten.data.batch_builder import Map
from hasten.data.cache.cache import Cache, DiskCache, bytes_of, cached, read_first
from hasten.data.cache.cache_disk import CacheDirectory, free_disk
from hasten.data.io.metadata_cache import default_directory
from hasten.data.rng import isolated_rng
from hasten.data.source import BadRow, BadRowPolicy, Source, unbatch
from hasten.data.workers.runners import Runner, runner_of
from hasten.loading.autotuner import WAIT_TOLERANCE, LoaderAutotuner, SearchSpace
from hasten.utils.rng import get_rng_state
from hasten.utils.tree import bitwise_equal

PROBED_ROWS = 32  # read twice to find whether samples are deterministic
ASSUMED_EPOCHS = 5  # that remain, if the training loop does not give a number
MAX_DISK_FRACTION = 0.25  # of the free space in the cache directory, for a cache that the user has not requested


@dataclass(frozen=True, eq=False)
class AutotunedRunner:
    """Runs batches with the worker configurations that the autotuner tries, and caches the samples if that pays."""

    autotuner: LoaderAutotuner  # searches the worker configuration
    timeout: float | None = None  # seconds that one batch may take; None waits forever
    in_threads: bool = False  # whether the first configuration computes in threads
    kinds: tuple[str, ...] = ()  # worker kinds that may be tried: "threads", "processes"
    active_cache: dict[str, Cache] = field(default_factory=dict)  # {"source": the cached source}, empty without a cache

    def __call__(self, make: Callable[[int], Any], indices: range) -> Iterator:
        def open_iterator(workers: WorkerConfig, done: int) -> Iterator:
            return runner_of(workers, self.timeout)(make, indices[done:])

        space = SearchSpace(self.kinds, self.autotuner.cores, self.autotuner.memory_budget)
        return self.autotuner.iterate(open_iterator, space)

    @property
    def tuned_settings(self) -> dict:
        """The settings found so far: {"threads" or "processes": workers, "prefetch": batches, "cache": location}."""
        return self.autotuner.tuned_settings

    @property
    def workers(self) -> WorkerConfig:
        return self.autotuner.workers

    def reset(self) -> AutotunedRunner:
        """Returns a copy for other batches, which starts the search from the current settings."""
        options = {name: getattr(self.autotuner, name) for name in ("cores", "memory_budget", "epochs", "on_converged")}
        return replace(self, autotuner=LoaderAutotuner(self.workers, **options), active_cache={})

    def bulk_runner(self) -> Runner:
        """Returns a runner that uses all cores, for work outside the training steps such as filling a cache."""
        return runner_of(WorkerConfig(**dict.fromkeys(self.kinds[:1], self.autotuner.cores), prefetch=2), self.timeout)

    def cached_source(
        self, source: Source, maps: tuple[Map, ...], faults: BadRowPolicy, epoch: int, start: int
    ) -> Source | None:
        """Returns the filled cache that replaces ``source`` and its maps in this epoch; None without a cache.

        A cache is tried once, at the start of an epoch, if the search has converged and steps still wait so long for
        data that reading everything once would pay.
        """
        autotuner, where = self.autotuner, self.autotuner.cache
        may_try = where is None and start == 0 and self._would_pay(epoch)
        if may_try and is_cacheable(source, maps, faults) and is_repeatable(source, maps):
            where = self._choose_location(source, maps, faults)
            if self._fill(source, maps, where, faults):
                autotuner.try_cache(where)
                _warn_about_disk(self.active_cache["source"])
            else:
                autotuner.cache = "no"
        elif where in ("memory", "disk") and not self._fill(source, maps, where, faults):
            autotuner.cache = "no"
        if autotuner.cache == "no":
            self.active_cache.clear()
        return self.active_cache.get("source")

    def _would_pay(self, epoch: int) -> bool:
        """Whether the time that steps wait in the remaining epochs exceeds one epoch, about what filling takes."""
        waiting = self.autotuner.wait_fraction  # None until the search has converged
        remaining = ASSUMED_EPOCHS if self.autotuner.epochs is None else self.autotuner.epochs - epoch
        return waiting is not None and waiting > WAIT_TOLERANCE and waiting * remaining > 1

    def _choose_location(self, source: Source, maps: tuple[Map, ...], faults: BadRowPolicy) -> str:
        """Returns "memory", or "disk" if the samples do not fit into the memory budget."""
        try:
            first, _ = read_first(cached(source, maps, "memory", None, None), faults)
        except (ConfigurationError, RunError):
            return "memory"  # neither works; filling the cache reports the reason
        return "memory" if bytes_of(first, len(source)) <= self.autotuner.memory_budget() else "disk"

    def _fill(self, source: Source, maps: tuple[Map, ...], where: str, faults: BadRowPolicy) -> bool:
        """Fills or updates the cache; returns whether that succeeded. A failure is a warning with the reason."""
        try:
            cache = self.active_cache.get("source")
            if cache is None:
                cache = cached(source, maps, where, self._gigabytes(where), None)
                if not is_repeatable(source, maps):
                    raise ConfigurationError("the samples are random or cannot be read: two reads do not give the same")
            cache.prepare(self.bulk_runner(), faults)
        except (ConfigurationError, RunError) as error:
            warnings.warn(f"the samples are not cached ({where}): {error}", HastenWarning, stacklevel=2)
            return False
        self.active_cache["source"] = cache
        return True

    def _gigabytes(self, where: str) -> float | None:
        """Returns the limit of the cache in 10**9 bytes; None, its default, on a disk that the user or an earlier run
        chose.
        """
        if where == "memory":
            return self.autotuner.memory_budget() / 1e9
        if self.autotuner.cache is not None:
            return None
        return max(1, MAX_DISK_FRACTION * free_disk(default_directory())) / 1e9


def is_cacheable(source: Source, maps: tuple[Map, ...], faults: BadRowPolicy) -> bool:
    """Whether a cache could help: rows are not in memory already, no map is random, no bad rows may be skipped."""
    in_memory = not maps and isinstance(source, (Arrays, Cache))
    return not (in_memory or faults.max_rows or any(stage.stage is not None for stage in maps))


def is_repeatable(source: Source, maps: tuple[Map, ...]) -> bool:
    """Whether up to 32 samples can be read, are equal when they are read twice, and draw nothing from the global random
    generators, whose states reveal a random map even if it seldom changes a sample.
    """
    rows = numpy.unique(numpy.linspace(0, len(source) - 1, min(PROBED_ROWS, len(source))).astype(numpy.int64))
    results = []
    for seed in (0, 1):
        with isolated_rng(seed):
            before = get_rng_state()
            try:
                samples = unbatch(source.read(rows))
                for stage in maps:
                    samples = [stage.function(sample) for sample in samples]
            except BadRow:
                return False
            if not bitwise_equal(get_rng_state(), before):
                return False
            results.append(samples)
    return bitwise_equal(*results)


def _warn_about_disk(cache: Cache) -> None:
    """Warns where a disk cache that the autotuner created lies, and how large it is; nothing deletes it."""
    if isinstance(cache, DiskCache) and cache.identity is not None:
        size = bytes_of(cache.columns, len(cache)) / 1e9
        directory = CacheDirectory(cache.directory, cache.identity).path
        reason = "the samples do not fit into the memory budget"
        message = f"{reason}; trying a cache on disk: {size:.3g} GB in {directory}, which stay until you delete them"
        warnings.warn(message, HastenWarning, stacklevel=2)
