"""Turns what a task calls its data into Batches.

A map-style dataset is shuffled by (seed, epoch) in the order of torch's DistributedSampler, and any
random numbers that it draws are a function of (seed, epoch, batch): the same for any number of workers
and any point of resumption. A ready DataLoader is used exactly as a hand-written loop would use it.
A pipeline of hasten.data, or whatever else has ``batches(batch_size, seed, training)``, makes its own Batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hasten.core.data import BatchSource, LoaderSpec
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, hooks_of
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.run_context import RunContext, TrainPlan
from hasten.core.task import Task
from hasten.distributed.batch_sharding import ShardLog, check_batch_divisible, shard_batches
from hasten.engine.loaders import from_iterable_dataset, from_loader, from_spec, length_of
from hasten.utils.rng import derive_seed, preserve_rng_state


def load_data(task: Task) -> Task:
    """The task with its data there: a function that makes them is called, once.

    Raises:
        Refusal: what is there is no data, or is empty.
    """
    validation = None if task.validation_data is None else _opened(task.validation_data, "validation_data")
    return replace(task, train_data=_opened(task.train_data, "train_data"), validation_data=validation)


def initial_plan(task: Task) -> TrainPlan:
    """The plan of steps of a task whose data are opened, before any method has touched it."""
    data = task.train_data
    samples = length_of(data.dataset) if is_prebatched(data) else length_of(data)
    return TrainPlan(
        batch_size=_batch_size_of(task) or 1, epochs=task.epochs, samples=samples, evaluate_every=task.evaluate_every
    )


def training(
    task: Task,
    batch_size: int,
    seed: int,
    ranks: ProcessGroupInfo = SINGLE_PROCESS,
    notes: ShardLog | None = None,
    stages: int = 1,
) -> BatchSource:
    """The training data; among several ranks, this one's part of every batch, of which there is a note.

    Raises:
        Refusal: they leave bad rows out, which every rank would count by itself; or a sampler shares them out already.
    """
    if not ranks.is_single_process:
        _refuse_divided(task.train_data, "train_data")
        _refuse_divided(task.validation_data, "validation_data")
    if not ranks.is_single_process and hasattr(task.train_data, "shard"):
        if task.train_data.faults.max_rows:
            raise ConfigurationError(
                "skip_bad is for one process: several would count their bad rows apart; leave it out, or mend the data"
            )
        return _batches(task.train_data.shard(ranks.world_size, ranks.rank), task, batch_size, seed, training=True)
    return shard_batches(_batches(task.train_data, task, batch_size, seed, training=True), ranks, notes, stages)


def check_process_count(task: Task, processes: int, methods: Iterable[Method] = ()) -> None:
    """Holds a number of processes against a task, before any is started.

    A method with a hook ``plan`` may change the batch, or how many processes share it: then the ranks themselves find out.

    Raises:
        Refusal: a batch has fewer samples.
    """
    batch_size = _batch_size_of(task)
    if batch_size and not any("plan" in hooks_of(method) for method in methods):
        check_batch_divisible(processes, batch_size)


def _batch_size_of(task: Task) -> int | None:
    """Samples of a batch; None where neither the task nor its data tell."""
    return (task.train_data.batch_size if is_prebatched(task.train_data) else None) or task.batch_size


def _refuse_divided(data, field: str) -> None:
    sampler = getattr(getattr(data, "batch_sampler", None), "sampler", None) or getattr(data, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ConfigurationError(
            f"the DistributedSampler of Task({field}=) shares the data out, and so does hasten: nobody would see the rest; leave it out"
        )


def validation(task: Task, batch_size: int, seed: int) -> BatchSource | None:
    if task.validation_data is None:
        return None
    return _batches(task.validation_data, task, batch_size, seed, training=False)


def first_batch(training: BatchSource, validation: BatchSource | None):
    """The first training batch, read as if nobody had; of validation data where the training data may be read only once.

    Raises:
        Refusal: neither can be read beforehand.
    """
    found = training if training.seekable else validation
    if found is None:
        raise ConfigurationError(
            "a method of this recipe has to see a batch beforehand, and these data may be read only once; give validation_data"
        )
    with preserve_rng_state(*found.generators):
        return next(iter(found.epoch(0, 0)))


def apply_data_hook(method: Method, inner: BatchSource, run: RunContext) -> BatchSource:
    """What a method's ``data`` hook makes of the batches; a plain iterable of batches becomes Batches again."""
    outer = method.data(inner, run)
    if isinstance(outer, BatchSource):
        return outer

    def epoch(epoch: int, start: int = 0) -> Iterator:
        inner.position = (epoch, 0)
        once = iter(outer) is outer  # a generator lives for one pass only: ask for a new one
        return islice(iter(method.data(inner, run) if once else outer), start, None)

    return BatchSource(
        epoch=epoch, length=inner.length, training=inner.training, seekable=False, generators=inner.generators
    )


def shuffled(length: int, batch_size: int, seed: int) -> Callable[[int], Iterable[list[int]]]:
    """``(epoch) -> lists of indices``: the permutation that torch's DistributedSampler would give, in batches."""

    def order(epoch: int) -> Iterator[list[int]]:
        permutation = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        return (permutation[i : i + batch_size] for i in range(0, length, batch_size))

    return order


def in_sequence(length: int, batch_size: int) -> Callable[[int], Iterable[list[int]]]:
    return lambda epoch: (list(range(i, min(i + batch_size, length))) for i in range(0, length, batch_size))


def _opened(data, field: str):
    """The data behind a task's field, refused with a reason where it is none."""
    if is_factory(data):
        data = data()
    if (
        data is None
        or isinstance(data, (str, bytes, dict))
        or not (hasattr(data, "__getitem__") or hasattr(data, "__iter__"))
    ):
        raise ConfigurationError(
            f"Task({field}=) must be a dataset, a DataLoader or a function that returns one, not {type(data).__name__}"
        )
    if hasattr(data, "__len__") and length_of(data) == 0:
        raise ConfigurationError(f"Task({field}=) is empty")
    return data


def is_factory(data) -> bool:
    """Whether a task's field is a function that makes the data."""
    return callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")


def is_prebatched(data) -> bool:
    """Whether the data come in batches of their own size: a ready DataLoader, or a pipeline with ``batches(batch_size, seed, training)``."""
    return isinstance(data, DataLoader) or (hasattr(data, "batches") and not hasattr(data, "__getitem__"))


def _batches(data, task: Task, batch_size: int, seed: int, training: bool) -> BatchSource:
    if isinstance(data, DataLoader):
        return from_loader(data, task.batch_size, batch_size, seed, training)
    if batch_size is None or (task.batch_size is None and getattr(task.train_data, "batch_size", None) is None):
        raise ConfigurationError("Task(batch_size=) is missing; only a ready DataLoader or a pipeline brings its own")
    if is_prebatched(data):
        return data.batches(batch_size, seed, training)
    length = length_of(data)
    if length is None or isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return from_iterable_dataset(data, batch_size, training, seed)
    return from_spec(
        LoaderSpec(
            dataset=data,
            batch_sampler=shuffled(length, batch_size, seed) if training else in_sequence(length, batch_size),
            length=-(-length // batch_size),
            training=training,
            seed=seed if training else derive_seed(seed, 1),
            build=from_spec,
        )
    )
