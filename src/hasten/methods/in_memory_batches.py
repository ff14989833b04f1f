"""Stacks the samples once and fetches whole batches by index, instead of one sample at a time.

A DataLoader calls Python for every sample and stacks the results for every batch. If the samples are the same in every
epoch, stacking them once is enough: a batch is then one ``index_select`` per field, into reused buffers, so that no new
memory causes page faults. Small batches are fetched several at a time, because the Python part of a fetch costs more
than copying their bytes.

With ``place=device`` the samples lie in the memory of the GPU: then no batch is copied, only its indices. So do the
arrays of a pipeline of ``hasten.data``, whose random crops and flips then run on the GPU. Batches on a GPU get new
memory, which torch reuses in the order of the GPU's work: the host runs ahead of the GPU by more batches than a ring of
buffers has.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import numpy
import psutil
import torch
from torch.utils.data import TensorDataset, default_collate  # pyright: ignore[reportUnknownVariableType]

from hasten import BatchSource, Card, Exactness, LoaderSpec, Method, RunContext, WrapOrder, option
from hasten._torch_compat import has_views
from hasten.core.errors import NoEffectError, RunError, format_error
from hasten.core.types import Batch
from hasten.loading.probe import is_deterministic, probe_samples, reread_samples, warn_of_changed_dataset
from hasten.loading.read_all import empty_fields, holds, read_all, write_rows
from hasten.utils.batch import batch_tensors, copy_to_device, map_tensors
from hasten.utils.rng import preserve_rng_state
from hasten.utils.tree import tree_leaves

NUM_BUFFERS = 3  # each is written again once nothing refers to its batches
FETCHED_BYTES = 2**18  # fetched at a time; fits into the L2 cache of a core
# As an edit of a script, without brackets and braces, which stand for options there.
STACKED_DATASET = '''class InMemory(torch.utils.data.Dataset):
    """Samples that are stacked once; a DataLoader fetches whole batches of them by their indices."""

    def __init__(self, dataset):
        samples = list(map(dataset.__getitem__, range(len(dataset))))
        self.length, self.fields = len(samples), torch.utils.data.default_collate(samples)

    def __len__(self):
        return self.length

    def __getitems__(self, indices):
        rows = torch.tensor(indices)
        return torch.utils._pytree.tree_map(lambda field: field.index_select(0, rows), self.fields)

    @staticmethod
    def collate(batch):
        return batch
'''
MAX_PREVIEWED_BATCHES = 2  # batches that a script may look at before its training, such as a fixed one to log
ALIGNMENT = 64  # bytes; torch's alignment of tensors. Every batch must have it: kernels may sum in another order


@dataclass(frozen=True)
class InMemoryBatches(Method):
    """Stacks all samples when the first batch is requested, if they fit into the budget."""

    card = Card(
        summary="stack the samples once, then fetch whole batches by index",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/generated/torch.index_select.html",
        gain=(1.0, 21.0),
        gain_when="the loader alone, image batches on one core; a step gains the time that it waited for input",
        accelerates={"input", "copy"},  # the copy with place=device
        applies_to={"indexed_samples"},
        order=WrapOrder.EARLY,
        replaces={"data"},
        on_gpu={"presets": ({"place": "device"},)},
        script_edit={"dataset": STACKED_DATASET},
    )

    gigabytes: float = option(2.0, above=0)  # memory budget in GB, for training and validation data each
    place: str = option("host", one_of=("host", "device"))  # memory that holds the samples

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if self.place == "device" and run.services.in_script and not batches.training:
            return batches  # an evaluation may read them on the host, as in y.numpy()
        if self.place == "device" and batches.on_device is not None:
            return self._on_device(batches, *batches.on_device, run)
        spec, obstacle = batches.spec, self._obstacle(batches.spec, run)
        if spec is None or obstacle:
            if batches.training:
                run.report_no_effect(self, obstacle)
            return batches
        buffers = [BatchBuffer(pinned=run.device.type == "cuda") for _ in range(NUM_BUFFERS)]
        ring = cycle(buffers)
        # a sampler that cannot be resumed at any batch may draw as it goes: it is asked for one batch at a time
        fetched_bytes = FETCHED_BYTES if batches.seekable else 0

        stacked: list[Batch | None] = []  # the fields of all samples, once they are needed; None if they are unequal
        # a process that checks a few steps of a script needs few samples; to read all may take longer than the steps
        is_short = run.services.in_script and run.plan.steps is not None and run.plan.steps < spec.length
        reads_few = is_short and batches.training and self.place == "host"
        few: list[list[int]] = []  # the batches read so; beyond a look at a batch or two only in the first epoch

        def current_fields() -> Batch | None:
            if self.place == "host" and contiguous_tensors(spec.dataset):
                return stack_samples(spec)  # which copies nothing
            if not stacked:
                stacked[:] = [self._stack(spec, run)]
            elif stacked[0] is not None and not is_current(stacked[0], batches, run):
                stacked.clear()  # memory for one stack is enough
                stacked[:] = [self._stack_anew(batches, spec, run)]
            return stacked[0]

        def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
            needed = FieldsAsNeeded(spec, batches) if reads_few and len(few) <= MAX_PREVIEWED_BATCHES else None
            fields = needed.fields if needed else current_fields()
            if fields is None:
                return batches.epoch(epoch, start)
            # the order draws now, as iter(loader) does, also if no batch is read
            return fetched(islice(spec.batch_sampler(epoch), start, None), fields, needed)

        def fetched(order: Iterator[list[int]], fields: Batch, needed: FieldsAsNeeded | None) -> Iterator[Batch]:
            for group in group_batches(order, fields, fetched_bytes):
                if needed:
                    few.extend(group)
                    if why := needed.read(chain.from_iterable(group)):
                        raise RunError(f"{self.name} has no effect: the samples cannot be stacked: {why}")
                buffer = next(ring) if batches.training else BatchBuffer()  # an evaluation may keep its batches
                yield from buffer.fetch(fields, group)

        if batches.training:
            run.observe_effect(self, partial(_describe, buffers, spec))
        return replace(batches, epoch=epoch, spec=None)

    def _stack(self, spec: LoaderSpec, run: RunContext) -> Batch | None:
        """The fields of all samples, in the memory that ``place`` names; None where samples differ from the others."""
        try:
            fields = stack_samples(spec, min(run.services.available_cpus(), _affordable_processes(run)))
            return map_tensors(lambda field: field.to(run.device), fields) if self.place == "device" else fields
        except (RunError, RuntimeError, TypeError) as error:  # one sample differs from all others: read them one by one
            return run.report_no_effect(self, f"the samples cannot be stacked: {format_error(error)}", None)

    def _stack_anew(self, batches: BatchSource, spec: LoaderSpec, run: RunContext) -> Batch | None:
        """The fields of a dataset that has changed; None if its samples can no longer be stacked, or are random now."""
        warn_of_changed_dataset(self.name)
        with preserve_rng_state(*batches.generators):
            obstacle = self._obstacle(spec, run)
        if obstacle:
            run.report_no_effect(self, obstacle)
        return None if obstacle else self._stack(spec, run)

    def _on_device(
        self, batches: BatchSource, nbytes: int, on_device: Callable[[torch.device], BatchSource], run: RunContext
    ) -> BatchSource:
        """The batches of a pipeline that stores its arrays, and transforms their batches, on the GPU."""
        obstacle = self._lack_of_gpu(run) or self._lack_of_memory(nbytes / 1e9, run)
        if obstacle:
            if batches.training:
                run.report_no_effect(self, obstacle)
            return batches
        devices: set[str] = set()

        def noted(iterator: Iterator[Batch]) -> Iterator[Batch]:
            for batch in iterator:
                devices.update(tensor.device.type for tensor in batch_tensors(batch))
                yield batch

        def describe() -> str:
            if devices != {"cuda"}:
                raise NoEffectError("no batch was made on the GPU")
            return f"the batches were made on the GPU, from {nbytes / 1e6:.0f} MB of samples there"

        if batches.training:
            run.observe_effect(self, describe)
        return on_device(run.device).map_iterator(noted)

    def _lack_of_gpu(self, run: RunContext) -> str:
        return "" if run.device.type == "cuda" else f"place=device is for GPUs; this run is on {run.device}"

    def _obstacle(self, spec: LoaderSpec | None, run: RunContext) -> str:
        """Why these samples cannot be stacked, such as random ones; empty if they can."""
        on_gpu = self.place == "device"
        if on_gpu and (why := self._lack_of_gpu(run)):
            return why
        if spec is None:
            return "the data cannot be read sample by sample" + on_gpu * (
                ", and are no arrays() of hasten.data with transforms of its own only"
            )
        if spec.collate not in (None, default_collate):
            return "the task has its own collate function"
        if tensors := contiguous_tensors(spec.dataset):
            return self._lack_of_memory(sum(tensor.nbytes for tensor in tensors) / 1e9, run) if on_gpu else ""
        if not len(spec.dataset):
            return "there are no samples"
        if not is_deterministic(spec):
            return "the samples are random: reading one gives another each time, or draws random numbers"
        try:
            samples = probe_samples(spec, in_worker=True)
            fields = default_collate(samples)
        except (RuntimeError, TypeError):
            return "the samples have unequal shapes, or hold something that is no tensor"
        if not all(isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided for leaf in tree_leaves(fields)):
            return "the samples hold something that is no tensor"
        gigabytes = sum(field.nbytes for field in batch_tensors(fields)) / len(samples) * len(spec.dataset) / 1e9
        return self._lack_of_memory(gigabytes, run)

    def _lack_of_memory(self, gigabytes: float, run: RunContext) -> str:
        if gigabytes > self.gigabytes:
            return f"the samples need {gigabytes:.1f} GB, more than gigabytes={self.gigabytes:g}"
        if self.place == "device" and 2 * gigabytes > torch.cuda.mem_get_info(run.device)[0] / 1e9:
            return f"the samples need {gigabytes:.1f} GB, and the GPU has not twice as much free memory"
        return ""


def _affordable_processes(run: RunContext) -> int:
    """Copies of this process that fit into the free memory, if each comes to own all that it holds."""
    return int(run.services.free_memory() // psutil.Process().memory_info().rss)


def contiguous_tensors(dataset: Any) -> list[torch.Tensor] | None:
    """The tensors of a ``TensorDataset``, one per field, if they are contiguous; None for other datasets."""
    stacked = type(dataset) is TensorDataset and all(field.is_contiguous() for field in dataset.tensors)
    return list(dataset.tensors) if stacked else None


def is_current(fields: Batch, batches: BatchSource, run: RunContext) -> bool:
    """Whether stacked fields still hold the samples of the dataset, which a script may have changed."""
    assert batches.spec is not None, "only samples with a spec are stacked"
    total = len(batch_tensors(fields)[0])
    samples = reread_samples(batches, run, range(total))
    return not samples or (total == len(batches.spec.dataset) and holds(fields, samples))


def stack_samples(spec: LoaderSpec, cpus: int = 1) -> Batch:
    """All samples of the dataset in order, as ``read_all`` returns them; those of a TensorDataset are not copied."""
    return contiguous_tensors(spec.dataset) or read_all(spec, cpus)


def group_batches(batch_indices: Iterable[list[int]], fields: Batch, nbytes: int) -> Iterator[list[list[int]]]:
    """Groups consecutive batches (lists of indices) to be fetched at once: about ``nbytes``, memory-aligned."""
    row_bytes = [field[0].nbytes for field in batch_tensors(fields)]
    max_rows = nbytes // max(1, sum(row_bytes))
    aligned_rows = math.lcm(*(ALIGNMENT // math.gcd(ALIGNMENT, size) for size in row_bytes))
    group: list[list[int]] = []
    rows = 0
    for indices in batch_indices:
        group.append(indices)
        rows += len(indices)
        if rows >= max_rows or rows % aligned_rows:
            yield group
            group, rows = [], 0
    if group:
        yield group


class FieldsAsNeeded:
    """Fields of which only the rows that were asked for are read, without any effect on the random generators."""

    def __init__(self, spec: LoaderSpec, batches: BatchSource):
        self.spec, self.generators = spec, batches.generators
        self.unread = {*range(len(spec.dataset))}
        self.fields = empty_fields(self._collated([0]), len(self.unread))

    def read(self, indices: Iterable[int]) -> str:
        """Reads those of the samples that are still unread; why they cannot be stacked, or ""."""
        try:
            if missing := sorted(self.unread.intersection(indices)):
                write_rows(self.fields, missing, self._collated(missing))
                self.unread.difference_update(missing)
        except RuntimeError as error:
            return format_error(error)
        return ""

    def _collated(self, indices: list[int]) -> Batch:
        with preserve_rng_state(*self.generators):
            return default_collate(probe_samples(self.spec, indices))


class BatchBuffer:
    """Memory for one group of batches, a tensor per field; on the host it is reused, or pinned if the run uses a GPU.

    Pinned memory comes from torch's allocator each time: it gives out none that a GPU still copies, on whatever stream.
    """

    def __init__(self, pinned: bool = False):
        self.pinned = pinned
        self.tensors: list[torch.Tensor] = []
        self.device: torch.device | None = None  # of the fetched batches; None before the first

    def fetch(self, fields: Batch, group: list[list[int]]) -> list[Batch]:
        """One batch of samples per list of indices, as views of the memory.

        All batches are cut at once: one by one between two steps, with this code no longer in the CPU cache, each would
        take five times as long.
        """
        sizes = [*map(len, group)]
        rows = numpy.array([*chain.from_iterable(group)])  # and from_numpy: torch.tensor takes eight times as long
        index = torch.from_numpy(rows)  # pyright: ignore[reportUnknownMemberType]  # a partial stub
        stored = batch_tensors(fields)
        if any(field.is_cuda for field in stored):
            fetched = [field.index_select(0, copy_to_device(index, field.device)) for field in stored]
        else:
            fetched = self._fetch_into_buffers(stored, index)
        self.device = fetched[0].device
        of_batches = map(iter, zip(*(rows.split_with_sizes(sizes) for rows in fetched), strict=True))
        return [map_tensors(lambda _, parts=parts: next(parts), fields) for parts in of_batches]

    def _fetch_into_buffers(self, fields: list[torch.Tensor], index: torch.Tensor) -> list[torch.Tensor]:
        size = len(index)
        # A loop of the user's may keep batches, as torchmetrics does for a curve: their memory is not written again.
        if self.pinned or not self.tensors or len(self.tensors[0]) < size or any(map(has_views, self.tensors)):
            new = partial(torch.empty, pin_memory=self.pinned)
            self.tensors = [new((size, *field.shape[1:]), dtype=field.dtype) for field in fields]
        return [
            torch.index_select(field, 0, index, out=tensor.narrow(0, 0, size))
            for field, tensor in zip(fields, self.tensors, strict=True)
        ]


def _describe(buffers: list[BatchBuffer], spec: LoaderSpec) -> str:
    devices = {buffer.device.type for buffer in buffers if buffer.device}
    if not devices:
        raise NoEffectError("no batch was fetched from memory")
    return f"the batches came from {len(spec.dataset)} samples in memory{' of the GPU' * ('cuda' in devices)}"
