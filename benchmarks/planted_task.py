"""A training whose step takes a known time, and a method that shortens it by a known factor, for ``planted.py``."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import Card, Exactness, Method, Task

BATCH = 8
SECONDS_A_BATCH = 0.02  # long compared with the step itself, so that the planted ratio is nearly the true one


class Slow(Dataset):
    """Samples that arrive one batch at a time, each batch after ``seconds``."""

    def __init__(self, seconds: float, length: int = 4096):
        drawn = torch.Generator().manual_seed(0)
        self.inputs, self.targets = (
            torch.randn(length, 8, generator=drawn),
            torch.randint(4, (length,), generator=drawn),
        )
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> list:
        until = perf_counter() + self.seconds
        samples = [self[index] for index in indices]
        while perf_counter() < until:
            pass  # busy-waits: a sleep of 20 ms ended up to 4 ms late on a virtual machine, a busy wait did not
        return samples


def slow(seconds: float = SECONDS_A_BATCH) -> Task:
    return Task(
        name="planted",
        model=lambda: nn.Linear(8, 4),
        train_data=Slow(seconds),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        batch_size=BATCH,
        epochs=1,
    )


@dataclass(frozen=True)
class Sooner(Method):
    """Shortens the wait to the fraction ``share``."""

    share: float = 0.5

    card = Card(summary="wait less for every batch", exactness=Exactness.BIT_EXACT, accelerates={"input"})

    def data(self, batches, run):
        dataset = batches.spec.dataset
        return batches.with_spec(dataset=Slow(dataset.seconds * self.share, len(dataset)))
