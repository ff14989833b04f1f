"""Every batch shared out among the ranks: each reads its part, all parts one after the other are the batch of a run alone.

Before every step the ranks tell each other how many samples they have, and what batch it is that their parts belong to. So a loss that
averages over samples has the same gradient as over the whole batch, however unequal the parts are, and ranks that do not read the same data
are found at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from zlib import crc32

import torch

from hasten.contract.batch import map_tensors, size, tensors
from hasten.contract.data import Batches
from hasten.contract.errors import Failure, Refusal
from hasten.contract.method import Clock, Loop
from hasten.contract.ranks import Ranks


@dataclass(frozen=True)
class Whole:
    """A batch that this rank has a part of: how many samples it has, and what tells it from others."""

    samples: int
    mark: int


class Part(list):
    """A rank's indices of a batch, the first of which is sample ``first`` of it."""

    first = 0


Notes = dict[tuple[int, int], Whole]  # by (pass, batch)


def part_of(batches: Batches, ranks: Ranks, notes: Notes) -> Batches:
    """This rank's part of every batch; of one that has fewer samples than there are ranks, all of it.

    Samples that are read by index are not even read by the others; a stream, and a DataLoader with a sampler of its own, is read whole by
    every rank, which then keeps its part.
    """
    if ranks.alone:
        return batches
    if batches.samples is not None:
        return batches.with_samples(order=_parts(batches.samples.order, ranks, notes))

    def epoch(epoch: int, start: int = 0) -> Iterator:
        for number, batch in enumerate(batches.epoch(epoch, start), start):
            notes[epoch, number] = Whole(size(batch), _mark(batch))
            yield _cut(batch, ranks)

    return dataclasses.replace(batches, epoch=epoch, by=None)


def weighed(batches: Batches, ranks: Ranks, loop: Loop, clock: Clock, notes: Notes) -> Batches:
    """The same batches; before each, the clock is told how many samples all ranks have in it, and what this rank's part counts.

    Raises:
        Refusal: there are more ranks than samples in a batch.
        Failure: the ranks do not read the same data.
    """
    if ranks.alone:
        return batches
    if ranks.world > loop.batch_size:
        raise Refusal(f"{ranks.world} processes cannot share a batch of {loop.batch_size} samples; take fewer, or larger batches")

    def epoch(epoch: int, start: int = 0) -> Iterator:
        for known in [key for key in notes if key[0] < epoch]:
            del notes[known]
        iterator = iter(batches.epoch(epoch, start))
        for number in count(start):
            batch = next(iterator, None)
            own, whole = 0 if batch is None else size(batch), notes.pop((epoch, number), None)
            if whole is not None and own != _share(whole.samples, ranks):
                whole = None  # a method has made other batches of these
            mark = 0 if whole is None else whole.mark
            most, least, *owns = ranks.most([mark, -mark, *(own if rank == ranks.rank else 0 for rank in range(ranks.world))])
            if not any(owns):
                return
            if not all(owns):
                raise Failure(f"rank {owns.index(0)} has no batch {number + 1} of pass {epoch + 1}, and others have: {ALIKE}")
            if most != -least:
                raise Failure(f"the ranks read other data as batch {number + 1} of pass {epoch + 1}: {ALIKE}")
            is_whole = whole is not None and whole.samples < ranks.world
            clock.whole = int(sum(owns)) if whole is None else whole.samples
            clock.weight = 1.0 if is_whole else ranks.world * own / sum(owns)
            yield batch
            del batch  # or its memory could not be used again for the next one

    return dataclasses.replace(batches, epoch=epoch)


ALIKE = "all have to be given the same data, whole and in the same order; sharing them out (DistributedSampler) is done here"


def _share(samples: int, ranks: Ranks) -> int:
    first, end = ranks.part(samples)
    return samples if samples < ranks.world else end - first


def _parts(order: Callable, ranks: Ranks, notes: Notes) -> Callable:
    """``(epoch) -> this rank's indices of each batch``."""

    def parts(epoch: int) -> Iterator[Part]:
        for number, indices in enumerate(list(order(epoch))):
            notes[epoch, number] = Whole(len(indices), crc32(repr(indices).encode()))
            first, end = (0, len(indices)) if len(indices) < ranks.world else ranks.part(len(indices))
            part = Part(indices[first:end])
            part.first = first
            yield part

    return parts


def _cut(batch, ranks: Ranks):
    samples = size(batch)
    if samples < ranks.world:
        return batch
    first, end = ranks.part(samples)
    return map_tensors(lambda tensor: tensor[first:end] if tensor.ndim and tensor.shape[0] == samples else tensor, batch)


def _mark(batch) -> int:
    """Of the first sample, so that it costs next to nothing."""
    mark = 0
    for tensor in tensors(batch):
        if tensor.numel():
            mark = crc32(tensor.detach()[:1].cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.ndim else b"", mark)
    return mark
