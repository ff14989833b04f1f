"""Finds the number of loader workers while the run trains, by measuring how long its steps wait for batches."""

import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hasten import BatchSource, Card, Exactness, Method, RunContext, WorkerConfig, WrapOrder, option
from hasten.core.errors import ConfigurationError, HastenWarning, NoEffectError
from hasten.loading.autotuner import (
    DEFAULT_PREFETCH,
    WAIT_TOLERANCE,
    LoaderAutotuner,
    SearchSpace,
    default_memory_budget,
)
from hasten.loading.probe import is_deterministic, script_may_change
from hasten.loading.read_all import SHARED_FILE, shares_open_file

MAX_DRAWN = 1_000_000  # batches of an epoch, whose order is drawn at its start


@dataclass(frozen=True)
class AutotuneLoader(Method):
    """Finds workers, prefetch and cache by hill climbing, until no step waits for data or no larger setting helps.

    The result is reported as a warning, in result.json under "tuned_settings", and in the recipe of the run directory
    as ``threads``, ``processes``, ``prefetch`` and ``cache``: a run with that recipe starts there, and searches only if
    its steps wait. The batches do not depend on the workers, except where samples that are read in the training process
    make the model draw other numbers from NumPy's or Python's random generators.

    ``threads`` and ``cache`` need a hasten.data pipeline. The search caches its samples where a trial shows that this
    is clearly faster: in memory if they fit into the budget, else on disk, in a quarter of the free space (half of it
    if ``cache=disk`` was given). Validation data of the same type get workers of their own, as many as were found,
    unless the task configures them; these exceed the budgets, but the training workers are idle once they have
    prefetched.
    """

    card = Card(
        summary="find the number of loader workers while training, until no step waits",
        exactness=Exactness.BIT_EXACT,
        source="https://arxiv.org/abs/2101.12127",  # Murray et al. 2021: tf.data and its AUTOTUNE
        gain_when="steps wait for data and cores are idle; the run has to outlast the search, which takes seconds",
        accelerates={"input"},
        applies_to={"workers"},
        order=WrapOrder.EARLY,
        after=("in_memory_batches", "cache_dataset", "loader_workers"),
        high_setup_cost=True,
        script_edit={
            "by_hand": "pass the num_workers that the tuned run has reported to the DataLoader",
        },
    )

    threads: int | None = option(None, at_least=0, at_most=256)  # number to start with
    processes: int | None = option(None, at_least=0, at_most=256)  # number to start with
    prefetch: int | None = option(None, at_least=0, at_most=1024)  # finished batches that may wait, to start with
    cache: str | None = option(None, one_of=("no", "memory", "disk"))  # None: where it turns out to be faster
    cores: int | None = option(None, at_least=1, at_most=256)  # maximum number of workers; None: available CPUs
    gigabytes: float | None = option(None, above=0)  # budget for batches and cached samples; None: 1/4 of free memory

    def __post_init__(self) -> None:
        workers = self.threads or self.processes or 0
        if self.threads and self.processes:
            raise ValueError(f"threads={self.threads} and processes={self.processes} exclude each other; choose one")
        if self.cores is not None and 0 < self.cores < workers:
            raise ValueError(f"{workers} workers are more than cores={self.cores}; take fewer, or raise cores")

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if not batches.training:
            return self._validation_data(batches, run)
        if obstacle := self._obstacle(batches):
            return run.report_no_effect(self, obstacle, batches)
        autotuner = run.checkpoint_state[self.name] = LoaderAutotuner(
            self._initial_workers(_current_workers(batches)),
            cores=self.cores or run.services.available_cpus(),
            memory_budget=default_memory_budget(self.gigabytes, run.services.free_memory),
            cache=self.cache,
            epochs=run.plan.epochs,
            on_converged=self._report(run.tuned_settings, is_pipeline=batches.spec is None),
            data_type=_data_type(batches),
        )
        run.observe_effect(self, partial(_describe, autotuner))
        if batches.with_workers is not None and batches.spec is None:
            return batches.with_workers(autotuner)
        return _autotuned(_pin_for_gpu(batches, run), autotuner, run)

    def _validation_data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        """Validation batches, read by the best workers so far, if they were found on data of the same type."""
        autotuner: LoaderAutotuner | None = run.checkpoint_state.get(self.name)
        if autotuner is None or autotuner.data_type != _data_type(batches):
            return batches
        if _current_workers(batches).num_workers or _depends_on_workers(batches):
            return batches
        if batches.spec is not None and shares_open_file(batches.spec):
            return batches
        with_workers = batches.with_workers or _worker_switch(_pin_for_gpu(batches, run), run)

        def epoch(epoch: int, start: int = 0) -> Iterator[Any]:
            try:
                source = with_workers(autotuner.workers)
            except ConfigurationError:  # a part of this pipeline is the user's and cannot run in threads
                source = batches
            return source.epoch(epoch, start)

        return replace(batches, epoch=epoch, spec=None, with_workers=None)

    def _obstacle(self, batches: BatchSource) -> str | None:
        """Why workers have no effect on these batches, or None; ConfigurationError if an option requires a pipeline."""
        if batches.spec is None:
            return None if batches.with_workers else "no other thread or process can compute these batches"
        if self.threads or self.cache in ("memory", "disk"):
            advice = "pass processes, or add cache_dataset"
            raise ConfigurationError(f"{self.name}: threads and cache require a hasten.data pipeline; {advice}")
        if batches.spec.loader is not None and batches.spec.length > MAX_DRAWN:
            return "an epoch of this DataLoader is too long for its order to be drawn ahead, as of an endless sampler"
        if _depends_on_workers(batches):
            reason = "the samples are random, and each worker of this DataLoader draws from a stream of its own"
            return f"{reason}; pass its dataset as Task(train_data=)"
        return SHARED_FILE if not batches.spec.num_workers and shares_open_file(batches.spec) else None

    def _initial_workers(self, current: WorkerConfig) -> WorkerConfig:
        """The workers that the search starts from: those of options ``threads`` and ``processes``, else ``current``."""
        if self.threads is not None or self.processes is not None:
            current = WorkerConfig(self.threads or 0, self.processes or 0, DEFAULT_PREFETCH)
        most = self.cores or current.num_workers
        prefetch = current.prefetch if self.prefetch is None else self.prefetch
        return WorkerConfig(min(current.threads, most), min(current.processes, most), prefetch)

    def _report(
        self, tuned_settings: dict[str, dict[str, Any]], is_pipeline: bool
    ) -> Callable[[LoaderAutotuner], None]:
        """Callback for the end of the search: stores and reports the settings. No reference to the run: no cycle."""
        defaults = {name: 0 for name in ("threads", "processes") if getattr(self, name)}

        def on_converged(autotuner: LoaderAutotuner) -> None:
            tuned_settings[self.name] = defaults | autotuner.tuned_settings
            waits, initially = autotuner.wait_fraction or 0.0, autotuner.initial_wait_fraction
            message = f"{self.name} converged at {autotuner.workers}"
            if autotuner.cache in ("memory", "disk"):
                message += f", samples cached ({autotuner.cache})"
            message += f": a step waits for data {waits:.1%} of its time"
            if initially is not None:
                message += f", {initially:.0%} at first"
            if waits > WAIT_TOLERANCE and not is_pipeline:
                message += "; in_memory_batches or cache_dataset would keep the samples in memory"
            warnings.warn(message, HastenWarning, stacklevel=2)

        return on_converged


def _describe(autotuner: LoaderAutotuner) -> str:
    if not autotuner.was_asked:
        raise NoEffectError("no batch was requested from the autotuner")
    return f"found {autotuner.workers}" if autotuner.converged else f"searching; now {autotuner.workers}"


def _autotuned(batches: BatchSource, autotuner: LoaderAutotuner, run: RunContext) -> BatchSource:
    """The same batches, read by the worker processes that the autotuner chooses. ``batches.spec`` must be set.

    The order that a task's DataLoader draws is drawn once an epoch, as without hasten; its samples must not be random.
    """
    spec = batches.spec
    assert spec is not None, "the caller has excluded pipelines"
    drawn: list[list[list[int]]] = []  # the order of the epoch that is opened now

    def drawn_order(epoch: int) -> list[list[int]]:
        return drawn[0]

    with_workers = _worker_switch(batches if spec.loader is None else batches.with_spec(batch_sampler=drawn_order), run)
    space = SearchSpace(("processes",), autotuner.cores, lambda: min(autotuner.memory_budget(), _free_shared_memory()))

    def epoch(epoch: int, start: int = 0) -> Iterator[Any]:
        order = [] if spec.loader is None else [*spec.batch_sampler(epoch)]

        def open_iterator(workers: WorkerConfig, done: int) -> Iterator[Any]:
            drawn[:] = [order]  # a script may read two epochs at a time
            return with_workers(workers).epoch(epoch, start + done)

        return autotuner.iterate(open_iterator, space)

    return replace(batches, epoch=epoch, spec=None, with_workers=None)


def _worker_switch(batches: BatchSource, run: RunContext) -> Callable[[WorkerConfig], BatchSource]:
    """``(workers) -> batches``: the same batches, read by so many processes, which end at the next call."""
    current: dict[WorkerConfig, BatchSource] = {}

    def with_workers(workers: WorkerConfig) -> BatchSource:
        if workers not in current:
            current.clear()  # ends the old workers before new ones start
            current[workers] = batches.with_spec(
                num_workers=workers.processes,
                prefetch_factor=workers.prefetch_factor,
                persistent_workers=workers.processes > 0 and not script_may_change(batches.spec, run),
            )
        return current[workers]

    return with_workers


def _data_type(batches: BatchSource) -> type[Any] | None:
    """Type of the dataset or pipeline, for which workers can be reused; None if no worker can compute batches."""
    if batches.spec is None:
        return BatchSource if batches.with_workers else None
    return batches.spec.dataset.__class__


def _current_workers(batches: BatchSource) -> WorkerConfig:
    return batches.workers if batches.spec is None else batches.spec.workers


def _pin_for_gpu(batches: BatchSource, run: RunContext) -> BatchSource:
    return batches.with_spec(pin_memory=True) if run.device.type == "cuda" else batches


def _depends_on_workers(batches: BatchSource) -> bool:
    """Whether random samples would change with the number of workers: those of a task's own DataLoader."""
    return batches.spec is not None and batches.spec.loader is not None and not is_deterministic(batches.spec)


def _free_shared_memory() -> float:
    """Half of the free bytes of /dev/shm, where DataLoader workers store batches; a full one kills a worker."""
    try:
        return shutil.disk_usage("/dev/shm").free / 2
    except OSError:  # batches travel in another way
        return math.inf
