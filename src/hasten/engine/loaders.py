"""Batch sources over samples, ready DataLoaders and iterable datasets, all read through torch's DataLoader.

An exception from the data becomes one line that names the batch, and the sample where it is known.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import count, islice
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hasten._torch_compat import contains_worker_traceback, worker_error_text, workers_started
from hasten.core.data import BatchSource, LoaderSpec, WorkerConfig
from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.core.types import Batch
from hasten.distributed.batch_sharding import BatchIndices
from hasten.utils.denormals import flushes_denormals
from hasten.utils.graph_batch import collate_of, set_epoch
from hasten.utils.rng import derive_seed, preserve_rng_state, seeded_rng

SampleFinder = Callable[[int, Exception], int | None]  # (batch index, error) -> index of the sample that raised it


def from_spec(spec: LoaderSpec) -> BatchSource:
    """Batches of samples that are read by index through a torch DataLoader."""
    dataset = _SeededDataset(spec.dataset, spec.seed, seeded=not isinstance(spec.loader, DataLoader))
    persistent: list[tuple[DataLoader[Any], _EpochSampler]] = []  # a loader with persistent workers is built once
    last: list[ReferenceType[Iterator[Batch]]] = []  # its last iterator; the next one resets the workers

    def loader(order: Iterable[Any], epoch: int) -> DataLoader[Any]:
        if persistent and not any(map(_is_open, last)):
            built, sampler = persistent[0]
            sampler.order = order
            return built
        sampler = _EpochSampler(order)
        built = DataLoader(
            dataset,
            batch_sampler=sampler,  # pyright: ignore[reportArgumentType]  # yields keyed index lists
            collate_fn=spec.collate,
            num_workers=spec.num_workers,
            prefetch_factor=spec.prefetch_factor if spec.num_workers else None,
            pin_memory=spec.pin_memory,
            persistent_workers=spec.persistent_workers and spec.num_workers > 0 and not persistent,
            worker_init_fn=_init_worker_of(spec.loader, flushes_denormals()) if spec.num_workers else None,
            generator=torch.Generator().manual_seed(derive_seed(spec.seed, epoch)),  # not the run's own
            **_worker_options(spec.loader, spec.num_workers),
        )
        if built.persistent_workers:
            persistent.append((built, sampler))
        return built

    def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
        set_epoch(spec.loader, epoch)
        keyed = ((epoch, batch, indices) for batch, indices in enumerate(spec.batch_sampler(epoch)))
        built = loader(islice(keyed, start, None), epoch)
        batches = _with_clear_errors(iter(built))
        if built.persistent_workers:
            last[:] = [ref(batches)]
        return batches

    return BatchSource(
        epoch=epoch,
        length=spec.length,
        spec=spec,
        training=spec.training,
        seekable=spec.loader is None,
        generators=_generators_of(spec.loader),
        workers=spec.workers,
    )


def _worker_options(loader: DataLoader[Any] | None, num_workers: int) -> dict[str, Any]:
    """How a DataLoader starts its workers and waits for them, for one that is built in its place."""
    if loader is None or not num_workers:
        return {}
    return {name: getattr(loader, name) for name in ("multiprocessing_context", "timeout", "in_order")}


def _is_open(generator: ReferenceType[Iterator[Batch]]) -> bool:
    """Whether a generator still exists and is neither exhausted nor closed."""
    alive: Any = generator()
    return alive is not None and getgeneratorstate(alive) != GEN_CLOSED


def _init_worker_of(loader: Any, flush: bool) -> Callable[[int], None]:
    """The ``worker_init_fn`` of a loader in the place of ``loader`` (or of none), see ``_init_worker``."""
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    is_child = context.get_start_method() != "forkserver"  # else the parent of the worker is the server
    return partial(_init_worker, getattr(loader, "worker_init_fn", None), flush, is_child)


def _init_worker(init: Callable[[int], None] | None, flush: bool, is_child: bool, worker: int) -> None:
    """``worker_init_fn`` of a DataLoader: calls the user's ``init``, and exits if the training process has died.

    torch ends a worker when its parent process changes. A worker whose parent died before that check began would run
    forever. A forked worker inherits whether the training process flushes denormal numbers; others need ``flush``.
    """
    if flush:
        torch.set_flush_denormal(True)
    if init is not None:
        init(worker)
    parent = multiprocessing.parent_process()
    if is_child and parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def from_loader(loader: Any, task_batch_size: int | None, batch_size: int, seed: int, training: bool) -> BatchSource:
    """The batches of a ready DataLoader, iterated as a hand-written loop would; with a ``spec`` if it reads by index.

    ConfigurationError if ``batch_size`` differs from the size of training batches that a custom sampler forms.
    """
    spec = _spec_of(loader, seed, training)
    if spec is not None and loader.batch_size is not None and batch_size != loader.batch_size and training:
        loader = DataLoader(
            loader.dataset,
            batch_sampler=BatchSampler(loader.sampler, batch_size, loader.drop_last),
            collate_fn=collate_of(loader),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            **_worker_options(loader, loader.num_workers),
        )
        spec = _spec_of(loader, seed, training)
    elif training and batch_size != (loader.batch_size or task_batch_size or 1):
        problem = "the batch size of this DataLoader cannot be changed: it has a sampler of its own"
        raise ConfigurationError(f"{problem}; set it there")

    def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
        set_epoch(loader, epoch)
        # a resumed run: the uninterrupted one started its persistent workers, and drew their seed, in epoch 0 only
        if epoch and loader.persistent_workers and not workers_started(loader):
            with preserve_rng_state(*_generators_of(loader)):
                _start(loader)
        find = _sample_finder(spec, epoch) if spec is not None else None  # before iter() draws
        return islice(_with_clear_errors(_start(loader), find), start, None)

    prefetch_factor = loader.prefetch_factor or 1
    return BatchSource(
        epoch=epoch,
        length=length_of(loader),
        spec=spec,
        training=training,
        seekable=False,
        generators=_generators_of(loader),
        workers=WorkerConfig(processes=loader.num_workers, prefetch=loader.num_workers * (prefetch_factor - 1)),
    )


def _start(loader: Any) -> Iterator[Batch]:
    """``iter(loader)``, whose workers flush denormal numbers if this process does, also if they are spawned."""
    init = loader.worker_init_fn
    if not flushes_denormals() or not loader.num_workers:
        return iter(loader)
    loader.worker_init_fn = _init_worker_of(loader, True)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = init


def from_iterable_dataset(data: Iterable[Any], batch_size: int | None, training: bool, seed: int) -> BatchSource:
    """Batches of an iterable dataset in its own order; without a ``batch_size`` its items are batches."""

    def epoch(index: int, start: int = 0) -> Iterator[Batch]:
        with preserve_rng_state(), seeded_rng(derive_seed(seed, index)):
            iterator = iter(DataLoader(_AsIterableDataset(data), batch_size=batch_size))
        return islice(_seeded_by_position(_with_clear_errors(iterator), seed, index), start, None)

    length = length_of(data)
    batches = length and -(-length // (batch_size or 1))
    return BatchSource(epoch=epoch, length=batches, training=training, seekable=False)


def length_of(data: Any) -> int | None:
    """``len(data)``, None where it has none; ConfigurationError if ``__len__`` returns no valid number."""
    try:
        return len(data)
    except TypeError:
        return None
    except ConfigurationError:
        raise
    except (ValueError, OverflowError) as error:
        reason = f"{format_error(error)}; __len__ must return a whole number from 0 on"
        raise ConfigurationError(f"the length of the {type(data).__name__} cannot be read: {reason}") from None


def _spec_of(loader: Any, seed: int, training: bool) -> LoaderSpec | None:
    """A standard DataLoader over a map-style dataset as a LoaderSpec; None for any other."""
    standard_sampler = isinstance(loader.sampler, (RandomSampler, SequentialSampler))
    if not isinstance(loader.batch_sampler, BatchSampler) or not standard_sampler:
        return None
    length = length_of(loader)
    if isinstance(loader.dataset, IterableDataset) or length is None:  # its sampler may have none
        return None
    batch_sampler = loader.batch_sampler

    def order(epoch: int) -> Iterator[list[int]]:
        if not (loader.persistent_workers and epoch):  # the base seed that iter(loader) draws; persistent workers: once
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return iter(batch_sampler)

    return LoaderSpec(
        dataset=loader.dataset,
        batch_sampler=order,
        length=length,
        collate=collate_of(loader),
        training=training,
        seed=seed,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        loader=loader,
        build=from_spec,
    )


def _generators_of(loader: DataLoader[Any] | None) -> tuple[torch.Generator, ...]:
    """The ``generator`` attributes of a DataLoader and of its samplers that are set, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = dict.fromkeys(getattr(owner, "generator", None) for owner in owners)
    return tuple(generator for generator in generators if generator is not None)


class _EpochSampler:
    """A ``batch_sampler`` for torch's DataLoader that yields the given lists of indices, of one epoch."""

    def __init__(self, order: Iterable[Any]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)


class _SeededDataset(torch.utils.data.Dataset[Any]):
    """Reads whole batches of samples: seeds their random numbers by position, and names the sample that raises."""

    def __init__(self, dataset: Any, seed: int, seeded: bool) -> None:
        self.dataset, self.seed, self.seeded = dataset, seed, seeded

    def __getitems__(self, keyed: tuple[int, int, list[int]]) -> list[Any]:
        epoch, batch, indices = keyed
        first = 0
        if isinstance(indices, BatchIndices):
            first, batch = indices.first, batch if indices.batch is None else indices.batch
        elif not self.seeded:
            return self._read(indices)
        with seeded_rng(derive_seed(self.seed, epoch, batch, *([first] if first else []))):
            return self._read(indices)

    def _read(self, indices: list[int]) -> list[Any]:
        if not hasattr(self.dataset, "__getitems__"):
            return self._read_one_by_one(indices)
        try:
            return self.dataset.__getitems__(indices)
        except Exception:
            self._read_one_by_one(indices)  # raises with the index, if a single sample is the cause
            raise

    def _read_one_by_one(self, indices: list[int]) -> list[Any]:
        samples: list[Any] = []
        for index in indices:
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                raise RunError(f"the dataset raised at sample {index}: {format_error(error)}") from error
        return samples


class _AsIterableDataset(IterableDataset[Any]):
    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def _seeded_by_position(iterator: Iterator[Batch], seed: int, epoch: int) -> Iterator[Batch]:
    """The same batches; random numbers drawn for each are a function of its position, so a replay draws the same."""
    for index in count():
        with seeded_rng(derive_seed(seed, epoch, index)):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def _sample_finder(spec: LoaderSpec, epoch: int) -> SampleFinder:
    """Finds the sample that failed in the user's DataLoader, in the epoch that begins now: the one that raises the same
    error once its order is drawn again and the samples of the batch are read one by one.
    """
    generators = (torch.default_generator, *_generators_of(spec.loader))
    states = [generator.get_state() for generator in generators]

    def find(batch: int, error: Exception) -> int | None:
        if spec.num_workers and not contains_worker_traceback(error):
            return None  # a worker died: this process might die of the same sample
        with preserve_rng_state(*generators[1:]):
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            for index in next(islice(spec.batch_sampler(epoch), batch, None), list[int]()):
                try:
                    spec.dataset[index]
                except Exception as again:
                    if _error_text(again) == _error_text(error):
                        return index
        return None

    return find


def _with_clear_errors(iterator: Iterator[Batch], find: SampleFinder | None = None) -> Iterator[Batch]:
    """The same batches; an exception of the dataset becomes a RunError of one line. ``find`` finds the sample."""
    batches_read = 0
    try:
        for batch in iterator:
            batches_read += 1
            yield batch
    except RunError as error:  # from a worker, torch has put the whole traceback into the message
        lines = [line for line in str(error).splitlines() if "the dataset raised at sample" in line]
        raise RunError(lines[-1].split("RunError: ")[-1] if lines else str(error)) from error
    except Exception as error:
        sample = None if find is None else find(batches_read, error)
        where = f"batch {batches_read + 1} of the epoch" + ("" if sample is None else f", sample {sample}")
        raise RunError(f"the data raised at {where}: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    """``KeyError: 'x'``: type and message; of an error from a DataLoader worker, the last line of its traceback."""
    if not contains_worker_traceback(error):
        return format_error(error)
    kind, colon, text = worker_error_text(error).partition(": ")
    return f"{kind.rpartition('.')[2]}{colon}{text}"[:300]
