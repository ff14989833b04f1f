"""Finds, while a run trains, the workers that should compute its batches: which kind, how many, how far ahead.

A batch is a function of its index, so other workers can take over between any two batches, and only the time changes.
The autotuner measures real batches and real steps: how long a step waits for its batch, and how long both take
together. It converges as soon as steps do not wait. While they wait it tries the neighbors of the current configuration
(more workers, the other kind, more prefetched batches, fewer workers) within the cores and the memory that it may use,
and keeps a neighbor that is clearly faster. Once converged it hands over the bare iterator, which costs nothing. It
measures again at the start of the next epoch, and searches again if the waiting has come back.

Source: the hill climbing within budgets of tf.data's AUTOTUNE (Murray et al. 2021, https://arxiv.org/abs/2101.12127).
AUTOTUNE makes the input as fast as possible; this autotuner measures the step, too, and stops at fast enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from hasten.core.data import WorkerConfig
from hasten.loading.loader_stats import LoaderProfiler, LoaderStats, record_cuda_event

WAIT_TOLERANCE = 0.01  # fraction of the time; steps that wait no longer than that do not wait
MIN_SPEEDUP = 1.03  # that each of CONFIRMATIONS measurements must show
CONFIRMATIONS = 2
RETRY_WAIT_FRACTION = 0.1  # steps that wait longer after a fruitless search: search once more, another load may be gone
DEFAULT_PREFETCH, MAX_PREFETCH = 2, 16  # finished batches that may wait
FREE_MEMORY_FRACTION = 0.25  # of the free memory, if no budget is given

OpenIterator = Callable[[WorkerConfig, int], Iterator[Any]]
_END = object()


@dataclass(frozen=True)
class SearchSpace:
    """The worker configurations that an autotuner may choose among."""

    kinds: tuple[str, ...]  # the kinds of workers, "threads" or "processes", the one to try first at the front
    cores: int  # maximum number of workers
    memory_budget: Callable[[], float]  # ``() -> bytes`` that batches in flight may take

    def neighbors(self, workers: WorkerConfig, stats: LoaderStats) -> list[WorkerConfig]:
        """The configurations to try next, the most promising first; ``stats`` were measured with ``workers``."""
        count, prefetch = workers.num_workers, workers.prefetch or DEFAULT_PREFETCH
        current = ["threads" if workers.threads else "processes"] if count else []
        kinds = current + [kind for kind in self.kinds if kind not in current]
        work = stats.seconds_per_batch * count if count else stats.wait_s  # of one worker, for one batch
        # workers with which no step waits
        enough = math.ceil(min(work / stats.step_s, self.cores)) if stats.step_s else self.cores
        most = max(count + 1, enough)
        sizes = dict.fromkeys((most, (count + most + 1) // 2, count + 1))
        sizes = [size for size in sizes if size <= max(1, self.cores)]
        found = [_worker_config(kind, size, prefetch) for size in sizes for kind in kinds]
        if count:
            found += [_worker_config(kind, count, prefetch) for kind in kinds[1:]]
            comes_unevenly = stats.wait_s <= stats.step_s  # if it came too slowly, prefetching would not help
            if comes_unevenly and 2 * prefetch <= MAX_PREFETCH:
                found.append(replace(workers, prefetch=2 * prefetch))
            found.append(_worker_config(kinds[0], count // 2, prefetch) if count > 1 else WorkerConfig())
        memory_budget = self.memory_budget()
        return [other for other in found if _bytes_in_flight(other, stats.size) <= memory_budget]


class LoaderAutotuner:
    """Measures the batches of several epochs, and finds the workers that compute them.

    ``workers`` are those to start with; as an attribute, the best configuration so far. ``cores`` is the largest number
    of workers. Batches in flight and cached samples may take ``memory_budget()`` bytes. ``cache`` is where samples are
    cached, "memory", "disk" or "no"; None: wherever it turns out to be faster. The owner of the batches decides whether
    they can be cached, and where they fit. ``epochs`` is the number of epochs, if known. ``on_converged`` is called
    with the autotuner when it converges, and again when it converges to something else. ``data_type`` is stored for the
    owner.
    """

    def __init__(
        self,
        workers: WorkerConfig | None = None,
        *,
        cores: int,
        memory_budget: Callable[[], float],
        cache: str | None = None,
        epochs: float | None = None,
        on_converged: Callable[[LoaderAutotuner], Any] | None = None,
        data_type: type | None = None,
    ) -> None:
        self.workers, self.cores, self.memory_budget = workers or WorkerConfig(), cores, memory_budget
        self.cache, self.epochs, self.on_converged, self.data_type = cache, epochs, on_converged, data_type
        # fraction of the time that a step waited for its batch at convergence; None until then
        self.wait_fraction: float | None = None
        self.initial_wait_fraction: float | None = None  # the same for the configuration it started with
        self.seconds_per_batch: float | None = None  # seconds per batch, its step included, at convergence
        self._uncached: tuple[WorkerConfig, float | None, float] | None = None  # before the cache that is being tried
        self._may_retry = True
        self._reported: dict[str, Any] | None = None
        self._search: Generator[WorkerConfig, LoaderStats | None, LoaderStats | None] | None = None
        self._measured: WorkerConfig | None = None  # the configuration to measure now; None: nothing is measured
        self._profiler = LoaderProfiler(self.workers)
        self._busy = self.was_asked = False

    @property
    def converged(self) -> bool:
        return self.wait_fraction is not None

    @property
    def tuned_settings(self) -> dict[str, Any]:
        """The settings found so far, as options for the next run: {"threads" or "processes": number of workers,
        "prefetch": batches (with workers only), "cache": "memory", "disk" or "no" (once decided)}.
        """
        settings: dict[str, Any] = {"threads" if self.workers.threads else "processes": self.workers.num_workers}
        if self.workers.num_workers:
            settings["prefetch"] = self.workers.prefetch
        return settings if self.cache is None else settings | {"cache": self.cache}

    def iterate(self, open_iterator: OpenIterator, space: SearchSpace) -> Iterator[Any]:
        """Yields the batches of an epoch, with workers from ``space``. ``open_iterator(workers, done)`` returns an
        iterator over the batches without the first ``done``, as these workers compute them.
        """
        if self._busy:  # of two epochs at a time, only the first is measured
            yield from open_iterator(WorkerConfig(), 0)
            return
        self._busy = self.was_asked = True
        done = 0
        workers = WorkerConfig()  # they compute ``batches``, once that is opened
        batches: Iterator[Any] | None = None
        try:
            self._start_epoch(space)
            while self._measured is not None:
                if batches is None or workers != self._measured:
                    _close(batches)
                    workers, batches = self._measured, None
                    if self._profiler.workers != workers:
                        self._profiler = LoaderProfiler(workers)
                    self._profiler.on_enter()
                requested = perf_counter()
                try:
                    batches = iter(open_iterator(workers, done)) if batches is None else batches
                    batch = next(batches, _END)
                except Exception:
                    if workers == self.workers:
                        raise
                    self._report(None)  # if other workers raise it, too, it is raised then
                    continue
                if batch is _END:
                    return
                received, done, arrival = perf_counter(), done + 1, record_cuda_event()
                self._profiler.on_batch(received - requested, batch)
                yield batch
                del batch  # or its memory could not be used for the next one
                if arrival is not None and (end := record_cuda_event()) is not None:
                    self._profiler.on_cuda_events(arrival, end)
                if self._profiler.on_step(perf_counter() - received):
                    self._report(self._profiler.stats())
            if batches is None or workers != self.workers:
                _close(batches)
                batches = iter(open_iterator(self.workers, done))
            yield from batches
        finally:
            _close(batches)
            self._busy = False

    def search(
        self, space: SearchSpace, stats: LoaderStats | None = None
    ) -> Generator[WorkerConfig, LoaderStats | None, LoaderStats | None]:
        """Yields the configuration to measure next and receives its stats, None if it failed.

        ``stats`` is a measurement of the current configuration. At the end ``self.workers`` is the best configuration,
        of which the last measurement is returned.
        """
        measured = [stats or (yield from self._measure_current())]
        accepted, rejected = {self.workers}, set[WorkerConfig]()
        if self.initial_wait_fraction is None:
            self.initial_wait_fraction = measured[0].wait_fraction
        while measured[-1].wait_fraction > WAIT_TOLERANCE:
            for candidate in space.neighbors(self.workers, measured[-1]):
                if candidate in accepted | rejected:
                    continue
                rejected.add(candidate)
                found: list[LoaderStats] = []
                while len(found) < CONFIRMATIONS:
                    new = yield candidate
                    if new is None or not _is_faster(new, measured):
                        break
                    found.append(new)
                if len(found) == CONFIRMATIONS:
                    self.workers, measured, self._may_retry = candidate, found, False
                    accepted.add(candidate)
                    rejected.clear()  # what was no better than the previous configuration may be better than this one
                    break
                if found:  # faster once, and then not: the load of the machine may have changed
                    measured = [measured[-1], (yield from self._measure_current())]
                    if measured[-1].wait_fraction <= WAIT_TOLERANCE:
                        break
            else:
                break
        return measured[-1]

    def try_cache(self, where: str) -> None:
        """Tries a cache at ``where`` from the next epoch on, with a new search; undone unless it is clearly faster."""
        assert self.seconds_per_batch is not None, "a cache is tried after convergence"
        self._uncached = self.workers, self.wait_fraction, self.seconds_per_batch
        self.workers, self.cache = WorkerConfig(), where
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the settings without the search in progress: another process measures anew."""
        return self.__dict__ | {"_search": None, "_measured": None, "_busy": False}

    def state_dict(self) -> dict[str, Any]:
        workers = {name: getattr(self.workers, name) for name in ("threads", "processes", "prefetch")}
        return workers | {name: getattr(self, name) for name in ("wait_fraction", "seconds_per_batch", "cache")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reset()
        threads, processes = (min(state[kind], self.cores) for kind in ("threads", "processes"))
        self.workers = WorkerConfig(threads, processes, state["prefetch"])
        for name in ("wait_fraction", "seconds_per_batch", "cache"):
            setattr(self, name, state[name])

    def _reset(self) -> None:
        self.wait_fraction = self._search = self._measured = None

    def _start_epoch(self, space: SearchSpace) -> None:
        """Continues the search of the last epoch, or starts one; a converged configuration is measured again."""
        if self._search is not None:
            return
        search = self.search if self.wait_fraction is None else self._recheck
        if self.wait_fraction is not None and self.wait_fraction > RETRY_WAIT_FRACTION and self._may_retry:
            search, self._may_retry = self.search, False
        self._search, self._profiler = search(space), LoaderProfiler(self.workers)
        self._measured = next(self._search)

    def _measure_current(self) -> Generator[WorkerConfig, LoaderStats | None, LoaderStats]:
        stats = yield self.workers
        assert stats is not None, "an error of the current workers ends the epoch"
        return stats

    def _recheck(self, space: SearchSpace) -> Generator[WorkerConfig, LoaderStats | None, LoaderStats | None]:
        """Measures a converged configuration again, up to twice. Searches if steps wait each time for a clearly larger
        fraction of the time (WAIT_TOLERANCE + twice that at convergence); returns None if they do not.
        """
        assert self.wait_fraction is not None
        tolerated, stats = WAIT_TOLERANCE + 2 * self.wait_fraction, None
        for _ in range(CONFIRMATIONS):
            stats = yield from self._measure_current()
            if stats.wait_fraction <= tolerated:
                return None
        return (yield from self.search(space, stats))

    def _report(self, stats: LoaderStats | None) -> None:
        """Passes a measurement (None: the configuration failed) to the search, which chooses what to measure next."""
        assert self._search is not None
        measured = self._measured
        try:
            self._measured = self._search.send(stats)
        except StopIteration as end:
            self._search = self._measured = None
            if end.value is not None:
                self._converge(end.value)
        else:
            if self._measured == measured:
                self._profiler = LoaderProfiler(self._measured)

    def _converge(self, stats: LoaderStats) -> None:
        self.wait_fraction, self.seconds_per_batch = stats.wait_fraction, stats.seconds_per_batch
        if self._uncached is not None and self.seconds_per_batch * MIN_SPEEDUP >= self._uncached[-1]:
            self.workers, self.wait_fraction, self.seconds_per_batch = self._uncached
            self.cache = "no"
        self._uncached = None
        if self.on_converged is not None and self._reported != self.tuned_settings:
            self._reported = self.tuned_settings
            self.on_converged(self)


def default_memory_budget(gigabytes: float | None, free_memory: Callable[[], int]) -> Callable[[], float]:
    """Returns ``() -> bytes``: ``gigabytes`` * 10**9, or if None a quarter of ``free_memory()`` at the call. Picklable
    if ``free_memory`` is.
    """
    return partial(_memory_budget, gigabytes, free_memory)


def _memory_budget(gigabytes: float | None, free_memory: Callable[[], int]) -> float:
    return FREE_MEMORY_FRACTION * free_memory() if gigabytes is None else gigabytes * 1e9


def _is_faster(new: LoaderStats, measured: list[LoaderStats]) -> bool:
    """Whether a configuration beats all ``measured`` ones clearly, or is as fast and steps no longer wait."""
    best = min(stats.seconds_per_batch for stats in measured)
    no_longer_waits = new.wait_fraction <= WAIT_TOLERANCE and new.seconds_per_batch <= best
    return new.seconds_per_batch * MIN_SPEEDUP < best or no_longer_waits


def _worker_config(kind: str, count: int, prefetch: int) -> WorkerConfig:
    return WorkerConfig(**{kind: count}, prefetch=prefetch)


def _bytes_in_flight(workers: WorkerConfig, batch_bytes: int) -> int:
    """Bytes of batches that are finished or being computed; twice that for processes (shared memory)."""
    if not workers.num_workers:
        return 0
    return (workers.num_workers + workers.prefetch + 1) * batch_bytes * (2 if workers.processes else 1)


def _close(iterator: Any) -> None:
    if hasattr(iterator, "close"):
        iterator.close()
