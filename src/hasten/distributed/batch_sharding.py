"""Shards each global batch over the data-parallel ranks. Concatenated in rank order, the shards equal the batch.

Ranks exchange how many samples they have and a fingerprint of the batch that these belong to. So a loss that averages
over samples has the same gradient as over the global batch, however unequal the shards are, and ranks that read
different data are found before the step.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, TypeAlias
from zlib import crc32

import numpy
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.run_context import TrainPlan, TrainProgress
from hasten.core.types import Batch
from hasten.utils.batch import batch_size, batch_tensors, map_tensors
from hasten.utils.rng import derive_seed
from hasten.utils.tree import tree_leaves

SUM_TOLERANCE = 1e-6  # relative; processors of different kinds may add in another order
SAME_DATA = (
    "every rank must read the same data, unsharded and in the same order; hasten shards it (remove DistributedSampler)"
)
SAME_COUNT = "the collate function drops or adds samples, which several ranks cannot share; keep one for each index"
SEEDED = (
    "datasets may draw from the generators of torch, NumPy or Python, which hasten seeds, or from one with a fixed seed"
)
NOT_TENSORS = (
    "a batch can be sharded only if it consists of tensors with the same number of samples; "
    "give samples by index, or such tensors"
)
SYNC_EVERY_STEP = (
    "the ranks exchange batch sizes before every step, so less communication is saved than could be; avoid it with a "
    "dataset that has __len__ and __getitem__, and no method that reads it in another way"
)
GlobalBatch: TypeAlias = tuple[int, int]  # its number of samples, and a fingerprint that distinguishes it from others


class BatchIndices(list[int]):
    """The sample indices of a batch or of a shard of it, with its place in the epoch, which seeds the samples.

    Attributes:
        first: Position of the first of these indices in the global batch.
        batch: Index of the global batch in the epoch; None if that is the index among the batches that this rank reads.
    """

    first = 0
    batch: int | None = None


@dataclass
class EvaluationShards:
    """Which validation batches this rank reads: every ``world_size``-th one while ``active``, otherwise all."""

    ranks: ProcessGroupInfo
    active: bool = False

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Context manager: sets ``active``, so that in an evaluation inside it each rank reads other batches."""
        self.active = True
        try:
            yield
        finally:
            self.active = False


def share_evaluation(batches: BatchSource, shards: EvaluationShards) -> BatchSource | None:
    """The validation batches; while ``shards`` are active, whole batches of them by turns, so that none is cut.

    None if they cannot be shared: their order is unknown, or there are fewer of them than ranks.
    """
    spec = batches.spec
    if spec is None or shards.ranks.is_single_process or spec.length < shards.ranks.world_size:
        return None
    # not ``loader.sampler``, which is sequential beside any batch_sampler of the user's
    sampler = None if spec.loader is None else spec.loader.batch_sampler
    in_order = type(sampler) is BatchSampler and isinstance(sampler.sampler, (SequentialSampler, range))
    if sampler is not None and not in_order:
        return None  # shuffled, or in an order that only the sampler knows: each rank may have another one
    order = spec.batch_sampler

    def numbered(epoch: int) -> Iterator[list[int]]:
        first, step = (shards.ranks.rank, shards.ranks.world_size) if shards.active else (0, 1)
        for batch, indices in islice(enumerate(order(epoch)), first, None, step):
            result = BatchIndices(indices)
            result.batch = batch
            yield result

    return batches.with_spec(batch_sampler=numbered)


@dataclass
class ShardLog:
    """Sizes and fingerprints of the global batches that this rank's shards belong to, to compare with other ranks'."""

    # epoch -> (size of every global batch, fingerprint of their order), for samples that are read by index
    plans: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    # (epoch, batch index) -> a global batch that this rank read completely
    batches: dict[tuple[int, int], GlobalBatch] = field(default_factory=dict)
    batch_sampler: Callable[[int], Iterable[list[int]]] | None = None  # the sampler that computed ``plans``
    smallest: int = 1  # samples of a shard; each rank reads a batch that has fewer for a rank completely

    def is_sharded(self, samples: int, ranks: ProcessGroupInfo) -> bool:
        """Whether the ranks share a batch of so many samples; False where each reads all of it."""
        return samples >= self.smallest * ranks.world_size


def shard_batches(batches: BatchSource, ranks: ProcessGroupInfo, log: ShardLog, stages: int = 1) -> BatchSource:
    """This rank's shard of every batch. All ranks read a batch without ``log.smallest`` samples for each completely.

    Samples read by index are read by one rank each. A stream, or a DataLoader with its own sampler, is read completely
    by every rank; RunError, then, if it has samples outside tensors. Random numbers that samples draw depend on their
    position or come from a separate generator, because the ``stages`` of one replica read the same samples but draw
    different numbers in their layers.
    """
    if ranks.is_single_process and (stages == 1 or batches.seekable):
        return batches
    if batches.spec is not None:
        log.batch_sampler = _shard_sampler(batches.spec.batch_sampler, ranks, log)
        return batches.with_spec(batch_sampler=log.batch_sampler)
    if not batches.seekable:  # seekable batches draw by position already
        batches = batches.map_iterator(_with_separate_rng)
    if ranks.is_single_process:
        return batches
    read = batches.epoch

    def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
        for index, batch in enumerate(read(epoch, start), start):
            # only the first one: a list that belongs to the whole batch may by chance be as long as the last batch
            if index == start and _has_samples_outside_tensors(batch, batch_size(batch)):
                raise RunError(NOT_TENSORS)
            log.batches[epoch, index] = batch_size(batch), fingerprint(batch)
            yield _shard(batch, ranks, log)

    return dataclasses.replace(batches, epoch=epoch, with_workers=None)


def with_loss_weights(
    batches: BatchSource,
    ranks: ProcessGroupInfo,
    plan: TrainPlan,
    progress: TrainProgress,
    log: ShardLog,
    replicas_differ: bool = False,
) -> BatchSource:
    """The same batches; before each, sets the global batch size and the weight of this rank's shard in ``progress``.

    If both follow from a known order, the ranks compare the order once an epoch; else they exchange sizes before every
    step, and ``replicas_differ`` (communication every few steps) saves less: a warning. ConfigurationError if there are
    more ranks than samples in a batch of known size; a warning, once, if the ranks do not share a batch that is not the
    last of its epoch. RunError, during an epoch, if the ranks read different data.
    """
    if ranks.is_single_process:
        return batches
    if plan.is_batch_size_known:
        check_batch_divisible(ranks.world_size, plan.batch_size)
    order_known = batches.spec is not None and batches.spec.batch_sampler is log.batch_sampler
    if replicas_differ and not order_known and ranks.is_main_process:
        warnings.warn(SYNC_EVERY_STEP, HastenWarning, stacklevel=3)
    read, is_reported = batches.epoch, not ranks.is_main_process

    def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
        nonlocal is_reported
        log.plans.clear()
        log.batches.clear()
        iterator = iter(read(epoch, start))
        batch = next(iterator, None)  # reading it writes the plan of the epoch
        sizes = _agreed_sizes(epoch, ranks, log) if order_known else None
        for index in count(start):
            name = f"batch {index + 1} of epoch {epoch + 1}"
            local = 0 if batch is None else batch_size(batch)
            if sizes is not None:
                samples = summed = sizes[index] if index < len(sizes) else 0
                if local != (expected := _shard_size(samples, ranks, log)):
                    problem = f"rank {ranks.rank} has {local} samples of {name}, but its order has {expected}"
                    raise RunError(f"{problem}: {SAME_COUNT}")
            else:
                samples, summed = _exchange_samples(log, epoch, index, local, name, ranks)
            if batch is None:
                return
            progress.global_batch_size = samples
            progress.loss_weight = 1.0 if local == samples else ranks.world_size * local / summed
            yield batch
            batch = None  # or its memory could not be used for the next one
            batch = next(iterator, None)
            if local == samples and batch is not None and not is_reported:
                problem = f"{name} has {samples} samples, too few for {ranks.world_size} processes"
                reason = "" if log.smallest == 1 else f" (batch normalization needs {log.smallest} in each)"
                effect = "each computes the whole batch, so there is no speedup; use larger batches or fewer processes"
                warnings.warn(f"{problem}{reason}: {effect}", HastenWarning, stacklevel=2)
                is_reported = True

    return dataclasses.replace(batches, epoch=epoch)


def check_batch_divisible(processes: int, samples: int) -> None:
    """Raises ``ConfigurationError`` if a batch of ``samples`` has fewer of them than there are ``processes``."""
    if processes > samples:
        advice = "take fewer, or larger batches"
        raise ConfigurationError(f"{processes} processes cannot share a batch of {samples} samples; {advice}")


def check_replica_inputs(batches: BatchSource, ranks: ProcessGroupInfo, model_parallel_size: int) -> BatchSource:
    """The same batches. ``RunError`` if ranks of one replica read different samples; checked once an epoch."""
    if model_parallel_size == 1:
        return batches
    first_rank = ranks.rank // model_parallel_size * model_parallel_size
    read = batches.epoch

    def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
        iterator = iter(read(epoch, start))
        batch = next(iterator, None)
        gathered = ranks.all_gather(_sums(batch))
        expected, *others = gathered[first_rank : first_rank + model_parallel_size]
        for rank, sums in enumerate(others, first_rank + 1):
            if not _sums_agree(sums, expected):
                problem = f"but both compute parts of one model replica: {SEEDED}"
                raise RunError(f"rank {rank} was given other samples than rank {first_rank}, {problem}")
        if batch is not None:
            yield batch
            del batch
        yield from iterator

    return dataclasses.replace(batches, epoch=epoch)


def _with_separate_rng(iterator: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, computed with a random state of their own that is seeded from torch's generator."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(derive_seed(int(torch.empty((), dtype=torch.int64).random_())))
    return _draw_from(state, iterator)


def _draw_from(data_state: torch.Tensor, iterator: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches. Each is computed with ``data_state``, which advances; else torch's state is unaffected."""
    batch = True
    while batch is not None:
        model_state = torch.get_rng_state()
        torch.set_rng_state(data_state)
        try:
            batch = next(iterator, None)
        finally:
            data_state = torch.get_rng_state()
            torch.set_rng_state(model_state)
        if batch is not None:
            yield batch
    torch.set_rng_state(data_state)


def _agreed_sizes(epoch: int, ranks: ProcessGroupInfo, log: ShardLog) -> list[int] | None:
    """Samples of each global batch of an epoch; None if a rank has no plan, RunError if the plans' orders differ."""
    sizes, fingerprint = log.plans.get(epoch, ([], -1))
    largest, negated_smallest = ranks.all_reduce_max([fingerprint, -fingerprint])
    if negated_smallest >= 1:
        return None
    if largest != -negated_smallest:
        raise RunError(f"the ranks read epoch {epoch + 1} in different orders: {SAME_DATA}")
    return sizes


def _global_batch(log: ShardLog, epoch: int, index: int) -> GlobalBatch | None:
    """Size and fingerprint of a batch: as read completely, else as planned; None if neither is known."""
    if (info := log.batches.pop((epoch, index), None)) is not None:
        return info
    sizes, fingerprint = log.plans.get(epoch, ([], 0))
    return (sizes[index], fingerprint) if index < len(sizes) else None


def _exchange_samples(
    log: ShardLog, epoch: int, index: int, local: int, name: str, ranks: ProcessGroupInfo
) -> tuple[int, int]:
    """(samples of the batch, sum of all ranks' ``local``, which may be more); RunError if the ranks' data differ."""
    samples, fingerprint = _global_batch(log, epoch, index) or (None, 0)
    if samples is not None and local != _shard_size(samples, ranks, log):
        samples, fingerprint = None, 0  # a method has changed the samples
    one_hot = [local if rank == ranks.rank else 0 for rank in range(ranks.world_size)]
    largest, negated_smallest, *counts = ranks.all_reduce_max([fingerprint, -fingerprint, *one_hot])
    if any(counts) and not all(counts):
        raise RunError(f"rank {counts.index(0)} has no {name}, but others have: {SAME_DATA}")
    if largest != -negated_smallest:
        raise RunError(f"the ranks read different data as {name}: {SAME_DATA}; {SEEDED}")
    return (int(sum(counts)) if samples is None else samples), int(sum(counts))


def _shard_size(samples: int, ranks: ProcessGroupInfo, log: ShardLog) -> int:
    first, end = _shard_bounds(samples, ranks, log)
    return end - first


def _shard_bounds(samples: int, ranks: ProcessGroupInfo, log: ShardLog) -> tuple[int, int]:
    """(first, end) of this rank's samples of a batch; (0, samples) of one that each rank reads completely."""
    return ranks.shard_bounds(samples) if log.is_sharded(samples, ranks) else (0, samples)


def _shard_sampler(
    batch_sampler: Callable[[int], Iterable[list[int]]], ranks: ProcessGroupInfo, log: ShardLog
) -> Callable[[int], Iterator[list[int]]]:
    """``(epoch) -> lists of indices``: this rank's shard of each list that ``batch_sampler`` returns."""

    def shards(epoch: int) -> Iterator[list[int]]:
        batches = list(batch_sampler(epoch))
        fingerprint = crc32(repr((batches[:8], batches[-1:], len(batches))).encode())
        log.plans[epoch] = [len(indices) for indices in batches], fingerprint
        for indices in batches:
            first, end = _shard_bounds(len(indices), ranks, log)
            shard = BatchIndices(indices[first:end])
            shard.first = first
            yield shard

    return shards


def _shard(batch: Batch, ranks: ProcessGroupInfo, log: ShardLog) -> Batch:
    samples = batch_size(batch)
    if any(tensor.ndim and tensor.shape[0] != samples for tensor in batch_tensors(batch)):
        raise RunError(NOT_TENSORS)
    if not log.is_sharded(samples, ranks):
        return batch
    first, end = ranks.shard_bounds(samples)
    return map_tensors(lambda t: t[first:end] if t.ndim and t.shape[0] == samples else t, batch)


def _has_samples_outside_tensors(batch: Batch, samples: int) -> bool:
    """Whether a batch holds data per sample outside tensors (NumPy array, list), which cannot be sharded here."""

    def is_list_of_samples(node: Any) -> bool:
        is_list = isinstance(node, (list, tuple)) and len(node) == samples
        return is_list and not any(tensor.ndim for tensor in batch_tensors(node))

    leaves = tree_leaves(batch, is_leaf=is_list_of_samples)
    return any(is_list_of_samples(leaf) or (isinstance(leaf, numpy.ndarray) and leaf.ndim) for leaf in leaves)


def fingerprint(batch: Batch) -> int:
    """Checksum that distinguishes the samples of a batch from others.

    Taken of one integer a sample, such as labels, which random augmentation does not change; else of all integers, such
    as token ids; else of the last tensor, if it has at most two dimensions, as targets have.
    """
    tensors = batch_tensors(batch)
    integers = [tensor for tensor in tensors if tensor.dtype in (torch.int32, torch.int64)]
    labels = [tensor for tensor in integers if tensor.ndim == 1]
    targets = [tensor for tensor in tensors[-1:] if tensor.ndim <= 2]
    checksum = 0
    for tensor in labels or integers or targets:
        checksum = crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, checksum)
    return checksum


def _sums(batch: Batch) -> list[list[float]]:
    """[sum, sum of absolute values] of each real tensor of a batch: equal up to rounding for the same samples."""
    tensors = [tensor.detach().double() for tensor in batch_tensors(batch) if not tensor.is_complex()]
    return [[tensor.sum().item(), tensor.abs().sum().item()] for tensor in tensors]


def _sums_agree(sums: list[Any], expected: list[Any]) -> bool:
    return len(sums) == len(expected) and all(
        not abs(a - b) > SUM_TOLERANCE * max(size, 1e-30)  # true for NaN
        for (a, size), (b, _) in zip(sums, expected, strict=True)
    )
