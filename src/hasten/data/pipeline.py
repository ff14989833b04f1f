"""The pipeline: from rows to batches on the device.

    parquet("train/*.parquet", target="label").shuffle(seed=0).map(f).batch(512)

Its one idea: *a batch is a function of (seed, epoch, number)*. Who computes it, a thread, a process, another rank or a
run that was resumed, makes no difference; and the place in the data is three integers.

``map`` before ``batch`` gets one sample at a time, ``map`` after it a whole batch, which is faster. A function that wants
random numbers takes a parameter called ``chance``, a ``Chance``, whose numbers belong to the places in the pass. The generators of
torch, NumPy and Python start every batch from a seed of its own; but threads share them, so there a function that draws from them is
refused.

A Task takes a pipeline as it is: it is shuffled only if it says so with ``shuffle``, and its ``batch(size)`` comes before
``Task(batch_size=)``, which is for pipelines that name none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from hasten.core.data import BatchSource, WorkerConfig
from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.core.progress import ProgressCallback
from hasten.data.bad_rows import BadRowPolicy
from hasten.data.batch_builder import BatchBuilder, Map, is_builtin, wants_rng
from hasten.data.sampler import DeterministicBatchSampler
from hasten.data.source import Source
from hasten.data.validation import at_least, check_int, check_positive
from hasten.data.workers import runners
from hasten.data.workers.to_device import copy_to_device
from hasten.engine.resources import available_cpus, free_memory
from hasten.loading.autotuner import DEFAULT_PREFETCH, LoaderAutotuner, default_memory_budget

MOST_WORKERS, MOST_AHEAD = 256, 1024  # beyond them nothing is gained, and systems run out of processes and open files
SECONDS = 600.0  # in which a batch has to come


@dataclass
class Position:
    """Where a pipeline stands: the pass, and how many rows of it were given out."""

    epoch: int = 0
    position: int = 0
    begun: bool = False  # that pass was iterated here; iterating again means the next one
    draws_nothing: bool = False  # threads were wanted, and what is not ours was looked at


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Rows, their order, and what becomes of them. Every method returns a new pipeline; nothing is read before iteration.

    Iterating makes one pass; iterating again the next one, in its own order, also when the first was left early. What does not change
    the batches (``prefetch``, ``share``, ``skip_bad``, ``to``) shares the place, so ``for batch in train.to(device)`` goes on, too.
    """

    source: Source
    batch_size: int | None = None
    seed: int = 0
    shuffled: bool = False
    window: int | None = None
    drop_last: bool = False
    sample_maps: tuple[Map, ...] = ()
    batch_maps: tuple[Map, ...] = ()
    collate_fn: Callable[[list], Any] | None = None
    runner: runners.Runner = field(default_factory=runners.InlineRunner)
    rank: int = 0
    world: int = 1
    device: torch.device | None = None
    faults: BadRowPolicy = field(default_factory=BadRowPolicy)
    position: Position = field(default_factory=Position, repr=False)

    # ---- what the user says

    def shuffle(self, seed: int = 0, window: int | None = None) -> Pipeline:
        """A new random order every pass, a function of (seed, epoch).

        Args:
            window: mixes only so many runs of rows (row groups, shards) at a time, for data that are too many to be read in any order.
        """
        at_least("shuffle(window=)", window, 1, optional=True)
        at_least("shuffle(seed=)", seed, 0)
        return self._anew(seed=seed, shuffled=True, window=window)

    def map(self, function: Callable) -> Pipeline:
        """Before ``batch``: ``function(sample)``; after it: ``function(batch)``; with ``chance=``, if it has a parameter of that name.

        Samples are stacked to a batch in the nesting that they have: a tuple of samples' parts becomes a tuple of tensors.
        Rows of a list that are handed on as they are stay one: all rows of all batches, or none; a map that changes some copies the others.

        Raises:
            Refusal: no function, or one that wants several other things.
        """
        if not callable(function):
            raise ConfigurationError(f"map() wants a function, not a {type(function).__name__}")
        random_ones = sum(each.stage is not None for each in (*self.sample_maps, *self.batch_maps))
        made = Map(function, random_ones if wants_rng(function) else None)
        if self.batch_size is None:
            return self._anew(sample_maps=(*self.sample_maps, made))
        return self._anew(batch_maps=(*self.batch_maps, made))

    def batch(self, size: int, *, drop_last: bool = False, collate: Callable[[list], Any] | None = None) -> Pipeline:
        """Batches of ``size`` rows; with several ranks, that is what all of them see together in a step.

        Args:
            collate: ``(list of samples) -> batch``; as torch's default, but with tuples, where nobody says.
        """
        at_least("batch(size)", size, 1)
        if collate is not None and not callable(collate):
            raise ConfigurationError(
                f"batch(collate=) is a function (list of samples) -> batch, not a {type(collate).__name__}"
            )
        return self._anew(batch_size=size, drop_last=drop_last, collate_fn=collate)

    def cache(
        self,
        where: str = "memory",
        *,
        gigabytes: float | None = None,
        folder: str | Path | None = None,
        watch: ProgressCallback | None = None,
    ) -> Pipeline:
        """Keeps the samples, as the maps so far leave them, so that they are read and decoded once; filled when first iterated.

        Args:
            where: "memory", for this pipeline alone, or "disk", for all processes and later runs; found again by the content of the
                data and of the maps, so that it is made anew when one of them changed.
            gigabytes: (10**9 bytes) that the samples kept here may take, in memory or on the disk; None: half of what is free there.
                More is refused before any is kept. It bounds neither the folder, where nothing that is whole is ever deleted (other
                caches, and those of data that have changed since), nor what is read meanwhile, some 16 MB a worker.
            folder: of a disk cache; None: HASTEN_CACHE, or hasten's folder among the user's caches.
            watch: ``(what, done, seconds left)`` is told how far the filling is; None: a Notice when it takes long.

        Raises:
            Refusal: a map that wants random numbers comes before it, or whose function cannot be told from a changed one.
            Refusal: when first iterated, if the samples differ in shape or need more than was allowed.
            Failure: when first iterated, if the disk is full or may not be written to; nothing half-made is left.
        """
        from hasten.data.cache.cache import cached

        if self.batch_size is not None:
            raise ConfigurationError("cache() keeps samples; it belongs before .batch()")
        source = cached(self.source, self.sample_maps, where, gigabytes, folder, watch)
        return self._anew(source=source, sample_maps=())

    def prefetch(
        self,
        batches: int | str = 2,
        *,
        threads: int = 0,
        processes: int = 0,
        timeout: float | None = SECONDS,
        cores: int | None = None,
        gigabytes: float | None = None,
    ) -> Pipeline:
        """Computes batches ahead of their use, in threads (for what leaves Python's lock) or processes (for what does not).

        Args:
            batches: that may wait; or "auto": how many of all of these is found out while the batches are used, and whether the samples
                are better kept: in memory or, where they are too many for that, on the disk, in a quarter of what is free where caches
                lie (HASTEN_CACHE); there they stay, and a Notice says where. It stops as soon as nobody waits for a batch.
                ``pipeline.runner.chosen`` tells what was found, and a Notice.
            threads, processes: of one kind only; with "auto" those to begin with. Functions that may draw from the generators of the
                process get no threads by themselves; those that do so in the first batch are refused in threads.
            timeout: seconds that may be waited for a batch before it is told that somebody hangs; None: for ever.
            cores: with "auto": workers that there may be at most; None: as many as the processors that may be used.
            gigabytes: (10**9 bytes) with "auto": of memory, what batches on their way and samples that are kept may take; None: a quarter
                of what is free.
        """
        auto = batches == "auto"
        if not auto:
            at_least("prefetch(batches=)", batches, 0, most=MOST_AHEAD)
        for name, value in {"threads": threads, "processes": processes}.items():
            at_least(f"prefetch({name}=)", value, 0, most=MOST_WORKERS)
        if threads and processes:
            raise ConfigurationError("prefetch() takes threads or processes, not both")
        check_positive("prefetch(timeout=), in seconds,", timeout)
        check_positive("prefetch(gigabytes=)", gigabytes)
        at_least("prefetch(cores=)", cores, 1, optional=True, most=MOST_WORKERS)
        if not auto:
            if cores is not None or gigabytes is not None:
                raise ConfigurationError(
                    'prefetch(cores=) and (gigabytes=) are limits for what is found out; say prefetch("auto", ...)'
                )
            workers = WorkerConfig(threads or int(batches > 0 and not processes), processes, batches)
            return self._with(runner=runners.runner_of(workers, timeout))
        workers = WorkerConfig(threads, processes, DEFAULT_PREFETCH if threads or processes else 0)
        autotuner = LoaderAutotuner(
            workers,
            cores=cores or available_cpus(),
            memory_budget=default_memory_budget(gigabytes, free_memory),
            on_converged=_tell,
        )
        return self._with(runner=_autotuned(autotuner, timeout, threads > 0))

    def shard(self, rank: int, world: int) -> Pipeline:
        """This rank's part of every batch."""
        at_least("share(world)", world, 1)
        at_least("share(rank)", rank, 0)
        if rank >= world:
            raise ConfigurationError(f"share(rank={rank}, world={world}): a rank is from 0 to world - 1")
        return self._with(rank=rank, world=world)

    def skip_bad_rows(self, at_most: int) -> Pipeline:
        """Leaves out rows that cannot be read, up to ``at_most`` of them; ``faults.found`` lists them."""
        at_least("skip_bad(at_most)", at_most, 0)
        return self._with(faults=BadRowPolicy(at_most))

    def to(self, device: str | torch.device) -> Pipeline:
        """Batches on a device; a GPU's are copied from page-locked memory while the step before goes on."""
        if not isinstance(device, (str, torch.device)):
            raise ConfigurationError(f'to() wants a device, as .to("cuda"), not {device!r:.80}')
        try:
            return self._with(device=torch.device(device))
        except RuntimeError:
            raise ConfigurationError(f"there is no device {device!r:.80}; say cpu, cuda or cuda:1") from None

    # ---- iterating, and the place

    def __iter__(self) -> Iterator:
        place = self.position
        if place.begun:
            place.epoch, place.position = place.epoch + 1, 0
        place.begun = True
        batches, rows = self.epoch(place.epoch, self._order().number_at(place.position)), len(self.source)
        for batch in batches:
            place.position = min(place.position + self.batch_size, rows)
            yield batch
            del batch  # or its memory could not be used again for the next one
        place.epoch, place.position, place.begun = place.epoch + 1, 0, False

    def __len__(self) -> int:
        """Batches a pass has; a TypeError as long as nobody has said how large they are."""
        if self.batch_size is None:
            raise TypeError("the pipeline has no length yet; end it with .batch(size)")
        return len(self._order())

    def state_dict(self) -> dict[str, int]:
        """The place: (seed, epoch, position). ``position`` counts rows, whatever the batch size and the number of ranks."""
        return {"seed": self.seed, "epoch": self.position.epoch, "position": self.position.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration goes on at that place.

        Raises:
            Refusal: the place of another order, or none at all; no batch begins there; the pipeline has no batch size yet.
        """
        if not isinstance(state, Mapping):
            raise ConfigurationError(f"a place is a dict of seed, epoch and position, not a {type(state).__name__}")
        if not {"seed", "epoch", "position"} <= state.keys():
            raise ConfigurationError(
                f"a place has seed, epoch and position; this one has {', '.join(map(str, state)) or 'nothing':.200}"
            )
        seed, epoch, position = (
            check_int(f"the place's {name}", state[name]) for name in ("seed", "epoch", "position")
        )
        if seed != self.seed:
            raise ConfigurationError(
                f"this place belongs to seed {seed}, the pipeline has {self.seed}; say .shuffle(seed={seed})"
            )
        at_least("the place's epoch", epoch, 0)
        if position > len(self.source):
            raise ConfigurationError(
                f"the place begins at row {position} of a pass, and there are only {len(self.source)} rows"
            )
        self._order().number_at(position)
        self._go_to(epoch, position)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this pass: what trainers call on a DistributedSampler. A place that was loaded in this pass stays."""
        epoch = check_int("set_epoch(epoch)", epoch)
        at_least("set_epoch(epoch)", epoch, 0)
        if self.position.begun or self.position.epoch != epoch:
            self._go_to(epoch, 0)

    # ---- what trainers expect of a DataLoader besides

    batch_sampler: ClassVar[None] = None  # as of a DataLoader over whole batches
    pin_memory: ClassVar[bool] = False

    @property
    def dataset(self) -> Source:
        return self.source

    @property
    def sampler(self) -> Pipeline:
        return self  # trainers call its set_epoch

    @property
    def num_workers(self) -> int:
        return getattr(self.runner, "processes", 0)

    # ---- what the engine calls

    def epoch(self, epoch: int, start: int = 0) -> Iterator:
        """The batches of one pass from number ``start`` on; the place is left alone."""
        runner, source, maps = self.runner, self.source, self.sample_maps
        if auto := hasattr(runner, "cached_source"):
            runner = runner.restrict(
                ("processes",) if self._foreign() and not runner.in_threads else ("threads", "processes")
            )
        self._refuse_known()
        source.prepare(runner.bulk_runner() if auto else runner, self.faults)
        if (
            auto
            and self.collate_fn is None
            and (kept := runner.cached_source(source, maps, self.faults, epoch, start)) is not None
        ):
            source, maps = kept, ()
        order = self._order()
        make = BatchBuilder(
            source,
            order.batches(epoch),
            self.batch_size,
            self.seed,
            epoch,
            maps,
            self.batch_maps,
            self.collate_fn,
            self.rank,
            self.world,
            self.faults,
            seeded=not runners.in_threads(runner),
        )
        made = runner(make, range(start, len(order)))
        if runners.in_threads(runner) and start < len(order) and self._foreign() and not self.position.draws_nothing:
            made = self._unless_it_draws(make, start, made)
        noted = self._noted(made)
        return noted if self.device is None else copy_to_device(noted, self.device)

    def batches(self, batch_size: int, seed: int, training: bool) -> BatchSource:
        """This pipeline as the engine's Batches: shuffled only if it says so; for validation never, and in its own batch size, if it has one.

        Args:
            batch_size: of the run: the pipeline's own, where it names one, unless a method has changed it.
            seed: the run's: another run, another order, other random numbers.
        """
        if training:
            pipeline = self._anew(batch_size=batch_size, seed=self.seed + seed, runner=self.runner)
        else:
            pipeline = self._anew(batch_size=self.batch_size or batch_size, shuffled=False)
        self._refuse_known()
        return pipeline._as_batches(training)

    def _as_batches(self, training: bool) -> BatchSource:
        def by(who: WorkerConfig | LoaderAutotuner) -> BatchSource:
            workers, threads_now = (
                who if isinstance(who, WorkerConfig) else who.workers,
                runners.in_threads(self.runner),
            )
            if workers.threads and self._foreign() and not threads_now:
                raise ConfigurationError(
                    "threads would share the generators, from which this pipeline's functions may draw, with the training; say processes"
                )
            timeout = getattr(self.runner, "timeout", SECONDS)
            runner = (
                runners.runner_of(who, timeout)
                if isinstance(who, WorkerConfig)
                else _autotuned(who, timeout, threads_now)
            )
            return self._with(runner=runner)._as_batches(training)

        return BatchSource(
            epoch=self.epoch,
            length=len(self),
            training=training,
            seekable=True,
            workers=runners.workers_of(self.runner),
            with_workers=by,
        )

    def _unless_it_draws(self, make: BatchBuilder, number: int, made: Iterator) -> Iterator:
        """What threads make, once a batch that one of them makes by itself has shown that they draw from nobody's generators.

        Raises:
            Refusal: they do, so that each run would have other batches.
        """
        if any(
            runners.ThreadRunner(1, 0, getattr(self.runner, "timeout", None))(make.draws, range(number, number + 1))
        ):
            who = " or ".join(getattr(thing, "__name__", type(thing).__name__) for thing in self._foreign())
            why = "from the generators of torch, NumPy or Python, which threads share with the training: other ones in every run"
            raise ConfigurationError(
                f"{who} draws {why}; give the function a parameter chance and draw from that, or say .prefetch(processes=1)"
            )
        self.position.draws_nothing = True
        yield from made

    def _noted(self, made: Iterator) -> Iterator:
        for batch, bad in made:
            for fault in bad:
                self.faults.record(fault)
            yield batch
            del batch

    def _with(self, **changes) -> Pipeline:
        """The same batches, at the same place."""
        return replace(self, **changes)

    def _anew(self, **changes) -> Pipeline:
        """Other batches, from the start."""
        runner = self.runner.reset() if hasattr(self.runner, "reset") else self.runner
        return replace(self, place=Position(), **({"runner": runner} | changes))

    def _foreign(self) -> list:
        """What in it is of the user's own, and so may draw from the generators of the process, and may not be safe in threads."""
        things, source = (
            [self.collate_fn, *(each.function for each in (*self.sample_maps, *self.batch_maps))],
            self.source,
        )
        while source is not None:  # a cache stands before the source and the maps that it keeps
            things += [source, *getattr(source, "functions", ())]
            source = getattr(source, "source", None)
        return [thing for thing in things if not is_builtin(thing)]

    def _refuse_known(self) -> None:
        """What is known to fail does so now, and not in the middle of a pass.

        Raises:
            Failure: more rows are known to be bad than may be left out.
        """
        known = self.source.known_bad_rows()
        if len(known) > self.faults.max_rows:
            for fault in known:
                self.faults.record(fault)

    def _go_to(self, epoch: int, position: int) -> None:
        self.position.epoch, self.position.position, self.position.begun = epoch, position, False

    def _order(self) -> DeterministicBatchSampler:
        if self.batch_size is None:
            raise ConfigurationError("the pipeline does not know its batch size; end it with .batch(size)")
        order = DeterministicBatchSampler(
            len(self.source),
            self.batch_size,
            self.seed if self.shuffled else None,
            self.drop_last,
            self.window,
            None if self.window is None else self.source.chunk_offsets(),
        )
        smallest = order.rows - (len(order) - 1) * self.batch_size if not self.drop_last else self.batch_size
        if len(order) and smallest < self.world:
            raise ConfigurationError(
                f"{self.world} ranks cannot share a batch of {smallest} rows; take larger ones, or .batch(size, drop_last=True)"
            )
        return order


def _tell(autotuner: LoaderAutotuner) -> None:
    found = ", ".join(f"{name}={value}" for name, value in autotuner.tuned_settings.items())
    warnings.warn(f'prefetch("auto") has found {found}', HastenWarning, stacklevel=2)


def _autotuned(autotuner: LoaderAutotuner, timeout: float | None, in_threads: bool) -> runners.Runner:
    from hasten.data.workers.autotuned import AutotunedRunner  # brings the caches with it

    return AutotunedRunner(autotuner, timeout, in_threads)
