"""Tasks whose models have parallel branches."""

from itertools import pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hasten import Task
from helpers.rank_tasks import Rows, task


def path(*sizes: int, dropout: float = 0.0) -> nn.Module:
    layers = [
        layer for given, made in pairwise(sizes) for layer in (nn.Linear(given, made), nn.Tanh(), nn.Dropout(dropout))
    ]
    return nn.Sequential(*layers).double()


def convolved(channels: int, made: int, length: int) -> nn.Module:
    """The layers before the norm have no biases, whose gradients would be rounding errors."""
    return nn.Sequential(
        nn.Conv1d(channels, made, length, padding=length // 2, bias=False), nn.BatchNorm1d(made), nn.ReLU(inplace=True)
    )


class Inception(nn.Module):
    """Four parallel branches, one begins without weights; then a sum in place, and dropout drawn by all ranks."""

    def __init__(self, channels: int = 4):
        super().__init__()
        self.one, self.three = convolved(channels, 3, 1), nn.Sequential(convolved(channels, 2, 1), convolved(2, 4, 3))
        self.five, self.pooled = nn.Sequential(convolved(channels, 2, 1), convolved(2, 2, 5)), convolved(channels, 2, 1)
        self.back, self.dropout = nn.Conv1d(11, channels, 1), nn.Dropout(0.2)

    def forward(self, x):
        pooled = nn.functional.max_pool1d(x, 3, stride=1, padding=1)
        met = self.back(torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(pooled)], 1))
        met += x
        return self.dropout(met)


class Twice(nn.Module):
    """Two branches, the second added to the first in place."""

    def __init__(self, channels: int = 4):
        super().__init__()
        self.one, self.other = nn.Conv1d(channels, channels, 3, padding=1), nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        met = self.one(x)
        met += self.other(x)
        return met.relu_()


class Towers(nn.Module):
    """One tower per input, and an input that both read; their outputs are multiplied."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = path(3, 8, 5), path(3, 7, 7, 5), nn.Linear(5, 2).double()

    def forward(self, left, right, scale):
        return self.head(self.left(left * scale) * self.right(right * scale))


class Ensemble(nn.Module):
    """The mean of members that share no weights."""

    def __init__(self, members: int = 3, dropout: float = 0.0):
        super().__init__()
        self.members = nn.ModuleList(path(6, 5 + number, 2, dropout=dropout) for number in range(members))

    def forward(self, x):
        return sum(member(x) for member in self.members) / len(self.members)


class Pairs(Rows):
    def __getitem__(self, index: int):
        return self.inputs[index, :3], self.inputs[index, 3:], torch.ones(1, dtype=torch.float64), self.labels[index]


def inception() -> Task:
    def model():
        blocks = [Inception(), Twice(), Inception()]
        return nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(24, 2)
        ).double()

    return task(model=model, epochs=1)


def towers() -> Task:
    return task(Pairs(), validation_data=Pairs(40, seed=1), model=Towers, epochs=1.5)


def ensemble() -> Task:
    return task(model=Ensemble, epochs=1)


def dropping_ensemble() -> Task:
    return task(model=lambda: Ensemble(dropout=0.3))


def siamese() -> Task:
    """Both towers are the same module."""

    def model():
        made = Towers()
        made.right = made.left
        return made

    return task(Pairs(), validation_data=Pairs(40, seed=1), model=model)


def trunk_of_branches() -> Task:
    """A chain of layers, as a pipeline requires, of which one is an ensemble."""
    return task(model=lambda: nn.Sequential(*(nn.Linear(6, 6).double() for _ in range(4)), Ensemble()), epochs=1.5)


class Recurrent(nn.Module):
    """Two recurrent towers, which return more than is used."""

    def __init__(self):
        super().__init__()
        self.slow, self.fast, self.head = (
            nn.LSTM(1, 4, batch_first=True),
            nn.GRU(1, 5, batch_first=True),
            nn.Linear(9, 2),
        )

    def forward(self, x):
        slow, _ = self.slow(x[..., None])
        fast, _ = self.fast(x[..., None])
        return self.head(torch.cat([slow[:, -1], fast[:, -1]], 1))


class ChangingInPlace(nn.Module):
    """The first branch modifies the second one's input in place."""

    def __init__(self):
        super().__init__()
        self.trunk, self.first, self.second = (
            nn.Linear(6, 6),
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2)),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        x = self.trunk(x)
        return self.first(x) + self.second(x)


def recurrent() -> Task:
    return task(model=lambda: Recurrent().double(), epochs=1)


def changing_in_place() -> Task:
    return task(model=lambda: ChangingInPlace().double())


class ComputingAgain(nn.Module):
    """Activation checkpointing: recomputes its members in the backward pass; cannot be traced."""

    def __init__(self):
        super().__init__()
        self.first, self.ensemble = nn.Linear(6, 6).double(), Ensemble()

    def forward(self, x):
        assert x.sum() != 0
        return checkpoint(self.ensemble, self.first(x), use_reentrant=False)


def computing_again() -> Task:
    return task(model=ComputingAgain)
