"""Finds out, while a run goes on, who should compute its batches: how many threads or processes, how far ahead.

A batch is a function of its number, so between any two batches one crew can hand over to another, and nothing but the time changes.
The climber watches real batches and real steps: how long a step waits for its batch, and how long both take together. As soon as no
step waits it settles. As long as one does, it tries the neighbours of the crew (more of them, the other kind, further ahead, fewer)
within the cores and the memory that it may use, and keeps one if the whole goes clearly faster. Once it has settled, the bare iterator
is handed over, which costs nothing; it looks again at the start of the next pass, and climbs on if the waiting is back.

Source: the hill climbing within budgets of tf.data's AUTOTUNE (Murray et al. 2021, https://arxiv.org/abs/2101.12127). That one makes
the input as fast as it can be; this one measures the step as well, and stops when it is fast enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from hasten.core.data import WorkerConfig
from hasten.loading.loader_stats import LoaderProfiler, LoaderStats, gpu_is_busy, record_cuda_event

WAIT_TOLERANCE = 0.01  # of the time: who waits no more than that does not wait
MIN_SPEEDUP = 1.03  # times faster, in every look, or it stays as it was
CONFIRMATIONS = 2  # at a crew, before it is kept
RETRY_WAIT_FRACTION = 0.1  # of the time: who waits so much and has found nobody better climbs once more, in the next pass: it may have been the machine
DEFAULT_PREFETCH, MAX_PREFETCH = 2, 16  # batches that may wait: at first, and at most
FREE_MEMORY_FRACTION = 0.25  # of the memory, where nobody says how much may be taken

OpenIterator = Callable[[WorkerConfig, int], Iterator]
_END = object()


@dataclass(frozen=True)
class SearchSpace:
    """What a climber may choose among.

    Attributes:
        kinds: "threads", "processes": what a crew may be of, the kind to be tried first at the front.
        cores: as many workers at most.
        room: ``() -> bytes`` that batches on their way may take.
    """

    kinds: tuple[str, ...]
    cores: int
    memory_budget: Callable[[], float]

    def neighbors(self, workers: WorkerConfig, seen: LoaderStats) -> list[WorkerConfig]:
        """The crews to be tried next in its place, the most promising first."""
        count, prefetch = workers.num_workers, workers.prefetch or DEFAULT_PREFETCH
        own = ("threads" if workers.threads else "processes",) if count else ()
        kinds = [*own, *(kind for kind in self.kinds if kind not in own)]
        work = seen.seconds_per_batch * count if count else seen.wait_s  # of one worker, for one batch
        wanted = (
            math.ceil(min(work / seen.step_s, self.cores)) if seen.step_s else self.cores
        )  # with as many, no step would wait
        sizes = dict.fromkeys((max(count + 1, wanted), (count + max(count + 1, wanted) + 1) // 2, count + 1))
        larger = [
            _worker_config(kind, size, prefetch) for size in sizes for kind in kinds if size <= max(1, self.cores)
        ]
        others = [_worker_config(kind, count, prefetch) for kind in kinds[1:]] if count else []
        short_of_workers = seen.wait_s > seen.step_s  # then batches come too slowly, not too unevenly
        further = (
            [replace(workers, prefetch=2 * prefetch)]
            if count and not short_of_workers and 2 * prefetch <= MAX_PREFETCH
            else []
        )
        fewer = [_worker_config(own[0], count // 2, prefetch) if count > 1 else WorkerConfig()] if count else []
        memory_budget = self.memory_budget()
        return [
            other
            for other in (*larger, *others, *further, *fewer)
            if _bytes_in_flight(other, seen.size) <= memory_budget
        ]


class LoaderAutotuner:
    """Watches passes over some batches, and finds the crew that computes them.

    Args:
        crew: to begin with.
        cores: workers that there may be at most.
        room: ``() -> bytes`` that batches on their way, and samples that are kept, may take.
        cache: where the samples are kept: "memory" or "disk"; "no": nowhere; None: in either, once that turns out to be faster. It is up
            to whoever makes the batches whether they can be, and where they fit.
        passes: how many there will be, where that is known.
        told: called with itself when it has settled, and again when it settles at something else.
        of: the kind of data that it was made for, kept for whoever made it.

    Attributes:
        crew: the best so far.
        waits: the share of its time that a step waited for its batch when this settled; None as long as it has not.
        waited_first: the same, of the crew that it began with.
        pace: seconds a batch, its step included, when it settled.
    """

    def __init__(
        self,
        workers: WorkerConfig | None = None,
        *,
        cores: int,
        memory_budget: Callable[[], float],
        cache: str | None = None,
        passes: float | None = None,
        told: Callable[[LoaderAutotuner], Any] | None = None,
        of: type | None = None,
    ):
        self.workers, self.cores, self.memory_budget, self.cache, self.passes = (
            workers or WorkerConfig(),
            cores,
            memory_budget,
            cache,
            passes,
        )
        self.on_converged, self.of = told, of
        self.wait_fraction = self.initial_wait_fraction = self.seconds_per_batch = None
        self._without: tuple | None = None  # how it was without a cache that is being tried
        self._once_more, self._said = True, None
        self._search: Generator[WorkerConfig, LoaderStats | None, LoaderStats | None] | None = None
        self._watched: WorkerConfig | None = None  # the crew to be looked at now; None: nobody looks
        self._watch: LoaderProfiler | None = None
        self._busy = False

    @property
    def converged(self) -> bool:
        return self.wait_fraction is not None

    @property
    def tuned_settings(self) -> dict:
        """What it found, as settings for the next run."""
        kind = "threads" if self.workers.threads else "processes"
        workers = {kind: self.workers.num_workers} | (
            {"prefetch": self.workers.prefetch} if self.workers.num_workers else {}
        )
        return workers | ({} if self.cache is None else {"cache": self.cache})

    def iterate(self, enter: OpenIterator, choices: SearchSpace) -> Iterator:
        """The batches of a pass.

        Args:
            enter: ``(crew, done) -> iterator``: the batches after the first ``done`` of these, as that crew computes them.
        """
        if self._busy:  # two passes at a time: who waits for whom?
            yield from enter(WorkerConfig(), 0)
            return
        self._busy, done, workers, inner, queued = True, 0, None, None, None
        try:
            self._start_epoch(choices)
            while self._watched is not None:
                if workers != self._watched:
                    _close(inner)
                    workers, inner, queued = self._watched, None, None
                    self._watch = (
                        self._watch if self._watch and self._watch.workers == workers else LoaderProfiler(workers)
                    )
                    self._watch.on_enter()
                asked = perf_counter()
                try:
                    inner = iter(enter(workers, done)) if inner is None else inner
                    batch = next(inner, _END)
                except Exception:
                    if workers == self.workers:
                        raise
                    self._report(None)  # if it is not this crew's fault, the one before it will tell
                    continue
                if batch is _END:
                    return
                given, done = perf_counter(), done + 1
                self._watch.on_batch(0.0 if gpu_is_busy(queued) else given - asked, batch)
                yield batch
                del batch  # or its memory could not be used again for the next one
                queued = record_cuda_event()
                if self._watch.on_step(perf_counter() - given):
                    self._report(self._watch.stats())
            if workers != self.workers:
                _close(inner)
                inner = iter(enter(self.workers, done))
            yield from inner
        finally:
            _close(inner)
            self._busy = False

    def search(
        self, choices: SearchSpace, seen: LoaderStats | None = None
    ) -> Generator[WorkerConfig, LoaderStats | None, LoaderStats]:
        """Yields the crew to look at next, and is sent what was seen, None where it failed; at the end ``self.crew`` is the best.

        Args:
            seen: a look at the present crew.

        Returns:
            The last look at the best.
        """
        looks, had, tried = [seen or (yield self.workers)], {self.workers}, set()
        self.initial_wait_fraction = (
            looks[0].wait_fraction if self.initial_wait_fraction is None else self.initial_wait_fraction
        )
        while looks[-1].wait_fraction > WAIT_TOLERANCE:
            for other in choices.neighbors(self.workers, looks[-1]):
                if other in had | tried:
                    continue
                tried.add(other)
                found = []
                while len(found) < CONFIRMATIONS and _is_faster(look := (yield other), looks):
                    found.append(look)
                if len(found) == CONFIRMATIONS:
                    self.workers, looks, self._once_more = other, found, False
                    had.add(other)
                    tried.clear()  # who was no better than the one before may be better than this one
                    break
                if found:  # better once, and then not: the machine may be another by now
                    looks = [looks[-1], (yield self.workers)]
                    if looks[-1].wait_fraction <= WAIT_TOLERANCE:
                        break
            else:
                break
        return looks[-1]

    def try_cache(self, where: str) -> None:
        """From the next pass on the samples are kept: climbs anew, from nobody, and gives it up if that is not clearly faster."""
        self._without = self.workers, self.wait_fraction, self.seconds_per_batch
        self.workers, self.cache = WorkerConfig(), where
        self._reset()

    def __getstate__(self) -> dict:
        return self.__dict__ | {
            "_search": None,
            "_watched": None,
            "_watch": None,
            "_busy": False,
        }  # another process looks for itself

    def state_dict(self) -> dict:
        workers = {
            "threads": self.workers.threads,
            "processes": self.workers.processes,
            "prefetch": self.workers.prefetch,
        }
        return {
            **workers,
            "wait_fraction": self.wait_fraction,
            "seconds_per_batch": self.seconds_per_batch,
            "cache": self.cache,
        }

    def load_state_dict(self, state: dict) -> None:
        self._reset()
        self.workers = WorkerConfig(
            min(state["threads"], self.cores), min(state["processes"], self.cores), state["prefetch"]
        )
        self.wait_fraction, self.seconds_per_batch, self.cache = (
            state["wait_fraction"],
            state["seconds_per_batch"],
            state["cache"],
        )

    def _reset(self) -> None:
        self.wait_fraction = self._search = self._watched = self._watch = None

    def _start_epoch(self, choices: SearchSpace) -> None:
        """A pass begins: a search goes on, or starts; what it settled at is doubted."""
        if self._search is None:
            in_vain = self.converged and self.wait_fraction > RETRY_WAIT_FRACTION and self._once_more
            self._once_more = self._once_more and not in_vain
            self._search, self._watch = (
                (self._recheck if self.converged and not in_vain else self.search)(choices),
                None,
            )
            self._watched = next(self._search)

    def _recheck(self, choices: SearchSpace) -> Generator[WorkerConfig, LoaderStats | None, LoaderStats | None]:
        """Searches again, if the steps wait far more than they did when this settled."""
        for _ in range(CONFIRMATIONS):
            seen = yield self.workers
            if seen.wait_fraction <= WAIT_TOLERANCE + 2 * self.wait_fraction:
                return None
        return (yield from self.search(choices, seen))

    def _report(self, look: LoaderStats | None) -> None:
        looked_at = self._watched
        try:
            self._watched = self._search.send(look)
            self._watch = LoaderProfiler(looked_at) if self._watched == looked_at else None
        except StopIteration as end:
            self._search = self._watched = self._watch = None
            if end.value is not None:
                self._converge(end.value)

    def _converge(self, look: LoaderStats) -> None:
        self.wait_fraction, self.seconds_per_batch = look.wait_fraction, look.seconds_per_batch
        if self._without is not None and self.seconds_per_batch * MIN_SPEEDUP >= self._without[-1]:
            self.workers, self.wait_fraction, self.seconds_per_batch = self._without
            self.cache = "no"
        self._without = None
        if self.on_converged is not None and self._said != self.tuned_settings:
            self._said = self.tuned_settings
            self.on_converged(self)


def default_memory_budget(gigabytes: float | None, free_memory: Callable[[], int]) -> Callable[[], float]:
    """As ``Climber(room=)``: the bytes that somebody allows, or a part of what is free."""
    return partial(_memory_budget, gigabytes, free_memory)


def _memory_budget(gigabytes: float | None, free_memory: Callable[[], int]) -> float:
    return FREE_MEMORY_FRACTION * free_memory() if gigabytes is None else gigabytes * 1e9


def _is_faster(look: LoaderStats | None, than: list[LoaderStats]) -> bool:
    """Whether it is clearly faster, or needs no more time and no longer waits."""
    if look is None:
        return False
    least = min(each.seconds_per_batch for each in than)
    return look.seconds_per_batch * MIN_SPEEDUP < least or (
        look.wait_fraction <= WAIT_TOLERANCE and look.seconds_per_batch <= least
    )


def _worker_config(kind: str, count: int, prefetch: int) -> WorkerConfig:
    return WorkerConfig(**{kind: count}, prefetch=prefetch)


def _bytes_in_flight(workers: WorkerConfig, size: int) -> int:
    """That its batches take on their way; a process has them in shared memory as well."""
    return (
        (workers.num_workers + workers.prefetch + 1) * size * (2 if workers.processes else 1)
        if workers.num_workers
        else 0
    )


def _close(iterator: Iterator | None) -> None:
    if hasattr(iterator, "close"):
        iterator.close()
