"""Samples, ready DataLoaders and streams as Batches, all read through torch's DataLoader.

Samples are read as the textbook does, a ready DataLoader exactly as a hand-written loop would use it, a stream in the
order in which it comes. What the data raise is told in one line that names the batch, and the sample where it is known.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hasten._torch_compat import contains_worker_traceback, sample_being_fetched, worker_error_text, workers_started
from hasten.core.data import BatchSource, LoaderSpec
from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.distributed.batch_sharding import IndexShard
from hasten.utils.rng import derive_seed, preserve_rng_state, seeded_rng


def from_spec(samples: LoaderSpec) -> BatchSource:
    """Batches read sample by sample through a torch DataLoader: what the textbook does."""
    dataset = _Fetched(samples.dataset, samples.seed, samples.loader is None)
    loaders: dict[str, DataLoader] = {}  # a loader with persistent workers is made once

    def loader(order: Iterable, number: int) -> DataLoader:
        if "kept" in loaders:
            loaders["kept"].batch_sampler.order = order
            return loaders["kept"]
        made = DataLoader(
            dataset,
            batch_sampler=_Order(order),
            collate_fn=samples.collate,
            num_workers=samples.num_workers,
            prefetch_factor=samples.prefetch_factor if samples.num_workers else None,
            pin_memory=samples.pin_memory,
            persistent_workers=samples.persistent_workers and samples.num_workers > 0,
            worker_init_fn=partial(_begun, samples.loader and samples.loader.worker_init_fn),
            generator=torch.Generator().manual_seed(
                derive_seed(samples.seed, number)
            ),  # its base seed; the run's own stream stays untouched
        )
        if made.persistent_workers:
            loaders["kept"] = made
        return made

    def epoch(epoch: int, start: int = 0) -> Iterator:
        keyed = ((epoch, number, indices) for number, indices in enumerate(samples.batch_sampler(epoch)))
        return _with_clear_errors(iter(loader(islice(keyed, start, None), epoch)))

    return BatchSource(
        epoch=epoch,
        length=samples.length,
        spec=samples,
        training=samples.training,
        seekable=samples.loader is None,
        generators=_generators_of(samples.loader),
    )


def _begun(init: Callable[[int], None] | None, worker: int) -> None:
    """In a worker, before it reads: one whose parent is gone by now would take its new one for the parent that torch lets it end with."""
    if init is not None:
        init(worker)
    if multiprocessing.get_start_method() != "forkserver" and os.getppid() != multiprocessing.parent_process().pid:
        os._exit(1)


def from_loader(loader: DataLoader, task_size: int | None, batch_size: int, seed: int, training: bool) -> BatchSource:
    """A ready DataLoader, iterated as the user's own loop would; its samples are shown where they are indexed."""
    samples = _samples_of(loader, seed, training)
    if samples is not None and loader.batch_size is not None and batch_size != loader.batch_size and training:
        resized = BatchSampler(loader.sampler, batch_size, loader.drop_last)
        loader = DataLoader(
            loader.dataset,
            batch_sampler=resized,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        samples = _samples_of(loader, seed, training)
    elif training and batch_size != (loader.batch_size or task_size or 1):
        raise ConfigurationError("the batch size of this DataLoader cannot be changed: it has a sampler of its own")

    def epoch(epoch: int, start: int = 0) -> Iterator:
        if (
            epoch and loader.persistent_workers and not workers_started(loader)
        ):  # resumed: kept workers draw their seed once
            with preserve_rng_state(*_generators_of(loader)):
                iter(loader)
        in_workers = samples is not None and loader.num_workers > 0
        find = _finder(samples, epoch) if in_workers else _finds_none  # before iter(loader) draws
        return islice(_with_clear_errors(iter(loader), find), start, None)

    return BatchSource(
        epoch=epoch,
        length=length_of(loader),
        spec=samples,
        training=training,
        seekable=False,
        generators=_generators_of(loader),
    )


def from_iterable_dataset(data, batch_size: int, training: bool, seed: int) -> BatchSource:
    """An iterable dataset, batched in the order in which it comes."""

    def epoch(number: int, start: int = 0) -> Iterator:
        with preserve_rng_state(), seeded_rng(derive_seed(seed, number)):
            iterator = iter(DataLoader(_Stream(data), batch_size=batch_size))
        return islice(_drawing_by_position(_with_clear_errors(iterator), seed, number), start, None)

    length = length_of(data)
    return BatchSource(epoch=epoch, length=length and -(-length // batch_size), training=training, seekable=False)


def length_of(data) -> int | None:
    """How long the data say they are, or None.

    Raises:
        Refusal: below 0, or longer than anything can be.
    """
    try:
        return len(data)
    except TypeError:
        return None
    except ConfigurationError:
        raise
    except (ValueError, OverflowError) as error:
        wanted = "__len__ must give a whole number from 0 on"
        raise ConfigurationError(
            f"the {type(data).__name__} cannot tell how long it is: {format_error(error)}; {wanted}"
        ) from None


def _samples_of(loader: DataLoader, seed: int, training: bool) -> LoaderSpec | None:
    standard = isinstance(loader.batch_sampler, BatchSampler) and isinstance(
        loader.sampler, (RandomSampler, SequentialSampler)
    )
    if not standard or isinstance(loader.dataset, IterableDataset):
        return None

    def order(epoch: int) -> Iterator[list[int]]:
        if not (
            loader.persistent_workers and epoch
        ):  # the base seed that iter(loader) draws; kept workers draw it once
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return iter(loader.batch_sampler)

    return LoaderSpec(
        dataset=loader.dataset,
        batch_sampler=order,
        length=len(loader),
        collate=loader.collate_fn,
        training=training,
        seed=seed,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        loader=loader,
        build=from_spec,
    )


def _generators_of(loader: DataLoader | None) -> tuple[torch.Generator, ...]:
    own = dict.fromkeys(
        (getattr(loader, "generator", None), getattr(getattr(loader, "sampler", None), "generator", None))
    )
    return tuple(generator for generator in own if generator is not None)


class _Order:
    """A batch sampler over one pass's lists of indices."""

    def __init__(self, order: Iterable):
        self.order = order

    def __iter__(self):
        return iter(self.order)


class _Fetched(torch.utils.data.Dataset):
    """Reads whole batches of samples: seeds what they draw from their position, names the sample that fails."""

    def __init__(self, dataset, seed: int, seeded: bool):
        self.dataset, self.seed, self.seeded = dataset, seed, seeded

    def __getitems__(self, keyed) -> list:
        epoch, number, indices = keyed
        if not self.seeded and not isinstance(indices, IndexShard):
            return self._read(indices)
        with seeded_rng(
            derive_seed(self.seed, epoch, number, *([first] if (first := getattr(indices, "first", 0)) else []))
        ):
            return self._read(indices)

    def _read(self, indices: list[int]) -> list:
        if not hasattr(self.dataset, "__getitems__"):
            return self._one_by_one(indices)
        try:
            return self.dataset.__getitems__(indices)
        except Exception:
            self._one_by_one(indices)  # raises with the sample's name, if it is one sample's fault
            raise

    def _one_by_one(self, indices: list[int]) -> list:
        read = []
        for index in indices:
            try:
                read.append(self.dataset[index])
            except Exception as error:
                raise RunError(f"the dataset raised at sample {index}: {format_error(error)}") from error
        return read


class _Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def _drawing_by_position(iterator: Iterator, seed: int, epoch: int) -> Iterator:
    """The same batches; the random numbers drawn for each are a function of its position, so a replay draws the same."""
    for number in count():
        with seeded_rng(derive_seed(seed, epoch, number)):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def _finder(samples: LoaderSpec, epoch: int) -> Callable[[int, str], int | None]:
    """Finds the sample that a worker failed at, in the pass that begins now: the user's loader does not tell which samples a batch has.

    The order of the pass is drawn once more and the batch's samples are read here, one by one; the one that raises the same is it.
    """
    generators = (torch.default_generator, *_generators_of(samples.loader))
    states = [generator.get_state() for generator in generators]

    def find(number: int, words: str) -> int | None:
        with preserve_rng_state(*generators[1:]):
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            for index in next(islice(samples.batch_sampler(epoch), number, None), []):
                try:
                    samples.dataset[index]
                except Exception as error:
                    if _own_words(error) == words:
                        return index
        return None

    return find


def _finds_none(number: int, words: str) -> None:
    """No sample is found."""


def _with_clear_errors(iterator: Iterator, find: Callable[[int, str], int | None] = _finds_none) -> Iterator:
    """The same batches; what the dataset raised is told in one line, wherever it was raised.

    Args:
        find: ``(batch, words of the error) -> sample``, where torch's own frames do not tell it.
    """
    whole = 0  # batches that came through
    try:
        for batch in iterator:
            whole += 1
            yield batch
    except RunError as error:  # from a worker, torch has put the whole traceback into the message
        lines = [line for line in str(error).splitlines() if "the dataset raised at sample" in line]
        raise RunError(lines[-1].split("Failure: ")[-1] if lines else str(error)) from error
    except Exception as error:
        words = _own_words(error)
        sample = sample_being_fetched(error)
        if sample is None and contains_worker_traceback(error):  # not of a worker that died: so might this process
            sample = find(whole, words)
        named = "" if sample is None else f", sample {sample}"
        raise RunError(f"the data raised at batch {whole + 1} of the pass{named}: {words}") from error


def _own_words(error: Exception) -> str:
    """``KeyError: 'x'``; from a worker, torch has put the whole traceback into the message, which ends with these words."""
    if not contains_worker_traceback(error):
        return format_error(error)
    kind, colon, text = worker_error_text(error).partition(": ")
    return f"{kind.rpartition('.')[2]}{colon}{text}"[:300]
