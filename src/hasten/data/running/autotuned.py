"""The runner of ``prefetch("auto")``: the autotuner chooses threads or processes, and whether to cache samples."""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch

from hasten.contract.climbing import NO_WAIT, Choices, Climber
from hasten.contract.data import Crew, same
from hasten.contract.errors import Failure, Notice, Refusal
from hasten.data.caching.cache import Cache, DiskCache, cached
from hasten.data.caching.cache_disk import Folder, default_folder, free_disk
from hasten.data.caching.filling import bytes_of, read_first
from hasten.data.chance import drawing_apart
from hasten.data.faults import Faults
from hasten.data.formats.in_memory import Arrays
from hasten.data.making import Map
from hasten.data.running.runners import Runner, runner_of
from hasten.data.source import BadRow, Source, rows_of

PROBED_ROWS = 32  # read twice to find whether samples are deterministic
ASSUMED_EPOCHS = 5  # that remain, if the training loop does not give a number
MAX_DISK_FRACTION = 0.25  # of the free space in the cache folder, for a cache that the user did not request


@dataclass(frozen=True, eq=False)
class Autotuned:
    """Runs batches with the worker configurations that the autotuner tries, and caches the samples if that pays.

    Attributes:
        timeout: Seconds that one batch may take; None waits forever.
        in_threads: Whether the first configuration computes in threads.
        kinds: Worker kinds that may be tried: "threads", "processes".
        kept: {"source": the cached source}, empty without a cache.
    """

    climber: Climber
    timeout: float | None = None
    in_threads: bool = False
    kinds: tuple[str, ...] = ()
    kept: dict[str, Source] = field(default_factory=dict)

    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator:
        def enter(crew: Crew, done: int) -> Iterator:
            return runner_of(crew, self.timeout)(make, numbers[done:])

        return self.climber.over(enter, Choices(self.kinds, self.climber.cores, self.climber.room))

    @property
    def chosen(self) -> dict:
        """The settings found so far: threads or processes, ahead, cache."""
        return self.climber.chosen

    @property
    def crew(self) -> Crew:
        return self.climber.crew

    @property
    def processes(self) -> int:
        return self.crew.processes

    def among(self, kinds: tuple[str, ...]) -> Autotuned:
        """Returns a copy that tries these kinds only; processes only if the system can fork."""
        forks = "fork" in multiprocessing.get_all_start_methods()
        return replace(self, kinds=tuple(kind for kind in kinds if kind == "threads" or forks))

    def anew(self) -> Autotuned:
        """Returns a copy for other batches, which starts the search from the current settings."""
        old = self.climber
        return replace(self, climber=Climber(old.crew, cores=old.cores, room=old.room, passes=old.passes, told=old.told), kept={})

    def everybody(self) -> Runner:
        """Returns a runner that uses all cores, for work outside the training steps such as filling a cache."""
        return runner_of(Crew(**dict.fromkeys(self.kinds[:1], self.climber.cores), ahead=2), self.timeout)

    def kept_from(self, source: Source, maps: tuple[Map, ...], faults: Faults, epoch: int, start: int) -> Source | None:
        """Returns the cached source after its maps for the epoch that begins, or None without a cache.

        A cache is tried once, at the start of an epoch, if the search has converged and steps still wait so long for
        data that reading everything once would pay.
        """
        climber, where = self.climber, self.climber.cache
        if where is None and start == 0 and self._would_pay(epoch) and worth_keeping(source, maps, faults) and repeatable(source, maps):
            where = self._where_they_fit(source, maps, faults)
            if self._filled(source, maps, where, faults):
                climber.try_cache(where)
                _warn_about_disk(self.kept["source"])
            else:
                climber.cache = "no"
        elif where in ("memory", "disk") and not self._filled(source, maps, where, faults):
            climber.cache = "no"
        if climber.cache == "no":
            self.kept.clear()
        return self.kept.get("source")

    def _would_pay(self, epoch: int) -> bool:
        """Whether the time that steps wait in the remaining epochs exceeds one epoch, about what filling takes."""
        remaining = ASSUMED_EPOCHS if self.climber.passes is None else self.climber.passes - epoch
        return self.climber.settled and self.climber.waits > NO_WAIT and self.climber.waits * remaining > 1

    def _where_they_fit(self, source: Source, maps: tuple[Map, ...], faults: Faults) -> str:
        """Returns "memory", or "disk" if the samples do not fit into the memory budget."""
        try:
            first, _ = read_first(cached(source, maps, "memory", None, None, None), faults)
        except (Refusal, Failure):
            return "memory"  # neither works: filling the cache reports the reason
        return "memory" if bytes_of(first, len(source)) <= self.climber.room() else "disk"

    def _filled(self, source: Source, maps: tuple[Map, ...], where: str, faults: Faults) -> bool:
        """Fills or updates the cache. Returns False, with a Notice that gives the reason, if that fails."""
        try:
            kept = self.kept.get("source")
            if kept is None:
                kept = cached(source, maps, where, self._gigabytes(where), None, None)
                if not repeatable(source, maps):
                    raise Refusal("they are random: they differ each time they are made")
            kept.prepare(self.everybody(), faults)
        except (Refusal, Failure) as why:
            warnings.warn(f"the samples are not kept ({where}): {why}", Notice, stacklevel=2)
            return False
        self.kept["source"] = kept
        return True

    def _gigabytes(self, where: str) -> float | None:
        """Returns the limit for the cache; None is the usual one, for a place that the user or an earlier run chose."""
        if where == "memory":
            return self.climber.room() / 1e9
        return max(1, MAX_DISK_FRACTION * free_disk(default_folder())) / 1e9 if self.climber.cache is None else None


def worth_keeping(source: Source, maps: tuple[Map, ...], faults: Faults) -> bool:
    """Whether a cache could help: samples are not in memory in final form, no map is random, no bad row is allowed."""
    in_memory = not maps and isinstance(source, (Arrays, Cache))
    return not (in_memory or faults.at_most or any(stage.stage is not None for stage in maps))


def repeatable(source: Source, maps: tuple[Map, ...]) -> bool:
    """Whether some samples are equal when they are read twice, without using the global random generators.

    The states of the generators reveal a random map even if it seldom changes a sample.
    """
    rows = numpy.unique(numpy.linspace(0, len(source) - 1, min(PROBED_ROWS, len(source))).astype(numpy.int64))
    results = []
    for seed in (0, 1):
        with drawing_apart(seed):
            before = _generator_states()
            try:
                samples = rows_of(source.read(rows))
                for stage in maps:
                    samples = [stage.function(sample) for sample in samples]
            except BadRow:
                return False
            if not same(_generator_states(), before):
                return False
            results.append(samples)
    return same(*results)


def _warn_about_disk(kept: Cache) -> None:
    """Gives a Notice about a cache on disk that the user did not request."""
    if isinstance(kept, DiskCache):
        size, folder = bytes_of(kept.kept, len(kept)) / 1e9, Folder(kept.folder, kept.made_of).whole
        message = f"the samples do not fit into the memory budget, so they are tried from the disk: {size:.3g} GB in {folder}"
        warnings.warn(f"{message}, which stay there until somebody deletes them", Notice, stacklevel=2)


def _generator_states() -> list:
    """Returns the states of the global random generators of torch, NumPy and Python."""
    return [torch.get_rng_state(), numpy.random.get_state(), random.getstate()]
