"""A cache of decoded samples in memory, for samples that are slow to decode and cannot be stacked."""

import copy
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch.utils.data import TensorDataset, default_collate  # pyright: ignore[reportUnknownVariableType]

from hasten import BatchSource, Card, Exactness, LoaderSpec, Method, NoEffectError, RunContext, WrapOrder, option
from hasten.core.types import Batch
from hasten.loading.probe import is_deterministic, reread_samples, warn_of_changed_dataset
from hasten.utils.rng import preserve_rng_state
from hasten.utils.tree import bitwise_equal, tree_leaves, tree_map

PLAIN = (int, float, complex, str, bytes, bytearray, type(None))


@dataclass(frozen=True)
class CacheDataset(Method):
    """Stores each sample in memory when it is read for the first time, until the budget is used up."""

    card = Card(
        summary="keep decoded samples in memory after they are first read",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/data.html",
        gain_when="decoding a sample is slow, the run has several epochs and the samples fit into memory",
        accelerates={"input"},
        applies_to={"indexed_samples", "multiple_epochs"},
        order=WrapOrder.EARLY,
        replaces={"data"},
        script_edit={
            "by_hand": "keep the samples that __getitem__ returns in a list, and return them from there",
        },
    )

    gigabytes: float = option(2.0, above=0)  # memory budget in GB, for training and validation data each

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        spec, obstacle, budget = batches.spec, self._obstacle(batches.spec), int(self.gigabytes * 1e9)
        if spec is None or obstacle:
            if batches.training:
                run.report_no_effect(self, obstacle)
            return batches
        dataset = CachedDataset(spec.dataset, budget, stacked=spec.collate in (None, default_collate))
        cached = batches.with_spec(dataset=dataset, num_workers=0)  # the cache of a worker process would end with it

        def epoch(epoch: int, start: int = 0) -> Iterator[Batch]:
            reread = reread_samples(batches, run, [*dataset.cache])
            if any(not bitwise_equal(dataset.cache[index], sample) for index, sample in reread.items()):
                warn_of_changed_dataset(self.name)
                dataset.cache.clear()
                with preserve_rng_state(*batches.generators):  # random samples cannot be cached any more
                    dataset.budget = budget if is_deterministic(spec) else 0
            return cached.epoch(epoch, start)

        def describe() -> str:
            if not dataset.cache:
                raise NoEffectError("no sample was cached")
            return f"{len(dataset.cache)} of {len(dataset)} samples were in memory after the observed step"

        if batches.training:
            run.observe_effect(self, describe)
        return replace(cached, epoch=epoch, spec=None)

    def _obstacle(self, spec: LoaderSpec | None) -> str:
        """Why these samples cannot be cached, such as random ones; empty if they can."""
        if spec is None:
            return "the data cannot be read sample by sample"
        if isinstance(spec.dataset, range):
            return "the samples are numbers, from which the task's own collate function makes batches"
        if type(spec.dataset) is TensorDataset:
            return "the samples are in memory already"
        random = "the samples are random: reading one gives another each time, or draws random numbers"
        return "" if is_deterministic(spec) else random


class CachedDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset whose samples are read once, as long as they fit into the budget.

    Args:
        dataset: The dataset.
        budget: Bytes that the cached samples may take.
        stacked: Whether samples are only stacked into batches, which copies them. Any other collate function may hand
            them out as they are, so it gets copies: what the training changes in them must not stay in the cache.
    """

    def __init__(self, dataset: Any, budget: int, stacked: bool = False):
        self.dataset, self.budget, self.stacked = dataset, budget, stacked
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            sample = self.dataset[index]
            size = sample_bytes(sample)
            if size > self.budget:
                return sample
            self.budget -= size
            self.cache[index] = sample
        return self.cache[index] if self.stacked else tree_map(copied, self.cache[index])


def copied(leaf: Any) -> Any:
    """The leaf in memory of its own; deepcopy takes only tensors that are leaves of autograd."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def sample_bytes(sample: Any) -> int:
    """Approximate memory of a sample, in bytes."""
    return sum(map(_leaf_bytes, tree_leaves(sample)))


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, (torch.Tensor, numpy.ndarray)):
        return leaf.nbytes
    if isinstance(leaf, PLAIN):
        return sys.getsizeof(leaf)
    try:
        return len(pickle.dumps(leaf, protocol=5))  # getsizeof leaves out what an object refers to, such as pixels
    except Exception:  # of any kind: it cannot be pickled
        return sys.getsizeof(leaf)
