"""Tasks whose samples and labels are drawn together, while a layer of the first stage draws random numbers, too."""

import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from hasten import Task
from helpers.rank_tasks import BATCH, SAMPLES, Rows, network, task


class Drawn(Rows):
    """Each sample is drawn when it is read; its label states the drawn value."""

    def __getitem__(self, index: int):
        inputs = torch.randn(6, dtype=torch.float64)
        return inputs, (inputs.sum() > 0).long()


def dropping(data) -> Task:
    return task(data, model=lambda: network(dropout=0.3))


def in_a_loader() -> Task:
    return dropping(DataLoader(Drawn(), batch_size=BATCH, shuffle=True))


def with_a_sampler() -> Task:
    """A task whose order is known to the loader only."""
    return dropping(DataLoader(Drawn(), batch_size=BATCH, sampler=SubsetRandomSampler(range(SAMPLES))))
