"""Trainings with steps of about 0.5, 3 and 30 ms on a CPU core, and a method that makes any step 5 % longer.

For ``a_against_a.py``. The second training runs into denormal numbers: each of its rare features is seen once in an
epoch, and Adam's first moment of its weights decays to numbers below 1.2e-38 before it is seen again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import Card, Exactness, Method, Task

EPOCHS = 1000  # longer than any comparison
RARE = 2400  # features of ``denormal`` that are each seen in one batch of an epoch


class Batches(Dataset):
    """Random inputs that are read a batch at a time, so that loading costs little."""

    def __init__(self, samples: int, features: int, rare: int = 0):
        drawn = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, features, generator=drawn)
        self.inputs[:, :rare] = 0.0
        self.inputs[torch.arange(rare) * (samples // max(1, rare)), torch.arange(rare)] = 1.0
        self.targets = torch.randint(10, (samples,), generator=drawn)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> list:
        return list(zip(self.inputs[indices], self.targets[indices], strict=True))


def _task(data: Dataset, layers: tuple[int, ...], optimizer, batch_size: int) -> Task:
    def model() -> nn.Module:
        modules = [module for before, after in pairwise(layers) for module in (nn.Linear(before, after), nn.ReLU())]
        return nn.Sequential(*modules[:-1])

    return Task(
        model=model,
        train_data=data,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        batch_size=batch_size,
        epochs=EPOCHS,
    )


def short() -> Task:
    """0.5 ms."""
    return _task(Batches(4096, 16), (16, 16, 10), lambda model: torch.optim.SGD(model.parameters(), lr=1e-3), 2)


def denormal() -> Task:
    """2.4 ms at the start, 3 ms from step 500 on: beta1 is 0.6, so that a moment is denormal after 170 steps."""
    rare = Batches(2 * RARE, 32 + RARE, RARE)
    return _task(rare, (32 + RARE, 128, 10), lambda model: torch.optim.Adam(model.parameters(), betas=(0.6, 0.999)), 8)


def long() -> Task:
    """30 ms."""
    return _task(
        Batches(8192, 784), (784, 1024, 1024, 10), lambda model: torch.optim.SGD(model.parameters(), lr=1e-3), 256
    )


@dataclass(frozen=True)
class Longer(Method):
    """Makes each step longer by the fraction ``share`` of the median of the last steps."""

    share: float = 0.05

    card = Card(summary="waits at the end of each step", exactness=Exactness.BIT_EXACT)

    def zero_grad(self, zero_grad, run):  # the last function of a step
        steps, began = [], perf_counter()

        def longer() -> None:
            nonlocal began
            zero_grad()
            steps.append(perf_counter() - began)
            del steps[:-20]
            until = perf_counter() + self.share * median(steps)
            while perf_counter() < until:
                pass
            began = perf_counter()

        return longer
