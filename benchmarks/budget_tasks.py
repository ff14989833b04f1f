"""Tasks and methods that make it hard for a search to keep its budget: see ``budget_kept.py``.

A task is made by a function without arguments; the name says what is hard about it.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hasten import Card, Exactness, Method, RunContext, Task, option
from hasten.engine.tasks import load_task

LONG = 200  # times the epochs of a workload


def digits_long() -> Task:
    return _longer("digits")


def fashion_mnist_long() -> Task:
    return _longer("fashion_mnist")


def adult_long() -> Task:
    return _longer("adult")


def tiny_shakespeare_long() -> Task:
    return _longer("tiny_shakespeare")


def imdb_long() -> Task:
    return _longer("imdb")


def twelve_hours() -> Task:
    """Steps of 50 ms, 12 hours of them."""
    return _sleeping(0.05, steps=12 * 3600 * 20)


def step_of_5_s() -> Task:
    return _sleeping(5.0)


def step_of_40_s() -> Task:
    return _sleeping(40.0)


def long_construction() -> Task:
    """Its data take 5 minutes to build."""
    time.sleep(300)
    return _sleeping(0.001)


def long_evaluation() -> Task:
    """An evaluation takes 100 s, a hundred times as long as an epoch."""
    return dataclasses.replace(_sleeping(0.01), model=lambda: Sleeping(0.01, 1.0), validation_data=_loader(1600, 16))


def unknown_evaluation() -> Task:
    """Validation data without a length, which take a minute."""
    validation = DataLoader(Stream(60), batch_size=None)
    return dataclasses.replace(_sleeping(0.01), model=lambda: Sleeping(0.01, 1.0), validation_data=validation)


def no_validation() -> Task:
    return dataclasses.replace(_sleeping(0.005, steps=20000), validation_data=None)


def constant_metric() -> Task:
    return dataclasses.replace(_sleeping(0.005), metric=lambda output, target: 0.5, higher_is_better=True)


def whole_batches() -> Task:
    """Items of the dataset are whole batches."""
    return dataclasses.replace(_sleeping(0.005), train_data=DataLoader(Batches(300), batch_size=None))


def stream_of_batches() -> Task:
    """A stream of whole batches without a length."""
    return dataclasses.replace(_sleeping(0.005), train_data=DataLoader(Stream(300), batch_size=None))


def tiny() -> Task:
    """A training of a few milliseconds."""
    return dataclasses.replace(_sleeping(0.0, steps=10), epochs=2)


class Sleeping(nn.Module):
    """A network that sleeps for so many seconds in training, and in evaluation."""

    def __init__(self, training: float, evaluation: float = 0.0):
        super().__init__()
        self.seconds = {True: training, False: evaluation}
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, inputs):
        time.sleep(self.seconds[self.training])
        return self.layers(inputs)


class Batches(Dataset):
    """Item: a batch of 12 samples, a function of its index."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        inputs = torch.randn(12, 32, generator=torch.Generator().manual_seed(index))
        return inputs, inputs[:, :4].argmax(1)


class Stream(IterableDataset):
    """The batches of ``Batches``, one after the other."""

    def __init__(self, count: int):
        self.batches = Batches(count)

    def __iter__(self):
        return (self.batches[index] for index in range(self.batches.count))


@dataclass(frozen=True)
class Hang(Method):
    """A method whose first step never ends."""

    card = Card(summary="never ends", exactness=Exactness.BIT_EXACT, accelerates=("forward",))

    def optimizer_step(self, optimizer_step, run: RunContext):
        return lambda: time.sleep(10**6)


@dataclass(frozen=True)
class Slower(Method):
    """A method that is built for a minute."""

    card = Card(summary="takes a minute to build", exactness=Exactness.BIT_EXACT, accelerates=("forward",))
    seconds: float = option(60.0, at_least=0)

    def model(self, model, run: RunContext):
        time.sleep(self.seconds)
        return model


def _longer(workload: str) -> Task:
    task = load_task(workload)
    return dataclasses.replace(task, epochs=LONG * task.epochs)


def _sleeping(seconds: float, steps: int = 100) -> Task:
    return Task(
        model=lambda: Sleeping(seconds),
        train_data=_loader(min(steps, 1000) * 16, 16, shuffle=True),
        validation_data=_loader(64, 64),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        metric="accuracy",
        epochs=2 * max(1, steps // 1000),
    )


def _loader(samples: int, batch_size: int, shuffle: bool = False) -> DataLoader:
    inputs = torch.randn(samples, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=batch_size, shuffle=shuffle)
