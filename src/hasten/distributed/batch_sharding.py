"""Every batch shared out among the ranks: each reads its part, all parts one after the other are the batch of a run alone.

The ranks tell each other how many samples they have, and what data their parts belong to. So a loss that averages over samples has the same
gradient as over the whole batch, however unequal the parts are, and ranks that do not read the same data are found before the step.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from zlib import crc32

import numpy
import torch

from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.run_context import TrainPlan, TrainProgress
from hasten.utils.batch import batch_size, batch_tensors, map_tensors
from hasten.utils.rng import derive_seed


@dataclass(frozen=True)
class GlobalBatchInfo:
    """A batch that this rank has a part of: how many samples it has, and what tells it from others."""

    samples: int
    mark: int


class IndexShard(list):
    """A rank's indices of a batch, the first of which is sample ``first`` of it."""

    first = 0


@dataclass
class ShardLog:
    """What this rank knows of the batches that its parts belong to.

    Attributes:
        plans: of a pass over samples by index: the size of every batch, and what tells its order from others.
        wholes: of a batch (pass, number) that was read whole.
    """

    plans: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    wholes: dict[tuple[int, int], GlobalBatchInfo] = field(default_factory=dict)
    order: Callable | None = None  # whose plans these are


def shard_batches(batches: BatchSource, ranks: ProcessGroupInfo, notes: ShardLog, stages: int = 1) -> BatchSource:
    """This rank's part of every batch; of one that has fewer samples than there are ranks, all of it.

    Samples that are read by index are not even read by the others; a stream, and a DataLoader with a sampler of its own, is read whole by
    every rank, which then keeps its part. What samples draw depends on their position, or is drawn apart from what models draw, since ranks that read
    the same ones may compute other layers: those of the ``stages`` of one copy of the model read all the same.
    """
    if ranks.is_single_process and (stages == 1 or batches.seekable):
        return batches
    if batches.spec is not None:
        notes.order = _parts(batches.spec.batch_sampler, ranks, notes)
        return batches.with_spec(batch_sampler=notes.order)
    if not batches.seekable:  # else they draw by position already
        batches = batches.map_iterator(_drawn_apart)
    if ranks.is_single_process:
        return batches

    def epoch(epoch: int, start: int = 0) -> Iterator:
        for number, batch in enumerate(batches.epoch(epoch, start), start):
            # only of the first: what belongs to a whole batch may by chance be as long as the last one
            if number == start and _holds_more_than_tensors(batch, batch_size(batch)):
                raise RunError(NO_TENSORS)
            notes.wholes[epoch, number] = GlobalBatchInfo(batch_size(batch), _fingerprint(batch))
            yield _cut(batch, ranks)

    return dataclasses.replace(batches, epoch=epoch, by=None)


def _drawn_apart(iterator: Iterator) -> Iterator:
    """The same batches, which draw random numbers as if nobody else did meanwhile; what else the process draws until their end are others."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(derive_seed(int(torch.empty((), dtype=torch.int64).random_())))
    return _drawing_from(state, iterator)


def _drawing_from(state: torch.Tensor, iterator: Iterator) -> Iterator:
    """The same batches, each of which draws on where the one before it stopped; at their end so does the process."""
    batch = True
    while batch is not None:
        elsewhere = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            batch = next(iterator, None)
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(elsewhere)
        if batch is not None:
            yield batch
    torch.set_rng_state(state)


def with_loss_weights(
    batches: BatchSource,
    ranks: ProcessGroupInfo,
    plan: TrainPlan,
    progress: TrainProgress,
    notes: ShardLog,
    apart: bool = False,
) -> BatchSource:
    """The same batches; before each, the progress is told how many samples all ranks have in it, and what this rank's part counts.

    Where all follow from an order that is known, the ranks compare it once a pass; else they tell each other before every step, which
    those are told that meant to train ``apart``.

    Raises:
        Refusal: there are more ranks than samples in a batch.
        Failure: the ranks do not read the same data.
    """
    if ranks.is_single_process:
        return batches
    check_batch_divisible(ranks.world_size, plan.batch_size)
    in_order = batches.spec is not None and batches.spec.batch_sampler is notes.order
    if apart and not in_order and ranks.is_main_process:
        warnings.warn(MEETS_ALWAYS, HastenWarning, stacklevel=3)

    def epoch(epoch: int, start: int = 0) -> Iterator:
        notes.plans.clear()
        notes.wholes.clear()
        iterator = iter(batches.epoch(epoch, start))
        held = [next(iterator, None)]  # which notes the plan of the pass
        planned = _planned(epoch, ranks, notes) if in_order else None
        for number, batch in enumerate(_and_then(held, iterator), start):
            where = f"batch {number + 1} of pass {epoch + 1}"
            own = 0 if batch is None else batch_size(batch)
            if planned is not None:
                whole, everybodys = _of_plan(planned, number, own, where, ranks)
            else:
                whole, everybodys = _told(_noted(notes, epoch, number), own, where, ranks)
            if batch is None:
                return
            progress.global_batch_size = whole
            progress.loss_weight = 1.0 if whole < ranks.world_size else ranks.world_size * own / everybodys
            yield batch
            del batch  # or its memory could not be used again for the next one

    return dataclasses.replace(batches, epoch=epoch)


def check_batch_divisible(processes: int, samples: int) -> None:
    """
    Raises:
        Refusal: there are more ranks than samples in a batch.
    """
    if processes > samples:
        raise ConfigurationError(
            f"{processes} processes cannot share a batch of {samples} samples; take fewer, or larger batches"
        )


SAME = 1e-6  # relative difference of sums, which other processors may add up otherwise
MEETS_ALWAYS = (
    "the processes tell each other before every step what they have read, so less is saved than could be; "
    "a dataset with __len__ and __getitem__, and no method that reads it otherwise, needs no such word"
)
NO_TENSORS = "a batch that is not made of tensors with one number of samples cannot be shared out; give data by index, or such tensors"
DRAWN = "a dataset may draw from torch's, NumPy's or Python's own generators, which are seeded alike, or from one with a fixed seed"
ALIKE = "all have to be given the same data, whole and in the same order; sharing them out (DistributedSampler) is done here"


def _and_then(held: list, iterator: Iterator) -> Iterator:
    """The batch that is held, those after it, and a None for the end."""
    batch = held.pop()
    yield batch
    while batch is not None:
        del batch
        batch = next(iterator, None)
        yield batch


def _planned(epoch: int, ranks: ProcessGroupInfo, notes: ShardLog) -> list[int] | None:
    """The sizes of the batches of a pass, which is the same on all ranks; None where somebody does not know them."""
    sizes, mark = notes.plans.get(epoch, ([], -1))
    most, least = ranks.all_reduce_max([mark, -mark])
    if most != -least and least < 1:
        raise RunError(f"the ranks read pass {epoch + 1} in another order: {ALIKE}")
    return sizes if least < 1 else None


def _noted(notes: ShardLog, epoch: int, number: int) -> GlobalBatchInfo | None:
    """What is known of a batch: as it was read, or as it was planned."""
    sizes, mark = notes.plans.get(epoch, ([], 0))
    return notes.wholes.pop((epoch, number), None) or (
        GlobalBatchInfo(sizes[number], mark) if number < len(sizes) else None
    )


def _of_plan(sizes: list[int], number: int, own: int, where: str, ranks: ProcessGroupInfo) -> tuple[int, int]:
    """(samples of the batch, samples of all parts of it) as was planned."""
    whole = sizes[number] if number < len(sizes) else 0
    if own != _share(whole, ranks):
        raise RunError(
            f"rank {ranks.rank} has {own} samples of {where}, and {_share(whole, ranks)} were expected: {ALIKE}"
        )
    return whole, whole


def _told(known: GlobalBatchInfo | None, own: int, where: str, ranks: ProcessGroupInfo) -> tuple[int, int]:
    """(samples of the batch, samples of all parts of it) as the ranks tell each other."""
    known = (
        known if known is not None and own == _share(known.samples, ranks) else None
    )  # a method may have made others of them
    mark = 0 if known is None else known.fingerprint
    most, least, *owns = ranks.all_reduce_max(
        [mark, -mark, *(own if rank == ranks.rank else 0 for rank in range(ranks.world_size))]
    )
    if any(owns) and not all(owns):
        raise RunError(f"rank {owns.index(0)} has no {where}, and others have: {ALIKE}")
    if most != -least:
        raise RunError(f"the ranks read other data as {where}: {ALIKE}; {DRAWN}")
    return (int(sum(owns)) if known is None else known.samples), int(sum(owns))


def _share(samples: int, ranks: ProcessGroupInfo) -> int:
    first, end = ranks.shard_bounds(samples)
    return samples if samples < ranks.world_size else end - first


def _parts(order: Callable, ranks: ProcessGroupInfo, notes: ShardLog) -> Callable:
    """``(epoch) -> this rank's indices of each batch``."""

    def parts(epoch: int) -> Iterator[IndexShard]:
        batches = list(order(epoch))
        notes.plans[epoch] = (
            [len(indices) for indices in batches],
            crc32(repr((batches[:8], batches[-1:], len(batches))).encode()),
        )
        for indices in batches:
            first, end = (0, len(indices)) if len(indices) < ranks.world_size else ranks.shard_bounds(len(indices))
            part = IndexShard(indices[first:end])
            part.first = first
            yield part

    return parts


def _cut(batch, ranks: ProcessGroupInfo):
    samples = batch_size(batch)
    if any(tensor.ndim and tensor.shape[0] != samples for tensor in batch_tensors(batch)):
        raise RunError(NO_TENSORS)
    if samples < ranks.world_size:
        return batch
    first, end = ranks.shard_bounds(samples)
    return map_tensors(
        lambda tensor: tensor[first:end] if tensor.ndim and tensor.shape[0] == samples else tensor, batch
    )


def _holds_more_than_tensors(batch, samples: int) -> bool:
    """Whether something in a batch has an item for each sample and is no tensor: an array, or a list of texts, of lists, of numbers."""
    if isinstance(batch, numpy.ndarray):
        return batch.ndim > 0
    if isinstance(batch, Mapping):
        return any(_holds_more_than_tensors(value, samples) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        bare = len(batch) == samples and not any(tensor.ndim for tensor in batch_tensors(batch))
        return bare or any(_holds_more_than_tensors(item, samples) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return any(_holds_more_than_tensors(getattr(batch, field.name), samples) for field in dataclasses.fields(batch))
    return False


def _fingerprint(batch) -> int:
    """What tells the samples of a batch from others.

    One whole number a sample, as labels are, whatever an unseeded generator may have made of the inputs; else all whole numbers, as token ids are;
    else the last tensor, if that is a table, as targets are.
    """
    held = batch_tensors(batch)
    whole = [tensor for tensor in held if tensor.dtype in (torch.int32, torch.int64)]
    labels = [tensor for tensor in whole if tensor.ndim == 1]
    targets = [tensor for tensor in held[-1:] if tensor.ndim <= 2]
    mark = 0
    for tensor in labels or whole or targets:
        mark = crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), mark)
    return mark


def check_replica_inputs(batches: BatchSource, ranks: ProcessGroupInfo, replica: int) -> BatchSource:
    """The same batches; the first of each pass is compared by those ranks that hold one copy of the model between them, and have to see the same.

    Raises:
        Failure: they do not.
    """
    if replica == 1:
        return batches

    def epoch(epoch: int, start: int = 0) -> Iterator:
        iterator = iter(batches.epoch(epoch, start))
        first = next(iterator, None)
        seen = [json.loads(each) for each in ranks.all_gather(json.dumps(_sums(first)).encode())]
        own = seen[ranks.rank // replica * replica :][:replica]
        if other := next((rank for rank, sums in enumerate(own) if not _alike(sums, own[0])), None):
            first_of_all = ranks.rank // replica * replica
            raise RunError(
                f"rank {first_of_all + other} was given other samples than rank {first_of_all}, and both compute parts of one model: {DRAWN}"
            )
        if first is not None:
            yield first
            del first
        yield from iterator

    return dataclasses.replace(batches, epoch=epoch)


def _sums(batch) -> list[list[float]]:
    """Of each tensor its sum, and that of its sizes: enough to tell samples, and not what machines of two kinds make of one."""
    held = [tensor.detach().double() for tensor in batch_tensors(batch) if not tensor.is_complex()]
    return [[tensor.sum().item(), tensor.abs().sum().item()] for tensor in held]


def _alike(some: list, others: list) -> bool:
    return len(some) == len(others) and all(
        not abs(one - other) > SAME * max(size, 1e-30) for (one, size), (other, _) in zip(some, others, strict=True)
    )
