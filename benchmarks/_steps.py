"""A small training whose data keep the clock, so that every engine is timed by the same watch.

The samples are read in order. The one that opens the first timed step notes the time, and so does the one
that opens the step after the last; start-up and the end of a run are left out for everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

KEPT = 1024  # different samples; more would only fill the memory
CLASSES = 8
WARM_UP = 50  # steps


class Clocked(Dataset):
    """Samples of ``width`` numbers with a class; after a pass over them, ``seconds_a_step`` on the wall and of the processor."""

    def __init__(self, width: int, batch_size: int, steps: int):
        drawn = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(KEPT, width, generator=drawn)
        self.targets = torch.randint(CLASSES, (KEPT,), generator=drawn)
        self.steps = steps
        self.first, self.last = WARM_UP * batch_size, (WARM_UP + steps) * batch_size
        self.length = self.last + batch_size
        self.began = self.ended = (0.0, 0.0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        if index == self.first:
            self.began = perf_counter(), process_time()
        elif index == self.last:
            self.ended = perf_counter(), process_time()
        return self.inputs[index % KEPT], self.targets[index % KEPT]

    def seconds_a_step(self) -> tuple[float, float]:
        return tuple((after - before) / self.steps for before, after in zip(self.began, self.ended, strict=True))


def timed(train: Callable[[DataLoader], None], width: int, batch_size: int, steps: int) -> tuple[float, float]:
    """Seconds of a step, on the wall and of the processor, when ``train`` makes one pass over a DataLoader of ``Clocked``."""
    data = Clocked(width, batch_size, steps)
    torch.manual_seed(0)
    train(DataLoader(data, batch_size=batch_size))
    return data.seconds_a_step()


def by_hand(model: nn.Module, loader: DataLoader) -> None:
    """The loop that everybody would write."""
    optimizer = sgd(model)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def as_task(model: Callable[[], nn.Module], loader: DataLoader):
    """The same training as a task."""
    from hasten import Task

    return Task(model=model, train_data=loader, loss=nn.functional.cross_entropy, optimizer=sgd, epochs=1)
