"""The data seam: watches the iterators of all DataLoaders, and lets methods read the batches of the user's loaders.

A loader keeps its type, length, dataset and sampler; only the iterator that it makes is another one.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.utils.data import DataLoader

from hasten._torch_compat import patch_loader_iterator, patch_next_batch
from hasten.core.data import BatchSource
from hasten.hosts.inside.sites import Sites
from hasten.utils.phase_timer import PhaseTimer


class LoaderSeam:
    """Notes the loaders of a script, and which of them the training reads.

    Args:
        sites: Receives each loader with its site.
        phases: Receives the time that the script waits for batches.
        source_of: ``(loader, is for training) -> BatchSource``, the batches under the methods of the recipe, or None
            if these change nothing; None to watch only.
        roles: Site -> "training" or "evaluation", from an earlier run.
    """

    def __init__(
        self,
        sites: Sites,
        phases: PhaseTimer,
        source_of: Callable[[Any, bool], BatchSource | None] | None = None,
        roles: dict[str, str] | None = None,
    ):
        self.sites, self.phases, self.source_of, self.roles = sites, phases, source_of, roles or {}
        self.owners: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # iterator -> loader
        self.sources: WeakKeyDictionary[Any, BatchSource | None] = WeakKeyDictionary()
        self.training: WeakSet[Any] = WeakSet()  # loaders whose batches were trained on
        self.reading: WeakSet[Any] = WeakSet()  # loaders whose own iterator a method uses now
        self.last: Any = None  # iterator that gave the last batch
        DataLoader.__init__ = self._noting(DataLoader.__init__)
        patch_loader_iterator(self._iterator_maker)
        patch_next_batch(self._timed)

    def on_backward(self) -> None:
        """A loader whose batch was read last before a backward pass is one for training."""
        iterator, self.last = self.last, None
        loader = self.owners.get(iterator) if iterator is not None else None
        if loader is not None and (record := self.sites.of(loader)) is not None:
            record["role"] = "training"
            self.training.add(loader)

    def is_for_training(self, loader: Any) -> bool:
        """Whether a loader is known to be one for training."""
        record = None if loader is None else self.sites.of(loader)
        return record is not None and record["role"] == "training"

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def noted_init(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            facts = {"batch_size": batch_size_of(loader), "num_workers": loader.num_workers, "role": "evaluation"}
            self.sites.note("loaders", loader, **facts)

        return noted_init

    def _iterator_maker(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def iterator(loader: Any) -> Any:
            record = self.sites.of(loader)
            if record is None:  # made by hasten itself
                return original(loader)
            if self.source_of is not None and loader not in self.sources:
                training = self.roles.get(record["site"], "training") == "training"
                self.sources[loader] = self.source_of(loader, training)
            source = None if loader in self.reading else self.sources.get(loader)
            made = original(loader) if source is None else BatchIterator(source, self, loader)
            self.owners[made] = loader
            return made

        return iterator

    def _timed(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        phases, owners = self.phases, self.owners

        def next_batch(iterator: Any) -> Any:
            began = phases.now() if phases.running and self.is_for_training(owners.get(iterator)) else None
            try:
                return original(iterator)
            finally:
                if began is not None:
                    phases.record("input", began)
                self.last = iterator

        return next_batch


def batch_size_of(loader: Any) -> int | None:
    """Samples of a batch, also where a sampler of batches was given; None if unknown."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


class BatchIterator:
    """The iterator of a user's loader under methods: the batches of one epoch after the other of a BatchSource."""

    def __init__(self, source: BatchSource, seam: LoaderSeam, loader: Any):
        self.source, self.seam, self.loader = source, seam, loader
        self._reset(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        seam = self.seam
        began = seam.phases.now() if seam.phases.running and seam.is_for_training(seam.owners.get(self)) else None
        seam.reading.add(self.loader)
        try:
            return next(self.batches)
        finally:
            seam.reading.discard(self.loader)
            if began is not None:
                seam.phases.record("input", began)
            seam.last = self

    def __len__(self) -> int:
        return len(self.source)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begins the next epoch, as torch calls it on the iterator of a loader with persistent workers."""
        epoch, _ = self.source.position
        self.source.position = (epoch + 1, 0)
        self.seam.reading.add(self.loader)
        try:
            self.batches = self.source.epoch(epoch, 0)
        finally:
            self.seam.reading.discard(self.loader)
