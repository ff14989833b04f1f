"""Finds out, while the training runs, by how many threads or processes its batches are computed, and how far ahead."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.data import BatchSource, WorkerConfig
from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.loading.autotuner import (
    DEFAULT_PREFETCH,
    WAIT_TOLERANCE,
    LoaderAutotuner,
    SearchSpace,
    default_memory_budget,
)
from hasten.loading.probe import is_deterministic


@dataclass(frozen=True)
class AutotuneLoader(Method):
    """Climbs on what real steps wait for real batches, and settles as soon as none waits, or nothing helps within the budgets.

    What it found is told, stands in result.json under "tuned_settings", and in the recipe of the run's folder as ``threads``, ``processes``,
    ``ahead`` and ``cache``: a run with that recipe starts there, and climbs only if its steps wait. The batches are the same whoever computes
    them; a model that draws from NumPy's or Python's generators is another matter, for samples that are read in its own process.

    ``threads`` and ``cache`` are for pipelines of hasten.data. Their samples are kept by themselves where that is tried and clearly
    faster: in memory where they fit there, else on the disk, in a quarter of what is free where caches lie; a Notice says where, and
    there they stay. ``cores`` and ``gigabytes``, of memory, are the budgets: unless said, the processors that may be used, and a quarter
    of the memory that is free. A cache that ``cache=disk`` asks for may take half of the free disk. Validation data of the same kind are
    read by as many of their own as were found, unless the task names workers for them; these come on top of both
    budgets, while those of training stand still once they are ahead.
    """

    threads: int | None = option(None, at_least=0, at_most=256)
    processes: int | None = option(None, at_least=0, at_most=256)
    prefetch: int | None = option(None, at_least=0, at_most=1024)  # batches
    cache: str | None = option(None, one_of=("no", "memory", "disk"))
    cores: int | None = option(None, at_least=1, at_most=256)  # workers at most
    gigabytes: float | None = option(None, above=0)  # of batches on their way and of samples that are kept in memory

    card = Card(
        summary="find the number of loader workers while training, until no step waits",
        exactness=Exactness.BIT_EXACT,
        source="https://arxiv.org/abs/2101.12127",  # Murray et al. 2021: tf.data, its AUTOTUNE
        gain_when="steps wait for data and cores are idle; a run has to last longer than the search, which takes seconds",
        accelerates={"input"},
        applies_to={"workers"},
        order=WrapOrder.EARLY,
        after=("in_memory_batches", "cache_dataset", "loader_workers"),
        high_setup_cost=True,
    )

    def __post_init__(self):
        if self.threads and self.processes:
            raise ValueError("threads or processes, not both")
        if (self.cores or 0) > 0 and (self.threads or self.processes or 0) > self.cores:
            raise ValueError(f"{self.threads or self.processes} workers are more than cores={self.cores}")

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if not batches.training:
            return self._validation(batches, run)
        if why_not := self._obstacle(batches):
            run.report_no_effect(self, why_not)
            return batches
        autotuner = run.checkpoint_state[self.name] = LoaderAutotuner(
            self._start(present(batches)),
            cores=self.cores or run.services.available_cpus(),
            memory_budget=default_memory_budget(self.gigabytes, run.services.free_memory),
            cache=self.cache,
            epochs=run.plan.epochs,
            on_converged=self._telling(run.tuned_settings, by_index=batches.spec is not None),
            data_type=kind(batches),
        )
        return batches.with_workers(autotuner) if batches.spec is None else climbed(pinned(batches, run), autotuner)

    def _validation(self, batches: BatchSource, run: RunContext) -> BatchSource:
        """Read by the crew that the climber is at when an evaluation begins, where it is one for these."""
        autotuner = run.checkpoint_state.get(self.name)
        if (
            autotuner is None
            or autotuner.data_type != kind(batches)
            or present(batches).num_workers
            or draws_by_worker(batches)
        ):
            return batches
        by = batches.with_workers if batches.spec is None else hiring(pinned(batches, run))

        def epoch(number: int, start: int = 0) -> Iterator:
            try:
                found = by(autotuner.workers)
            except ConfigurationError:  # of threads: something in these is the user's own
                found = batches
            return found.epoch(number, start)

        return replace(batches, epoch=epoch, samples=None, by=None)

    def _obstacle(self, batches: BatchSource) -> str | None:
        if batches.spec is None:
            return None if batches.with_workers else "nobody else can compute these batches"
        if self.threads or self.cache in ("memory", "disk"):
            raise ConfigurationError(
                f"{self.name}: threads and cache are for pipelines of hasten.data; say processes, or add cache_dataset"
            )
        if draws_by_worker(batches):
            return "the samples are random, and this DataLoader's workers draw from streams of their own; give Task(train_data=) its dataset"
        return None

    def _start(self, now: WorkerConfig) -> WorkerConfig:
        """The crew that the settings name, or the present one."""
        said = self.threads is not None or self.processes is not None
        workers = WorkerConfig(self.threads or 0, self.processes or 0, DEFAULT_PREFETCH) if said else now
        most = self.cores or workers.num_workers
        prefetch = workers.prefetch if self.prefetch is None else self.prefetch
        return WorkerConfig(min(workers.threads, most), min(workers.processes, most), prefetch)

    def _telling(self, chosen: dict[str, dict], by_index: bool) -> Callable[[LoaderAutotuner], None]:
        """What is done when it has settled. It must not hold the run, which holds it: workers would outlive it."""
        unsaid = {name: 0 for name in ("threads", "processes") if getattr(self, name)}
        hint = "; in_memory_batches or cache_dataset would keep the samples in memory" if by_index else ""

        def on_converged(autotuner: LoaderAutotuner) -> None:
            chosen[self.name] = unsaid | autotuner.tuned_settings
            before = (
                f", {autotuner.initial_wait_fraction:.0%} at first"
                if autotuner.initial_wait_fraction is not None
                else ""
            )
            kept = f", samples kept ({autotuner.cache})" if autotuner.cache in ("memory", "disk") else ""
            waits = f"a step waits for data {autotuner.wait_fraction:.1%} of its time{before}"
            text = f"{self.name} has settled at {autotuner.workers}{kept}: {waits}{hint if autotuner.wait_fraction > WAIT_TOLERANCE else ''}"
            warnings.warn(text, HastenWarning, stacklevel=2)

        return on_converged


def climbed(batches: BatchSource, autotuner: LoaderAutotuner) -> BatchSource:
    """Batches of samples that are read by index, by the worker processes that the climber finds.

    What a ready DataLoader draws for the order of a pass is drawn once a pass, as by hand; its samples must not be random.
    """
    samples, drawn = batches.spec, {}
    by = hiring(batches if samples.loader is None else batches.with_spec(order=lambda epoch: drawn["order"]))
    choices = SearchSpace(("processes",), autotuner.cores, lambda: min(autotuner.memory_budget(), shared_memory()))

    def epoch(number: int, start: int = 0) -> Iterator:
        if samples.loader is not None:
            drawn["order"] = list(samples.batch_sampler(number))
        return autotuner.iterate(lambda workers, done: by(workers).epoch(number, start + done), choices)

    return replace(batches, epoch=epoch, samples=None, by=None)


def hiring(batches: BatchSource) -> Callable[[WorkerConfig], BatchSource]:
    """``crew -> batches``: the same, read by that crew's processes, which stay until another crew is asked for."""
    hired = {}

    def by(workers: WorkerConfig) -> BatchSource:
        if workers not in hired:
            hired.clear()  # ends its workers before others begin
            hired[workers] = batches.with_spec(
                workers=workers.processes, prefetch=workers.prefetch_factor, persistent=workers.processes > 0
            )
        return hired[workers]

    return by


def kind(batches: BatchSource) -> type | None:
    """What tells whether a crew that was found for some batches is for others, too; None where nobody else can compute them."""
    if batches.spec is None:
        return BatchSource if batches.with_workers else None
    return type(batches.spec.dataset)


def present(batches: BatchSource) -> WorkerConfig:
    """Who computes them as it is."""
    return batches.workers if batches.spec is None else batches.spec.workers


def pinned(batches: BatchSource, run: RunContext) -> BatchSource:
    return batches.with_spec(pin=True) if run.device.type == "cuda" else batches


def draws_by_worker(batches: BatchSource) -> bool:
    """Whether samples depend on who reads them: the random ones of a ready DataLoader."""
    return batches.spec is not None and batches.spec.loader is not None and not is_deterministic(batches.spec)


def shared_memory() -> float:
    """Bytes that may be taken where torch's workers put their batches; to use it up kills them."""
    try:
        left = os.statvfs("/dev/shm")
    except (OSError, AttributeError):  # batches travel in another way
        return math.inf
    return left.f_bavail * left.f_frsize / 2
