"""The pipeline: from rows to batches on the device.

    parquet("train/*.parquet", target="label").shuffle(seed=0).map(f).batch(512)

``map`` before ``batch`` receives one sample at a time; ``map`` after it a whole batch, which is faster. A function that
needs random numbers has a parameter named ``rng``, a ``SampleRng``, whose numbers depend on the position in the epoch.
The global generators of torch, NumPy and Python are seeded for every batch; threads share them, so in threads a
function that draws from them is refused.

As data of a Task, a pipeline is shuffled only if it has ``shuffle``, and ``batch(size)`` takes precedence over
``Task(batch_size=)``, which applies to pipelines without a batch size.
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
from hasten.data.array_source import SIGNED, Arrays, DeviceArrays
from hasten.data.batch_builder import BatchBuilder, Map, is_builtin, wants_rng
from hasten.data.sampler import DeterministicBatchSampler
from hasten.data.source import BadRowPolicy, Source, WrappedSource, column_leaves
from hasten.data.transforms import runs_on_device
from hasten.data.validation import at_least, check_int, check_positive
from hasten.data.workers import runners
from hasten.engine.resources import available_cpus, free_memory
from hasten.loading.autotuner import DEFAULT_PREFETCH, LoaderAutotuner, default_memory_budget
from hasten.loading.cuda_prefetcher import prefetch_to_cuda
from hasten.utils.batch import map_tensors

MAX_WORKERS, MAX_PREFETCH = 256, 1024  # more gain nothing and exhaust processes and open files


@dataclass
class Position:
    """Where the iteration of a pipeline stands; pipelines derived by ``to``, ``shard`` and the like share it."""

    epoch: int = 0  # the current epoch; after a complete iteration the next one
    position: int = 0  # rows of this epoch that were returned so far, over all shards
    begun: bool = False  # iteration has begun in this epoch; the next iteration is the next epoch
    draws_nothing: bool = False  # the user's functions were checked not to draw from the global generators


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Rows, their order, and the functions applied to them. ``map``, ``batch`` and the like return a new pipeline.

    One iteration is one epoch; the next iteration is the next epoch in its own order, even if the first was not
    finished. Methods that do not change the batches (``prefetch``, ``shard``, ``skip_bad_rows``, ``to``) return a
    pipeline that shares the position, so ``for batch in train.to(device)`` advances it; the others start at epoch 0.
    """

    source: Source  # reads the rows
    batch_size: int | None = None  # rows of a batch over all shards; None before ``batch``
    seed: int = 0  # of the order and of the functions that draw random numbers
    shuffled: bool = False  # whether each epoch has a new random order
    window: int | None = None  # number of chunks that are mixed at a time; None mixes all rows
    drop_last: bool = False  # whether a shorter last batch of an epoch is left out
    sample_maps: tuple[Map, ...] = ()  # applied to every sample, in order
    batch_maps: tuple[Map, ...] = ()  # applied to every batch, in order
    collate_fn: Callable[[list], Any] | None = None  # ``(list of samples) -> batch``; None: ``collate_nested``
    runner: runners.Runner = field(default_factory=runners.InlineRunner)  # computes batches, perhaps in workers
    num_shards: int = 1  # parts into which each batch is divided
    shard_index: int = 0  # the part that this pipeline returns
    device: torch.device | None = None  # to which batches are copied; None leaves them where they are
    faults: BadRowPolicy = field(default_factory=BadRowPolicy)  # counts skipped rows
    position: Position = field(default_factory=Position, repr=False)  # where iteration stands

    # ---- description

    def shuffle(self, seed: int = 0, window: int | None = None) -> Pipeline:
        """A new random order in every epoch, a function of (seed, epoch); ``seed`` is at least 0.

        ``window`` mixes only so many chunks (row groups, shards) at a time, for data that are too large to be read in
        random order; None mixes all rows.
        """
        at_least("shuffle(window=)", window, 1, optional=True)
        at_least("shuffle(seed=)", seed, 0)
        return self._restarted(seed=seed, shuffled=True, window=window)

    def map(self, function: Callable) -> Pipeline:
        """Before ``batch``: applies ``function(sample)``; after it: ``function(batch)``.

        A function with a parameter named ``rng`` also receives a ``SampleRng``. Samples are stacked with their own
        nesting: a tuple of parts becomes a tuple of tensors. Rows of a list column that the function returns unchanged
        stay a list; it must return either all rows unchanged or none (copy those that it does not change).

        Raises:
            ConfigurationError: ``function`` is not callable, or requires several arguments.
        """
        if not callable(function):
            raise ConfigurationError(f"map() expects a function, not a {type(function).__name__}")
        random_maps = sum(stage.stage is not None for stage in (*self.sample_maps, *self.batch_maps))
        stage = Map(function, random_maps if wants_rng(function) else None)
        if self.batch_size is None:
            return self._restarted(sample_maps=(*self.sample_maps, stage))
        return self._restarted(batch_maps=(*self.batch_maps, stage))

    def batch(self, size: int, *, drop_last: bool = False, collate: Callable[[list], Any] | None = None) -> Pipeline:
        """Batches of ``size`` rows, at least 1. With shards this is the global batch, which the shards divide.

        ``drop_last`` leaves out the last batch of an epoch if it is shorter. ``collate`` is ``(list of samples) ->
        batch``; default: like torch's ``default_collate``, with tuples as tuples.
        """
        at_least("batch(size)", size, 1)
        if collate is not None and not callable(collate):
            kind = type(collate).__name__
            raise ConfigurationError(f"batch(collate=) must be a function (list of samples) -> batch, not a {kind}")
        return self._restarted(batch_size=size, drop_last=drop_last, collate_fn=collate)

    def cache(
        self,
        where: str = "memory",
        *,
        gigabytes: float | None = None,
        directory: str | Path | None = None,
    ) -> Pipeline:
        """Stores the samples after the maps so far, so that they are read and decoded once; filled at first iteration.

        A ProgressWarning reports how far the cache is filled if that takes longer than three seconds.

        Args:
            where: "memory", for this pipeline; or "disk", for all processes and later runs. A cache on disk is found
                by the content of the data and of the maps, and is filled again when they change.
            gigabytes: Limit in 10**9 bytes for the stored samples; None: half of the free memory or disk space. Larger
                data are refused before anything is stored. It does not limit the directory, where complete caches are
                never deleted, nor the memory of reading, about 16 MB per worker.
            directory: Directory of the cache on disk; None: HASTEN_CACHE, or the user's cache directory.

        Raises:
            ConfigurationError: A map before it takes ``rng``, or its code cannot be hashed. At the first iteration:
                samples differ in shape or exceed the limit; or, on disk, they are named tuples, whose class a file
                cannot restore, or dicts with other keys than strings and numbers.
            RunError: At the first iteration: the disk is full or not writable. No partial cache remains.
        """
        from hasten.data.cache.cache import cached

        if self.batch_size is not None:
            raise ConfigurationError("cache() stores samples; call it before .batch()")
        source = cached(self.source, self.sample_maps, where, gigabytes, directory)
        return self._restarted(source=source, sample_maps=())

    def prefetch(
        self,
        batches: int | str = 2,
        *,
        threads: int = 0,
        processes: int = 0,
        timeout: float | None = runners.DEFAULT_TIMEOUT_S,
        cores: int | None = None,
        gigabytes: float | None = None,
    ) -> Pipeline:
        """Computes batches in advance, in threads (for code that releases the GIL) or processes (for other code).

        Args:
            batches: Finished batches that may wait; or "auto": the number of workers, their kind and this number are
                tuned during training, and samples are cached if that pays: in memory, or if they do not fit on disk,
                in at most a quarter of the free space of HASTEN_CACHE, where they remain. Tuning ends when no step
                waits for data. A HastenWarning and ``pipeline.runner.tuned_settings`` report the result.
            threads: Worker threads. With "auto" the number to begin with; functions of the user that may draw from the
                global generators are not moved to threads.
            processes: Worker processes, instead of threads.
            timeout: Seconds that one batch may take before a RunError; None waits forever.
            cores: With "auto": largest number of workers; None: the CPUs that this process may use.
            gigabytes: With "auto": limit in 10**9 bytes for prefetched batches and cached samples in memory; None: a
                quarter of the free memory.

        Raises:
            ConfigurationError: An argument is out of range, or both threads and processes are given.
        """
        if batches != "auto":
            at_least("prefetch(batches=)", batches, 0, most=MAX_PREFETCH)
        for name, value in {"threads": threads, "processes": processes}.items():
            at_least(f"prefetch({name}=)", value, 0, most=MAX_WORKERS)
        if threads and processes:
            raise ConfigurationError("prefetch() takes threads or processes, not both")
        check_positive("prefetch(timeout=), in seconds,", timeout)
        check_positive("prefetch(gigabytes=)", gigabytes)
        at_least("prefetch(cores=)", cores, 1, optional=True, most=MAX_WORKERS)
        if isinstance(batches, str):
            workers = WorkerConfig(threads, processes, DEFAULT_PREFETCH if threads or processes else 0)
            autotuner = LoaderAutotuner(
                workers,
                cores=cores or available_cpus(),
                memory_budget=default_memory_budget(gigabytes, free_memory),
                on_converged=_report_settings,
            )
            return replace(self, runner=_autotuned(autotuner, timeout, threads > 0))
        if cores is not None or gigabytes is not None:
            raise ConfigurationError('prefetch(cores=) and prefetch(gigabytes=) require prefetch("auto", ...)')
        workers = WorkerConfig(threads or int(batches > 0 and not processes), processes, batches)
        return replace(self, runner=runners.runner_of(workers, timeout))

    def shard(self, num_shards: int, index: int) -> Pipeline:
        """Returns part ``index``, from 0, of ``num_shards`` parts of every batch, whose rows in order are the batch."""
        at_least("shard(num_shards)", num_shards, 1)
        at_least("shard(index)", index, 0)
        if index >= num_shards:
            raise ConfigurationError(f"shard(num_shards={num_shards}, index={index}): index must be below num_shards")
        return replace(self, num_shards=num_shards, shard_index=index)

    def skip_bad_rows(self, max_rows: int) -> Pipeline:
        """Skips up to ``max_rows`` different rows, over all epochs, that cannot be read; ``faults.found`` has them."""
        at_least("skip_bad_rows(max_rows)", max_rows, 0)
        return replace(self, faults=BadRowPolicy(max_rows))

    def to(self, device: str | torch.device) -> Pipeline:
        """Returns a pipeline that copies batches to a device such as "cpu" or "cuda:1"; to a GPU from pinned memory and
        during the step before.
        """
        if not isinstance(device, (str, torch.device)):
            raise ConfigurationError(f'to() expects a device name, as in .to("cuda:0"), not {device!r:.80}')
        try:
            return replace(self, device=torch.device(device))
        except RuntimeError:
            raise ConfigurationError(f"to(): unknown device {device!r:.80}; use cpu, cuda or cuda:1") from None

    # ---- iteration and position

    def __iter__(self) -> Iterator:
        position, rows = self.position, len(self.source)
        if position.begun:
            position.epoch, position.position = position.epoch + 1, 0
        position.begun = True
        sampler = self._batch_sampler()
        for batch in self.epoch(position.epoch, sampler.index_at(position.position)):
            position.position = min(position.position + sampler.batch_size, rows)
            yield batch
            del batch  # frees its memory for the next batch
        position.epoch, position.position, position.begun = position.epoch + 1, 0, False

    def __len__(self) -> int:
        """Returns the batches per epoch; raises TypeError without a batch size."""
        if self.batch_size is None:
            raise TypeError("the pipeline has no length before .batch(size)")
        return len(self._batch_sampler())

    def state_dict(self) -> dict[str, int]:
        """Returns {"seed", "epoch", "position"}; ``position``: rows of the epoch returned so far, over all shards."""
        return {"seed": self.seed, "epoch": self.position.epoch, "position": self.position.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next iteration continue at the position of a ``state_dict``. ConfigurationError if ``state`` is no
        such dict, belongs to another seed, or no batch begins at its position.
        """
        keys = ("seed", "epoch", "position")
        if not isinstance(state, Mapping):
            raise ConfigurationError(f"a state is a dict of seed, epoch and position, not a {type(state).__name__}")
        if not set(keys) <= state.keys():
            found = ", ".join(map(str, state)) or "nothing"
            raise ConfigurationError(f"a state has seed, epoch and position; this one has {found:.200}")
        seed, epoch, position = (check_int(f"{key} of the state", state[key]) for key in keys)
        if seed != self.seed:
            own = f"seed {self.seed}; use .shuffle(seed={seed})"
            raise ConfigurationError(f"this state belongs to seed {seed}, and the pipeline has {own}")
        at_least("epoch of the state", epoch, 0)
        if position > len(self.source):
            problem = f"and the data have only {len(self.source)} rows; use the data with which it was saved"
            raise ConfigurationError(f"this state begins at row {position} of an epoch, {problem}")
        self._batch_sampler().index_at(position)
        self._seek(epoch, position)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration this epoch, as ``DistributedSampler.set_epoch`` does.

        If the epoch has been set by ``load_state_dict`` and not begun, its position remains.
        """
        epoch = check_int("set_epoch(epoch)", epoch)
        at_least("set_epoch(epoch)", epoch, 0)
        if self.position.begun or self.position.epoch != epoch:
            self._seek(epoch, 0)

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes by index, before any map: those of directories of images or of a text target. None
        or empty if there are none. The first access may read the target of a table from all files.
        """
        source: Any = self.source
        while isinstance(source, WrappedSource) and getattr(source, "classes", None) is None:
            source = source.source  # a cache, or the maps before it
        return getattr(source, "classes", None)

    @property
    def matrix_columns(self) -> list[str] | None:
        """The columns of a table that are the matrix of every batch, in order; None if there is none, or with maps."""
        source: Any = self.source
        while isinstance(source, WrappedSource) and not hasattr(source, "functions"):  # a cache, without maps in it
            source = source.source
        return None if self.sample_maps or self.batch_maps else getattr(source, "matrix_columns", None)

    # ---- further attributes of a DataLoader, which trainers read

    batch_sampler: ClassVar[None] = None  # as for a DataLoader of whole batches
    pin_memory: ClassVar[bool] = False

    @property
    def dataset(self) -> Source:
        return self.source

    @property
    def sampler(self) -> Pipeline:
        return self  # trainers call its set_epoch

    @property
    def num_workers(self) -> int:
        return self.runner.workers.processes

    # ---- interface to the engine

    def epoch(self, epoch: int, start: int = 0) -> Iterator:
        """Yields the batches of one epoch from index ``start`` on, without changing the position."""
        runner: Any = self.runner
        source, maps = self.source, self.sample_maps
        autotuned = hasattr(runner, "cached_source")
        if autotuned:
            processes_only = bool(self._user_code()) and not runner.in_threads
            runner = replace(runner, kinds=("processes",) if processes_only else ("threads", "processes"))
        self._check_known_bad_rows()
        source.prepare(runner.bulk_runner() if autotuned else runner, self.faults)
        if autotuned and self.collate_fn is None:
            cached = runner.cached_source(source, maps, self.faults, epoch, start)
            if cached is not None:
                source, maps = cached, ()
        sampler, in_threads = self._batch_sampler(), runners.in_threads(runner)
        order = sampler.batches(epoch), sampler.batch_size, self.seed, epoch
        functions = maps, self.batch_maps, self.collate_fn
        shard = self.num_shards, self.shard_index
        build = BatchBuilder(source, *order, *functions, *shard, self.faults, seeded=not in_threads)
        batches = runner(build, range(start, len(sampler)))
        if in_threads and start < len(sampler) and self._user_code() and not self.position.draws_nothing:
            batches = self._checked_for_draws(build, start, batches)
        recorded = self._recorded(batches)
        return recorded if self.device is None else _copy_to_device(recorded, self.device)

    def batches(self, batch_size: int, seed: int, training: bool) -> BatchSource:
        """Returns the batches for the engine. Validation data are never shuffled and keep their own batch size. The
        ``seed`` of the run is added to the seed of the pipeline.
        """
        if training:
            pipeline = self._restarted(batch_size=batch_size, seed=self.seed + seed, runner=self.runner)
        else:
            pipeline = self._restarted(batch_size=self.batch_size or batch_size, shuffled=False)
        self._check_known_bad_rows()
        return pipeline._batch_source(training)

    def _batch_source(self, training: bool) -> BatchSource:
        def with_workers(workers: WorkerConfig | LoaderAutotuner) -> BatchSource:
            config = workers if isinstance(workers, WorkerConfig) else workers.workers
            in_threads = runners.in_threads(self.runner)
            if config.threads and self._user_code() and not in_threads:
                why = "functions of this pipeline may draw from the global generators"
                raise ConfigurationError(f"{why}, which threads share with training; use processes")
            if isinstance(workers, WorkerConfig):
                runner = runners.runner_of(workers, self.runner.timeout)
            else:
                runner = _autotuned(workers, self.runner.timeout, in_threads)
            return replace(self, runner=runner)._batch_source(training)

        return BatchSource(
            epoch=self.epoch,
            length=len(self),
            training=training,
            seekable=True,
            workers=self.runner.workers,
            with_workers=with_workers,
            on_device=self._on_device(training),
        )

    def _on_device(self, training: bool) -> tuple[int, Callable[[torch.device], BatchSource]] | None:
        """Returns ``on_device`` of the BatchSource: (bytes of the arrays, device -> BatchSource that computes there).
        None unless the rows are arrays in memory, with transforms that run on any device.
        """
        source, maps = self.source, self.batch_maps
        if not isinstance(source, Arrays) or self.sample_maps or self.collate_fn or self.faults.max_rows:
            return None
        columns: list[Any] = column_leaves(source.columns)
        if any(column.dtype in SIGNED for column in columns) or not all(runs_on_device(one.function) for one in maps):
            return None

        def on_device(device: torch.device) -> BatchSource:
            moved = replace(self, source=DeviceArrays(source, device), runner=runners.InlineRunner())
            return replace(moved._batch_source(training), workers=WorkerConfig(), with_workers=None)

        return sum(column.nbytes for column in columns), on_device

    def _checked_for_draws(self, build: BatchBuilder, index: int, batches: Iterator) -> Iterator:
        """Yields ``batches`` after building batch ``index`` in a thread: ConfigurationError if a function of the user
        draws from the global generators meanwhile.
        """
        thread = runners.ThreadRunner(WorkerConfig(threads=1), self.runner.timeout)
        if any(thread(build.draws, range(index, index + 1))):
            names = " or ".join(getattr(thing, "__name__", type(thing).__name__) for thing in self._user_code())
            effect = "which threads share with training, so every run would have other batches"
            remedy = f"{effect}; draw from a parameter named rng, or use .prefetch(processes=1)"
            raise ConfigurationError(f"{names} draws from the global generators of torch, NumPy or Python, {remedy}")
        self.position.draws_nothing = True
        yield from batches

    def _recorded(self, batches: Iterator) -> Iterator:
        """Yields the batches of (batch, its skipped rows) pairs and counts the rows; RunError if there are too many."""
        for batch, bad in batches:
            self.faults.record(*bad)
            yield batch
            del batch

    def _restarted(self, **changes: Any) -> Pipeline:
        """Returns a copy with changed fields, at epoch 0, with a new autotuner unless ``changes`` has a ``runner``."""
        reset = getattr(self.runner, "reset", None)
        return replace(self, position=Position(), **({"runner": reset() if reset else self.runner} | changes))

    def _user_code(self) -> list:
        """The user's own functions and sources, which may draw from global generators or not be thread-safe."""
        things: list = [self.collate_fn, *(stage.function for stage in (*self.sample_maps, *self.batch_maps))]
        source: Any = self.source
        while source is not None:  # a cache wraps the source and the maps that it stores
            things += [source, *getattr(source, "functions", ())]
            source = getattr(source, "source", None)
        return [thing for thing in things if not is_builtin(thing)]

    def _check_known_bad_rows(self) -> None:
        """Raises RunError if the source knows of more bad rows, before reading, than ``skip_bad_rows`` allows."""
        known = self.source.known_bad_rows()
        if len(known) > self.faults.max_rows:
            self.faults.record(*known)

    def _seek(self, epoch: int, position: int) -> None:
        self.position.epoch, self.position.position, self.position.begun = epoch, position, False

    def _batch_sampler(self) -> DeterministicBatchSampler:
        if self.batch_size is None:
            raise ConfigurationError("the pipeline has no batch size; end it with .batch(size)")
        seed = self.seed if self.shuffled else None
        offsets = None if self.window is None else self.source.chunk_offsets()
        rows = len(self.source)
        sampler = DeterministicBatchSampler(rows, self.batch_size, seed, self.drop_last, self.window, offsets)
        smallest = self.batch_size if self.drop_last else sampler.rows - (len(sampler) - 1) * self.batch_size
        if len(sampler) and smallest < self.num_shards:
            parts = f"{self.num_shards} shards; use a larger batch size, or .batch(size, drop_last=True)"
            raise ConfigurationError(f"a batch of {smallest} rows cannot be divided into {parts}")
        return sampler


def _copy_to_device(batches: Iterator, device: torch.device) -> Iterator:
    """Yields the batches on ``device``, copying the next one ahead on CUDA; ConfigurationError without this device."""
    if device.type != "cuda":
        return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)
    if not torch.cuda.is_available():
        raise ConfigurationError(f"there is no device {device} on this machine; use .to('cpu')")
    return prefetch_to_cuda(batches, device)


def _report_settings(autotuner: LoaderAutotuner) -> None:
    settings = ", ".join(f"{name}={value}" for name, value in autotuner.tuned_settings.items())
    warnings.warn(f'prefetch("auto") has chosen {settings}', HastenWarning, stacklevel=2)


def _autotuned(autotuner: LoaderAutotuner, timeout: float | None, in_threads: bool) -> runners.Runner:
    from hasten.data.workers.autotuned import AutotunedRunner  # imports the caches

    return AutotunedRunner(autotuner, timeout, in_threads)
