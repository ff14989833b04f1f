"""The data seam: watches the iterators of all DataLoaders, and lets methods read the batches of the user's loaders.

A loader keeps its type, length, dataset and sampler; only the iterator that it makes is another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.data import DataLoader, SequentialSampler

from hasten._torch_compat import patch_loader_iterator, patch_next_batch, swap_persistent_iterator
from hasten.core.data import BatchSource
from hasten.hosts.inside.replace import replaces
from hasten.hosts.inside.sites import Sites
from hasten.utils.batch import batch_size
from hasten.utils.phase_timer import PhaseTimer

TRAINING, EVALUATION = "training", "evaluation"  # roles of a loader
SOURCE = "_hasten_source"  # attribute of a loader that holds its SourceHolder


class LoaderSeam:
    """Notes the loaders of a script, and which of them the training reads. Patches DataLoader in the whole process.

    Args:
        sites: Receives each loader with its site.
        phases: Receives the time that the script waits for batches.
        source_of: ``(loader, is for training, is read now) -> BatchSource``, the batches under the methods of the
            recipe, or None if these change nothing; None to watch only.
        roles: Site -> "training" or "evaluation", from an earlier run.
    """

    def __init__(
        self,
        sites: Sites,
        phases: PhaseTimer,
        source_of: Callable[[Any, bool, bool], BatchSource | None] | None = None,
        roles: dict[str, str] | None = None,
    ):
        self.sites, self.phases, self.source_of, self.roles = sites, phases, source_of, roles or {}
        self.roles_of_line = defaultdict[str, list[str]](list)
        for site, role in self.roles.items():
            self.roles_of_line[_line_of(site)].append(role)
        self.by_site: WeakValueDictionary[str, Any] = WeakValueDictionary()  # the loaders that were read
        self.has_loader = False  # whether one was offered to methods
        self.reading: set[int] = set()  # ids of the loaders whose own iterators methods use now
        self.last: dict[str, Any] | None = None  # record of the loader that gave the last batch
        self.unread = 0  # batches that it has given and that no backward pass has followed
        # records by site: of the loaders that were read since the last backward pass, and before that one
        self.since, self.before = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        self.is_evaluating: Callable[[], bool] = lambda: False
        replaces(DataLoader, "__init__")(self._note)
        patch_loader_iterator(self._iterator_maker)
        patch_next_batch(self._timed)

    def on_backward(self) -> str | None:
        """Called after a backward pass. Returns the line of the loader whose batch it trained on: one for training.

        None if that was no batch, or one that had been trained on before. Several batches may be read ahead.
        """
        if self.since:  # what each step reads is for training, of several loaders too
            for site in self.since.keys() & self.before.keys():
                self._mark_for_training(self.since[site])
            self.before, self.since = self.since, {}
        record = self.last
        if record is None or not self.unread:
            return None
        self.unread -= 1
        self._mark_for_training(record)
        return _line_of(record["site"])

    def _mark_for_training(self, record: dict[str, Any]) -> None:
        if record["role"] == TRAINING:
            return
        record["role"] = TRAINING
        if (loader := self.by_site.get(record["site"])) is not None:
            self.batches_of(loader, record, is_read=True)  # methods report now if they cannot act

    def note_batch(self, record: dict[str, Any]) -> None:
        """Notes that the script has read a batch of a loader."""
        self.unread = self.unread + 1 if record is self.last else 1
        self.last = record
        if torch.is_grad_enabled() and not self.is_evaluating():
            self.since[record["site"]] = record

    def note_end(self) -> None:
        """Notes the end of an epoch; a backward pass that follows an evaluation is not that of its batches."""
        if self.is_evaluating():
            if self.last is not None:  # its first batch was read before the evaluation began
                self.since.pop(self.last["site"], None)
            self.last, self.unread = None, 0

    def attach(self, loader: Any) -> Any:
        """Notes the loader that the script names as that of its training; returns what it reads in its place."""
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's loaders are DataLoaders that hold one
        if isinstance(loader, DataLoader) and (record := self.sites.of(inner)) is not None:
            record["role"] = TRAINING
            return loader
        batches = AttachedBatches(loader, self)
        facts = {"type": type(loader).__name__, "batch_size": None, "num_workers": 0, "role": TRAINING}
        self.sites.note("loaders", batches, **facts)
        return batches

    def training_loaders(self) -> list[Any]:
        """The loaders that still exist and whose batches were trained on."""
        return [loader for loader in self.by_site.values() if self._record(loader)["role"] == TRAINING]

    def _record(self, loader: Any) -> dict[str, Any]:
        record = self.sites.of(loader)
        assert record is not None, "only loaders with a record are read"
        return record

    def _note(self, original: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        facts = {"batch_size": batch_size_of(loader), "num_workers": loader.num_workers}
        self.sites.note("loaders", loader, **facts, pin_memory=loader.pin_memory, role=EVALUATION)

    def _iterator_maker(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def iterator(loader: Any) -> Any:
            record = self.sites.of(loader)
            if record is None or self.sites.line() is None:  # made, or read, by hasten itself
                return original(loader)
            source = self.batches_of(loader, record)
            made = original(loader) if source is None else BatchIterator(source, self, loader)
            made.hasten_record = record
            self.by_site[record["site"]] = loader
            return made

        return iterator

    def iterate(self, batches: AttachedBatches) -> Iterator[Any]:
        """The batches of an epoch of an iterable that is no DataLoader."""
        record = self._record(batches)
        made = BatchIterator(self.batches_of(batches, record) or batches.source, self, batches)
        made.hasten_record = record
        self.by_site[record["site"]] = batches
        return made

    def batches_of(self, loader: Any, record: dict[str, Any], is_read: bool = False) -> BatchSource | None:
        """The batches of a loader under the methods; None if they change nothing, or one of them reads it now.

        Those of its next epoch, if it ``is_read`` by the script now.
        """
        if self.source_of is None:
            return None
        self.has_loader = True
        holder, training = loader.__dict__.get(SOURCE), self._is_for_training(loader, record)
        if holder is None or training is not holder.training:  # has turned out to be one for training
            holder = loader.__dict__[SOURCE] = SourceHolder(self.source_of(loader, training, is_read), training)
        return None if id(loader) in self.reading else holder.batches

    def _is_for_training(self, loader: Any, record: dict[str, Any]) -> bool:
        """Whether the batches of a loader are trained on, as an earlier run or a backward pass has shown.

        A loader at a new site has the role of those that came from the same line, as a script may make one for each
        epoch. Where those have both roles, or there are none, one that reads its samples in order counts as that of an
        evaluation, which may keep its batches and read them on the host, until a backward pass has followed.
        """
        site = record["site"]
        known = {self.roles[site]} if site in self.roles else {*self.roles_of_line[_line_of(site)]}
        if len(known) == 1:
            return record["role"] == TRAINING or known == {TRAINING}
        return record["role"] == TRAINING or not _reads_in_order(loader)

    def next_batch(self, read: Callable[[], Any], record: dict[str, Any] | None) -> Any:
        """The batch that ``read`` returns to the script, from the loader of ``record``."""
        phases = self.phases
        is_timed = phases.running and record is not None and record["role"] == TRAINING
        # an evaluation may read the same loader; the first batch of an epoch, after an evaluation, is one of training
        is_timed = is_timed and (record is not self.last or not self.is_evaluating())
        began = phases.now() if is_timed else None
        try:
            batch = read()
        except StopIteration:
            if not self._is_beside_training(record):
                self.note_end()
            raise
        finally:
            if began is not None:
                phases.record("input", began)
        if record is not None and not self._is_beside_training(record):
            self.note_batch(record)
        return batch

    def _is_beside_training(self, record: dict[str, Any] | None) -> bool:
        """Whether an evaluation reads a batch of another loader than the one whose batch waits to be trained on."""
        return not torch.is_grad_enabled() and bool(self.unread) and record is not self.last

    def _timed(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def next_batch(iterator: Any) -> Any:
            record = iterator.__dict__.get("hasten_record")
            if record is None:  # of a loader that hasten has made
                return original(iterator)
            return self.next_batch(lambda: original(iterator), record)

        return next_batch


class SourceHolder:
    """The batches of a loader under the methods; None if these change nothing. A pickle or deep copy has None here.

    The loader itself holds it, so that both end together: the batches may refer to the loader.
    """

    def __init__(self, batches: BatchSource | None, training: bool):
        self.batches, self.training = batches, training

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def batch_size_of(loader: Any) -> int | None:
    """Samples of a batch, also where a sampler of batches was given; None if unknown."""
    return loader.batch_size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def _reads_in_order(loader: Any) -> bool:
    """Whether a DataLoader reads its samples in the order of the dataset, as those of evaluations do."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    return isinstance(sampler, SequentialSampler)


def _line_of(site: str) -> str:
    return site.rpartition("#")[0]


class AttachedBatches:
    """An iterable of ready batches that the script names as the loader of its training.

    Attributes:
        source: A BatchSource, each epoch of which iterates over the iterable anew.
        batch_size: Samples of the last batch; None before the first.
    """

    def __init__(self, iterable: Any, seam: LoaderSeam):
        self._iterable, self._seam, self.batch_size = iterable, seam, None
        length = None
        with suppress(TypeError, NotImplementedError):  # a loader of a stream may have ``__len__`` nevertheless
            length = len(iterable)
        self.source = BatchSource(self._epoch, length, seekable=False)

    def _epoch(self, epoch: int, start: int) -> Iterator[Any]:
        for batch in self._iterable:
            self.batch_size = batch_size(batch)
            yield batch

    def __iter__(self) -> Iterator[Any]:
        return self._seam.iterate(self)

    def __len__(self) -> int:
        return len(self._iterable)

    def __getattr__(self, name: str) -> Any:  # as without hasten, where the script has the iterable itself
        return getattr(self._iterable, name)


class BatchIterator:
    """The iterator of a user's loader under methods: the batches of one epoch after the other of a BatchSource."""

    def __init__(self, source: BatchSource, seam: LoaderSeam, loader: Any):
        self.source, self.seam, self.loader = source, seam, loader
        self.hasten_record: dict[str, Any] | None = None
        self.batches: Iterator[Any] = iter(())
        self.is_persistent = isinstance(loader, DataLoader) and loader.persistent_workers
        self.of_torch: Any = None  # the iterator that a loader with persistent workers would keep in place of this one
        self._reset(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.seam.next_batch(lambda: self._call(next, self.batches), self.hasten_record)

    def __len__(self) -> int:
        return len(self.source)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begins the next epoch, as torch calls it on the iterator of a loader with persistent workers."""
        if loader is not None and self.hasten_record is not None:
            self.source = self.seam.batches_of(loader, self.hasten_record) or self.source
        epoch, _ = self.source.position
        self.source.position = (epoch + 1, 0)
        self.batches = iter(())  # ends an epoch that was left in the middle, so that its workers are free
        self.batches = self._call(self.source.epoch, epoch, 0)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that may iterate over the script's loader, which then finds torch's own iterator there."""
        loader, reading = self.loader, self.seam.reading
        outer = swap_persistent_iterator(loader, self.of_torch) if self.is_persistent else None
        reading.add(id(loader))
        try:
            return function(*args)
        finally:
            reading.discard(id(loader))
            if self.is_persistent:
                self.of_torch = swap_persistent_iterator(loader, outer)
