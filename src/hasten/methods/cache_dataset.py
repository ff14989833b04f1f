"""Keeps every sample in memory once it has been read: for samples that are costly to decode and cannot be stacked."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy
import torch
from torch.utils.data import TensorDataset

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.data import BatchSource
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.loading.probe import is_deterministic
from hasten.utils.batch import map_tensors


@dataclass(frozen=True)
class CacheDataset(Method):
    """The first pass reads, later passes remember, as long as ``gigabytes`` last (training and validation each)."""

    gigabytes: float = option(2.0, above=0)

    card = Card(
        summary="keep decoded samples in memory after their first reading",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/data.html",
        gain_when="decoding a sample is slow, the data are seen several times and fit into memory",
        accelerates={"input"},
        applies_to={"indexed_samples", "multiple_epochs"},
        order=WrapOrder.EARLY,
        replaces={"data"},
    )

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if why_not := self._obstacle(batches):
            if batches.training:
                run.report_no_effect(self, why_not)
            return batches
        remembering = Remembering(batches.spec.dataset, int(self.gigabytes * 1e9))
        cached = batches.with_spec(dataset=remembering, workers=0)  # a worker's memory would die with the worker
        return dataclasses.replace(cached, samples=None)

    def _obstacle(self, batches: BatchSource) -> str | None:
        if batches.spec is None:
            return "the data are not read sample by sample"
        if type(batches.spec.dataset) is TensorDataset:
            return "the samples are in memory already"
        return (
            None if is_deterministic(batches.spec) else "the samples are random: they differ each time they are read"
        )


class Remembering(torch.utils.data.Dataset):
    """A dataset that reads each of its samples once, until ``room`` bytes are taken."""

    def __init__(self, dataset, room: int):
        self.dataset, self.room, self.kept = dataset, room, {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        if index not in self.kept:
            sample = self.dataset[index]
            self.room -= (weight := weight_of(sample))
            if self.room < 0:
                self.room += weight
                return sample
            self.kept[index] = sample
        return map_tensors(_itself, self.kept[index])  # fresh containers: a collate function may take them apart


def weight_of(sample) -> int:
    """The bytes that a sample holds, near enough."""
    if isinstance(sample, (torch.Tensor, numpy.ndarray)):
        return sample.nbytes
    if isinstance(sample, Mapping):
        return sum(map(weight_of, sample.values()))
    if isinstance(sample, (tuple, list)):
        return sum(map(weight_of, sample))
    return sys.getsizeof(sample)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
