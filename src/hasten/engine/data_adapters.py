"""Turns the data of a task into batch sources.

A map-style dataset is shuffled by (seed, epoch) in the order of torch's DistributedSampler, and random numbers that
it draws are a function of (seed, epoch, batch): the same for any number of workers and any resume point. A ready
DataLoader is iterated as a hand-written loop would. A pipeline of hasten.data, or any object with
``batches(batch_size, seed, training)``, returns its own BatchSource.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, zip_longest
from types import GeneratorType
from typing import Any, cast
from zlib import crc32

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

from hasten.core.data import BatchSource, LoaderSpec
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.method import Method, hooks_of
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.run_context import RunContext, TrainPlan
from hasten.core.task import Task
from hasten.core.types import Batch
from hasten.distributed.batch_sharding import SAME_DATA, ShardLog, check_batch_divisible, fingerprint, shard_batches
from hasten.engine.composition import call_hook
from hasten.engine.loaders import from_iterable_dataset, from_loader, from_spec, length_of
from hasten.loading.probe import probe_samples
from hasten.utils.rng import derive_seed, preserve_rng_state

ONE_PROCESS_ONLY = (
    "--max-bad-rows is for a single process, because several would count their bad rows separately; "
    "leave it out, or clean the data"
)


def load_data(task: Task) -> Task:
    """A copy of the task in which data given as a function are loaded; ConfigurationError if empty or no dataset."""
    train = _load(task.train_data, "train_data")
    validation = None if task.validation_data is None else _load(task.validation_data, "validation_data")
    _check_classes(train, validation)
    _check_columns(train, validation)
    return replace(task, train_data=train, validation_data=validation)


def _check_classes(train: Any, validation: Any) -> None:
    """ConfigurationError if both number their classes by name, as images in directories do, and not alike."""
    if validation is None:
        return
    numbers = [_class_numbers(data) for data in (train, validation)]
    shared = numbers[0].keys() & numbers[1].keys()
    different = sorted(name for name in shared if numbers[0][name] != numbers[1][name])
    if not different:
        return
    one = different[0]
    what = f"{one} is {numbers[0][one]} and {numbers[1][one]}"
    problem = "train_data and validation_data number their classes differently"
    raise ConfigurationError(f"{problem}: {what}; give both the same directories of classes, or the same classes=")


def _check_columns(train: Any, validation: Any) -> None:
    """ConfigurationError if both are tables read as matrices, of other columns or in another order."""
    columns = [found for data in (train, validation) if (found := getattr(data, "matrix_columns", None))]
    if len(columns) == 2 and columns[0] != columns[1]:
        one, other = next(pair for pair in zip_longest(*columns) if pair[0] != pair[1])
        problem = "train_data and validation_data have other columns, or the same in another order"
        raise ConfigurationError(f"{problem}: {one!r} and {other!r} in one place; pass both the same columns=[...]")


def _class_numbers(data: Any) -> dict[str, int]:
    """Class -> number of data that know the names of their classes; empty for others."""
    names = _class_names(data)
    if not isinstance(names, (list, tuple)):
        return {}
    listed: list[Any] = list(names)  # pyright: ignore[reportUnknownArgumentType]
    of_classes = all(isinstance(name, str) for name in listed) and len({*map(str, listed)}) == len(listed)
    return {name: number for number, name in enumerate(listed)} if of_classes else {}  # else labels of samples


def _class_names(data: Any) -> Any:
    """What data hold as ``classes``, which may be anything but names; None if they hold nothing, or cannot be read."""
    if is_prebatched(data) and not isinstance(data, DataLoader):
        with suppress(Exception):  # of reading a table: training reads it, too, and raises that or counts bad rows
            return data.classes
        return None
    owner: Any = cast(Any, data).dataset if isinstance(data, DataLoader) else data
    return getattr(owner, "__dict__", {}).get("classes")  # a property of the user's might compute anything


def initial_plan(task: Task) -> TrainPlan:
    """The training plan of a task with loaded data, before any method changes it."""
    data, batch_size = task.train_data, _batch_size_of(task)
    samples = _samples_of(data)
    items_are_batches = cast(Any, data).batch_sampler is None if isinstance(data, DataLoader) else _has_no_size(task)
    if items_are_batches:
        samples = samples and task.batch_size and samples * task.batch_size
    when: dict[str, Any] = {"evaluate_every": task.evaluate_every, "schedule_interval": task.schedule_interval}
    known = batch_size is not None
    return TrainPlan(batch_size or 1, task.epochs, samples=samples, is_batch_size_known=known, **when)


def _samples_of(data: Any) -> int | None:
    """Samples of an epoch: those that the sampler of a DataLoader draws, which may be fewer than the dataset has."""
    dataset = data.dataset if is_prebatched(data) else data
    drawn = None
    if isinstance(data, DataLoader) and not isinstance(dataset, IterableDataset):
        loader = cast(Any, data)
        drawn = length_of(getattr(loader.batch_sampler, "sampler", loader.sampler))
    return length_of(dataset) if drawn is None else drawn


def training(
    task: Task,
    batch_size: int,
    seed: int,
    ranks: ProcessGroupInfo = SINGLE_PROCESS,
    log: ShardLog | None = None,
    stages: int = 1,
) -> BatchSource:
    """The training batches of a task with loaded data; with several ``ranks``, this rank's shard of each global batch.

    ``log`` records the shards and is needed with several ranks; ``stages`` are the pipeline stages of each replica.
    ConfigurationError if, with several ranks, the data skip bad rows, or a sampler shards them already.
    """
    data = task.train_data
    if not ranks.is_single_process:
        _refuse_distributed_sampler(data, "train_data")
        _refuse_distributed_sampler(task.validation_data, "validation_data")
        if _shards_itself(data):
            if data.faults.max_rows:
                raise ConfigurationError(ONE_PROCESS_ONLY)
            return _batches(data.shard(ranks.world_size, ranks.rank), task, batch_size, seed, training=True)
    batches = _batches(data, task, batch_size, seed, training=True)
    if log is not None:
        batches = shard_batches(batches, ranks, log, stages)
    return _with_set_epoch(batches, data)


def epoch_setters(data: Any) -> list[Any]:
    """The methods ``set_epoch`` of data, and of their samplers and dataset; a pipeline is asked by the number."""
    source: Any = data
    if is_prebatched(data) and not isinstance(data, DataLoader):
        return []
    owners: list[Any] = [source, *(getattr(source, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    return [call for owner in owners if callable(call := getattr(owner, "set_epoch", None))]


def _with_set_epoch(batches: BatchSource, data: Any) -> BatchSource:
    """Batches before whose epochs the data, and their samplers, get the number of the epoch, as in a loop by hand."""
    calls = epoch_setters(data)
    if not calls:
        return batches

    def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
        for set_epoch in calls:
            set_epoch(epoch)
        return batches.epoch(epoch, start)

    return replace(batches, epoch=epoch, spec=None)  # who reads the samples by index would not call it


def validation(task: Task, batch_size: int, seed: int) -> BatchSource | None:
    """The validation batches, complete on every rank; None if the task has no validation data."""
    if task.validation_data is None:
        return None
    return _batches(task.validation_data, task, batch_size, seed, training=False)


def check_process_count(task: Task, processes: int, methods: Iterable[Method] = ()) -> None:
    """ConfigurationError if a batch has fewer samples than there are processes; called before any process is started.

    A method may change batch size or shards in ``plan`` or ``setup``; then the ranks check it themselves.
    """
    batch_size = _batch_size_of(task)
    if batch_size and not any({"plan", "setup"}.intersection(hooks_of(method)) for method in methods):
        check_batch_divisible(processes, batch_size)
        if processes > 1 and _shards_itself(task.train_data):
            part: Any = task.train_data.shard(processes, 0)
            len(part if part.batch_size else part.batch(batch_size))  # ConfigurationError for a short last batch


def check_last_batch(task: Task, plan: TrainPlan, length: int | None, ranks: ProcessGroupInfo, smallest: int) -> None:
    """ConfigurationError if data that shard their own batches leave a rank less than ``smallest`` samples of the last.

    ``length``: number of batches of an epoch. Other data are sharded by ``shard_batches``, and every rank reads such a
    batch of them completely.
    """
    if plan.samples is None or length is None or ranks.is_single_process or not _shards_itself(task.train_data):
        return
    last = plan.samples - (length - 1) * plan.batch_size  # at least a batch if the shorter last one is left out
    if last < smallest * ranks.world_size:
        problem = f"the last batch has {last} samples for {ranks.world_size} processes"
        advice = "use another batch size, or .batch(size, drop_last=True)"
        raise ConfigurationError(f"{problem}, and BatchNorm1d needs {smallest} in each; {advice}")


def _batch_size_of(task: Task) -> int | None:
    """Samples of a global batch; None where neither the task nor its data state the number."""
    return (task.train_data.batch_size if is_prebatched(task.train_data) else None) or task.batch_size


def _has_no_size(task: Task) -> bool:
    return _batch_size_of(task) is None and getattr(task.train_data, "batch_size", None) is None


def _refuse_distributed_sampler(data: Any, field: str) -> None:
    sampler = getattr(getattr(data, "batch_sampler", None), "sampler", None) or getattr(data, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        effect = "hasten shards them again, so samples would never be read; leave the sampler out"
        raise ConfigurationError(f"the DistributedSampler of Task({field}=) shards the data, and {effect}")


def first_batch(training: BatchSource, validation: BatchSource | None) -> Batch:
    """The first training batch, not consumed; of validation if the training data can be read only once.
    ConfigurationError if there are no validation data then.
    """
    source = training if training.seekable else validation
    if source is None:
        reason = "these data can be read only once; give validation_data"
        raise ConfigurationError(f"a method of this recipe must see a batch before the training, and {reason}")
    with preserve_rng_state(*source.generators):
        return next(iter(source.epoch(0, 0)))


def check_same_samples(batches: BatchSource, ranks: ProcessGroupInfo, in_worker: bool = False) -> None:
    """RunError if a few samples that are read by index have other labels, or targets, on another rank. A collective.

    ``in_worker``: workers may start later, which would inherit what a dataset opens when it is first read here.
    """
    spec = batches.spec
    if ranks.is_single_process or spec is None or isinstance(spec.dataset, range):  # numbers of nodes of a graph
        return
    probed = replace(spec, num_workers=max(1, spec.num_workers)) if in_worker else spec

    def labels() -> int:
        with preserve_rng_state(*batches.generators):
            samples = probe_samples(probed, in_worker=True)
        try:
            return crc32(repr([fingerprint(default_collate([sample])) for sample in samples]).encode())
        except (RuntimeError, TypeError):  # only the task's own collate function makes tensors of them
            return 0

    found = ranks.all_gather((len(spec.dataset), first := labels()))
    other = next((rank for rank, one in enumerate(found) if one != found[0]), 0)
    if other == 0 or len({length for length, _ in found}) > 1:  # then the orders differ, which is reported
        return
    if any(ranks.all_gather(labels() != first)):  # drawn at every read, as negative samples are
        return
    advice = "give whatever splits or makes the data a fixed seed, and iterate over sets in sorted order"
    raise RunError(f"rank {other} has other samples than rank 0: {SAME_DATA}; {advice}")


def apply_data_hook(method: Method, inner: BatchSource, run: RunContext) -> BatchSource:
    """Calls a method's ``data`` hook. A plain iterable of batches that it returns becomes a BatchSource."""
    outer = call_hook(method, "data", inner, run)
    if isinstance(outer, BatchSource):
        return outer

    def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
        inner.position = (epoch, 0)
        is_generator = iter(outer) is outer  # lives for one epoch only
        return islice(iter(method.data(inner, run) if is_generator else outer), start, None)

    return BatchSource(epoch, inner.length, training=inner.training, seekable=False, generators=inner.generators)


def shuffled(length: int, batch_size: int, seed: int) -> Callable[[int], Iterable[list[int]]]:
    """``(epoch) -> lists of indices``, one per batch: the order of torch's DistributedSampler for (seed, epoch)."""

    def batch_sampler(epoch: int) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(seed + epoch)
        order: Any = torch.randperm(length, generator=generator)
        permutation: list[int] = order.tolist()
        return (permutation[i : i + batch_size] for i in range(0, length, batch_size))

    return batch_sampler


def in_sequence(length: int, batch_size: int) -> Callable[[int], Iterable[list[int]]]:
    """``(epoch) -> lists of indices``, one per batch, in ascending order and equal in every epoch."""
    return lambda epoch: (list(range(i, min(i + batch_size, length))) for i in range(0, length, batch_size))


def _load(given: Any, field: str) -> Any:
    data: Any = given() if is_factory(given) else given
    if is_factory(given) and isinstance(data, GeneratorType):
        data = _Restarted(given)
    has_samples = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    if isinstance(data, (str, bytes, dict)) or not has_samples:
        kinds = "a dataset, a DataLoader or a function that returns one"
        raise ConfigurationError(f"Task({field}=) must be {kinds}, not {type(cast(Any, data)).__name__}")
    if hasattr(data, "__len__") and length_of(data) == 0:
        raise ConfigurationError(f"Task({field}=) is empty")
    return data


class _Restarted:
    """What a generator function yields, from the start in every epoch: a generator is read once."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def is_factory(data: Any) -> bool:
    """Whether a task's ``train_data`` or ``validation_data`` is a function to be called for the data."""
    return callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")


def is_prebatched(data: Any) -> bool:
    """Whether data come in batches: a DataLoader, or a pipeline with ``batches(batch_size, seed, training)``."""
    is_pipeline = callable(getattr(data, "batches", None)) and hasattr(data, "batch_size")
    return isinstance(data, DataLoader) or (is_pipeline and not hasattr(data, "__getitem__"))


def _shards_itself(data: Any) -> bool:
    """Whether data are a pipeline that returns a part of each batch; datasets may have another method ``shard``."""
    return is_prebatched(data) and hasattr(data, "shard")


def _is_stream(data: Any) -> bool:
    return length_of(data) is None or isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


def _batches(data: Any, task: Task, batch_size: int, seed: int, training: bool) -> BatchSource:
    if isinstance(data, DataLoader):
        return from_loader(data, task.batch_size, batch_size, seed, training)
    if _has_no_size(task):
        if is_prebatched(data) or not _is_stream(data):
            advice = "only a ready DataLoader, a pipeline or an iterable of batches brings its own"
            name = "train_data" if training else "validation_data"
            raise ConfigurationError(f"Task(batch_size=) is missing for the samples of {name}; {advice}")
        if training and batch_size != initial_plan(task).batch_size:
            problem = "the batch size cannot be changed: the training data are ready batches"
            raise ConfigurationError(f"{problem}; change it where they are made")
        return from_iterable_dataset(data, None, training, seed)
    if is_prebatched(data):
        return data.batches(batch_size, seed, training)
    length = length_of(data)
    if length is None or _is_stream(data):
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
