"""Tasks whose ranks lose time in one known way each. Delays occur on rank 1 only."""

import os
import time

import torch
from torch import nn

from hasten import Task
from helpers.rank_tasks import BATCH, Rows, Stream, task

LATE = 0.02  # seconds per step


def on_the_second() -> bool:
    return os.environ.get("RANK") == "1"


class LateRows(Rows):
    def __getitems__(self, indices):
        time.sleep(LATE if on_the_second() else 0.0)
        return [self[index] for index in indices]


class LateStream(Stream):
    """A stream in which every tenth sample, the first of a batch, is late."""

    def __iter__(self):
        for number, row in enumerate(super().__iter__()):
            time.sleep(LATE if on_the_second() and number % BATCH == 0 else 0.0)
            yield row


class Slower(nn.Linear):
    """Delays rank 1 by sleep or by work."""

    def __init__(self, works: bool):
        super().__init__(6, 2)
        self.works = works

    def forward(self, x):
        if self.training and on_the_second():
            until = time.thread_time() + LATE
            if not self.works:
                time.sleep(LATE)
            while self.works and time.thread_time() < until:
                pass
        return super().forward(x)


class Wide(nn.Module):
    """Eight megabytes of gradients, hardly any arithmetic, and a sleep."""

    def __init__(self, sleep: float = 0.0):
        super().__init__()
        self.sleep = sleep
        self.table = nn.Parameter(torch.zeros(1_000_000, 1, dtype=torch.float64))
        self.line = nn.Linear(6, 2).double()

    def forward(self, x):
        time.sleep(self.sleep if self.training else 0.0)
        return self.line(x) + 0 * self.table.sum()


class Busy(nn.Linear):
    """Thirty milliseconds of sleep on every rank, and few gradients."""

    def forward(self, x):
        if self.training:
            time.sleep(0.03)
        return super().forward(x)


def late_data() -> Task:
    return task(LateRows())


def late_stream() -> Task:
    return task(LateStream())


def slower_computation() -> Task:
    return task(model=lambda: Slower(works=True).double())


def sleeping_rank() -> Task:
    return task(model=lambda: Slower(works=False).double())


def communication_bound(sleep: float = 0.0) -> Task:
    return task(model=lambda: Wide(sleep), optimizer=lambda model: torch.optim.SGD(model.line.parameters(), lr=0.01))


def communication_and_compute() -> Task:
    return communication_bound(sleep=0.03)


def compute_bound() -> Task:
    return task(model=lambda: Busy(6, 2).double())


def no_batches() -> Task:
    return task(train_data=None)


def few() -> Task:
    return task(batch_size=1)
