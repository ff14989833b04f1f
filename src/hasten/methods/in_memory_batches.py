"""Fetches whole batches by index out of one tensor a field, in place of one sample at a time.

A textbook loader calls Python for every sample and stacks the results for every batch. Where the samples are
the same in every pass, stacking them once is enough: a batch is then one ``index_select`` a field, into
buffers that are used again, so that no fresh memory has to be faulted in. Small batches are fetched several
at a time, since Python's part of a fetch costs more than their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, cycle, islice

import numpy
import torch
from torch.utils.data import TensorDataset, default_collate

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.data import BatchSource, LoaderSpec
from hasten.core.errors import RunError, format_error
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.loading.probe import is_deterministic, probe_samples
from hasten.utils.batch import batch_tensors, map_tensors

RING = 3  # a batch stays whole until the third one after it is asked for
CHUNK = 256  # samples that are collated together while stacking
TOGETHER = 2**18  # bytes that are fetched at a time: they fit the second cache of a core
ALIGNED = 64  # bytes: where torch lets a tensor's memory begin, and so has every batch, since kernels may sum in another order elsewhere


@dataclass(frozen=True)
class InMemoryBatches(Method):
    """Stacks all samples once, at the first use, if they fit into ``gigabytes`` (training and validation each)."""

    gigabytes: float = option(2.0, above=0)

    card = Card(
        summary="stack the samples once, then fetch whole batches by index",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/generated/torch.index_select.html",
        gain=(1.0, 21.0),
        gain_when="the loader alone, image batches on one core; the step gains what it waited for input",
        accelerates={"input"},
        applies_to={"indexed_samples"},
        order=WrapOrder.EARLY,
        replaces={"data"},
    )

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if why_not := self._obstacle(batches.spec):
            if batches.training:
                run.report_no_effect(self, why_not)
            return batches
        samples, ring = batches.spec, cycle([Slot(pinned=run.device.type == "cuda") for _ in range(RING)])

        ahead = TOGETHER if batches.seekable else 0  # a sampler that draws as it goes is asked for one batch at a time

        @cache
        def fields():
            try:
                return stacked(samples)
            except (RunError, RuntimeError) as error:  # a sample like no other: read them one by one after all
                return run.report_no_effect(self, f"the samples cannot be stacked: {format_error(error)}")

        def epoch(number: int, start: int = 0) -> Iterator:
            if fields() is None:
                yield from batches.epoch(number, start)
                return
            for several in together(islice(samples.batch_sampler(number), start, None), fields(), ahead):
                slot = next(ring) if batches.training else Slot()  # an evaluation may keep its batches
                try:
                    yield from slot.fetch(fields(), several)
                finally:  # of a pass that is left in the middle, too
                    slot.release()

        return replace(batches, epoch=epoch, samples=None)

    def _obstacle(self, samples: LoaderSpec | None) -> str | None:
        """Why these samples cannot be stacked, or None."""
        if samples is None:
            return "the data are not read sample by sample"
        if samples.collate not in (None, default_collate):
            return "the task brings a collate function of its own"
        if ready_tensors(samples.dataset):
            return None
        if not is_deterministic(samples):
            return "the samples are random: they differ each time they are read"
        try:
            some = probe_samples(samples)
            fields = default_collate(some)
        except (RuntimeError, TypeError):
            return "the samples have unequal shapes, or hold something that is no tensor"
        if not all_tensors(fields):
            return "the samples hold something that is no tensor"
        need = sum(field.nbytes for field in batch_tensors(fields)) / len(some) * len(samples.dataset) / 1e9
        return (
            f"the samples need {need:.1f} GB, more than gigabytes={self.gigabytes:g}" if need > self.gigabytes else None
        )


def ready_tensors(dataset) -> list[torch.Tensor] | None:
    """The dataset's own tensors, one a field, where it is nothing but tensors."""
    plain = type(dataset) is TensorDataset and all(field.is_contiguous() for field in dataset.tensors)
    return list(dataset.tensors) if plain else None


def stacked(samples: LoaderSpec):
    """All samples of the dataset in order, collated: every field a tensor of shape (samples, ...).

    Raises:
        Failure: the dataset raised.
        RuntimeError: some samples differ from the others in shape, type or nesting.
    """
    if fields := ready_tensors(samples.dataset):
        return fields
    total = len(samples.dataset)
    chunks = [list(range(first, min(first + CHUNK, total))) for first in range(0, total, CHUNK)]
    reading = samples.build(
        replace(samples, order=lambda epoch: chunks, length=len(chunks), pin=False, persistent=False)
    )
    whole = None
    for indices, chunk in zip(chunks, reading.epoch(0, 0), strict=True):
        if whole is None:
            whole = map_tensors(lambda part: part.new_empty((total, *part.shape[1:])), chunk)
        for field, part in zip(batch_tensors(whole), batch_tensors(chunk), strict=True):
            if part.dtype != field.dtype or part.shape[1:] != field.shape[1:]:
                raise RuntimeError(
                    f"samples {indices[0]} to {indices[-1]} are {part.dtype} of shape {tuple(part.shape[1:])}"
                )
            field[indices[0] : indices[-1] + 1] = part
    return whole


def together(order: Iterable[list[int]], fields, nbytes: int) -> Iterator[list[list[int]]]:
    """The indices of batches, several in a list until they fill ``nbytes``, as long as each begins at an aligned place."""
    rows = [field[0].nbytes for field in batch_tensors(fields)]
    most, unit = nbytes // max(1, sum(rows)), math.lcm(*(ALIGNED // math.gcd(ALIGNED, row) for row in rows))
    several, count = [], 0
    for indices in order:
        several.append(indices)
        count += len(indices)
        if count >= most or count % unit:
            yield several
            several, count = [], 0
    if several:
        yield several


def all_tensors(fields) -> bool:
    """Whether there is nothing but dense tensors in a batch."""
    if isinstance(fields, torch.Tensor):
        return fields.layout is torch.strided
    inside = fields.values() if isinstance(fields, Mapping) else fields
    return isinstance(fields, (tuple, list, Mapping)) and all(map(all_tensors, inside))


class Slot:
    """The buffers of some batches, a field each; page-locked for a GPU, which copies from them while the host goes on."""

    def __init__(self, pinned: bool = False):
        self.pinned, self.copied = pinned, None
        self.buffers: list[torch.Tensor | None] = []

    def fetch(self, fields, several: list[list[int]]) -> list:
        """The samples at each list of indices as a batch. There may be fewer than the buffers hold: then these are slices of them.

        All batches are cut at once: between two steps, when the processor has forgotten this code, each would take five times as long.
        """
        if self.copied is not None:
            self.copied.synchronize()
        sizes = [*map(len, several)]
        index, total = (
            torch.from_numpy(numpy.array([*chain.from_iterable(several)])),
            sum(sizes),
        )  # torch.tensor takes eight times as long
        if not self.buffers or len(self.buffers[0]) < total:
            self.buffers = [self._buffer(total, field) for field in batch_tensors(fields)]
        fetched = [
            torch.index_select(field, 0, index.to(field.device), out=buffer.narrow(0, 0, total)).split_with_sizes(sizes)
            for field, buffer in zip(batch_tensors(fields), self.buffers, strict=True)
        ]
        return [
            map_tensors(lambda _, parts=parts: next(parts), fields) for parts in map(iter, zip(*fetched, strict=True))
        ]

    def release(self) -> None:
        """The consumer has queued what it wants to do with the batch."""
        if self.pinned:
            self.copied = torch.cuda.current_stream().record_event()

    def _buffer(self, size: int, field: torch.Tensor) -> torch.Tensor:
        pinned = self.pinned and field.device.type == "cpu"
        return torch.empty((size, *field.shape[1:]), dtype=field.dtype, device=field.device, pin_memory=pinned)
