"""Whoever a climber finds: the runner of ``prefetch("auto")``, which also tries what it gives to keep the samples."""

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

PROBED = 32  # rows that are read to know whether samples are the same every time
PASSES_TO_COME = 5  # of a loop that tells nobody how many it will make
SHARE_OF_DISK = 0.25  # of what is free where caches lie, for samples that nobody said should be kept there


@dataclass(frozen=True, eq=False)
class Autotuned:
    """A climber's crews, one after the other; and its cache.

    Attributes:
        in_threads: whether it began in threads, so that nobody is surprised by them.
        kinds: what the crews may be of.
    """

    climber: Climber
    timeout: float | None = None
    in_threads: bool = False
    kinds: tuple[str, ...] = ()
    kept: dict[str, Source] = field(default_factory=dict)  # the source behind its cache, under "source"

    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator:
        def enter(crew: Crew, done: int) -> Iterator:
            return runner_of(crew, self.timeout)(make, numbers[done:])

        return self.climber.over(enter, Choices(self.kinds, self.climber.cores, self.climber.room))

    @property
    def chosen(self) -> dict:
        """What was found so far: threads or processes, ahead, cache."""
        return self.climber.chosen

    @property
    def crew(self) -> Crew:
        return self.climber.crew

    @property
    def processes(self) -> int:
        return self.crew.processes

    def among(self, kinds: tuple[str, ...]) -> Autotuned:
        """The same, whose crews may be of these kinds, as far as the system has them."""
        forks = "fork" in multiprocessing.get_all_start_methods()
        return replace(self, kinds=tuple(kind for kind in kinds if kind == "threads" or forks))

    def anew(self) -> Autotuned:
        """For other batches: what was learnt of these is a hint at most."""
        now = self.climber
        return replace(self, climber=Climber(now.crew, cores=now.cores, room=now.room, passes=now.passes, told=now.told), kept={})

    def everybody(self) -> Runner:
        """The runner for work that no step waits for, such as filling a cache."""
        return runner_of(Crew(**dict.fromkeys(self.kinds[:1], self.climber.cores), ahead=2), self.timeout)

    def kept_from(self, source: Source, maps: tuple[Map, ...], faults: Faults, epoch: int, start: int) -> Source | None:
        """The source after its maps, kept, for the pass that begins; None where nothing is to be kept.

        It is tried once, at the start of a pass, if the steps of a settled crew wait so long that to read everything once would pay.
        """
        climber, where = self.climber, self.climber.cache
        if where is None and start == 0 and self._would_pay(epoch) and worth_keeping(source, maps, faults) and repeatable(source, maps):
            where = self._where_they_fit(source, maps, faults)
            if self._filled(source, maps, where, faults):
                climber.try_cache(where)
                _tell_where(self.kept["source"])
            else:
                climber.cache = "no"
        elif where in ("memory", "disk") and not self._filled(source, maps, where, faults):
            climber.cache = "no"
        if climber.cache == "no":
            self.kept.clear()
        return self.kept.get("source")

    def _would_pay(self, epoch: int) -> bool:
        """Whether what is waited for in the passes to come is more than one pass, about what filling takes."""
        to_come = PASSES_TO_COME if self.climber.passes is None else self.climber.passes - epoch
        return self.climber.settled and self.climber.waits > NO_WAIT and self.climber.waits * to_come > 1

    def _where_they_fit(self, source: Source, maps: tuple[Map, ...], faults: Faults) -> str:
        """In memory, or on the disk where they are too many for that."""
        try:
            first, _ = read_first(cached(source, maps, "memory", None, None, None), faults)
        except (Refusal, Failure):
            return "memory"  # nowhere: why is told when it is filled
        return "memory" if bytes_of(first, len(source)) <= self.climber.room() else "disk"

    def _filled(self, source: Source, maps: tuple[Map, ...], where: str, faults: Faults) -> bool:
        """Whether all samples are kept now, as the data are now; a Notice says why they are not."""
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
        """That the samples may take there; None: as in any cache, where somebody said so or a run before found it."""
        if where == "memory":
            return self.climber.room() / 1e9
        return max(1, SHARE_OF_DISK * free_disk(default_folder())) / 1e9 if self.climber.cache is None else None


def worth_keeping(source: Source, maps: tuple[Map, ...], faults: Faults) -> bool:
    """Whether samples could gain by being kept: they are not in memory as they are used; and all of them have to be good."""
    in_memory = not maps and isinstance(source, (Arrays, Cache))
    return not (in_memory or faults.at_most or any(each.stage is not None for each in maps))


def repeatable(source: Source, maps: tuple[Map, ...]) -> bool:
    """Whether some samples come out the same twice, and draw nothing.

    A map that draws from the generators of the process is found by what it leaves of them, even if it seldom changes a sample.
    """
    rows = numpy.unique(numpy.linspace(0, len(source) - 1, min(PROBED, len(source))).astype(numpy.int64))
    looks = []
    for seed in (0, 1):
        with drawing_apart(seed):
            before = _generators()
            try:
                samples = rows_of(source.read(rows))
                for each in maps:
                    samples = [each.function(sample) for sample in samples]
            except BadRow:
                return False
            if not same(_generators(), before):
                return False
            looks.append(samples)
    return same(*looks)


def _tell_where(kept: Cache) -> None:
    """Of samples that are tried from the disk, where nobody said that they should lie."""
    if isinstance(kept, DiskCache):
        size, there = bytes_of(kept.kept, len(kept)) / 1e9, Folder(kept.folder, kept.made_of).whole
        told = f"the samples are too many for the memory that may be taken, so they are tried from the disk: {size:.3g} GB in {there}"
        warnings.warn(f"{told}, which stay there until somebody deletes them", Notice, stacklevel=2)


def _generators() -> list:
    """The states of the generators of torch, NumPy and Python."""
    return [torch.get_rng_state(), numpy.random.get_state(), random.getstate()]
