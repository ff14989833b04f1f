"""Tasks with slow samples, for tests of loaders; defined at module level, so that processes can import them."""

import os
import time

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from hasten import Task
from hasten.data import arrays

ROWS, WIDTH = 64, 12
NUMBERS = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
LABELS = torch.arange(ROWS) % 3


class Slow(Dataset):
    """A sample takes a millisecond; ``noisy`` samples draw from torch's and NumPy's generators."""

    def __init__(self, noisy: bool = True):
        self.noisy = noisy

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        time.sleep(0.001)
        noise = torch.randn(WIDTH) * 0.1 + numpy.random.rand() if self.noisy else 0.0
        return NUMBERS[index] + noise, LABELS[index]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(NUMBERS, LABELS, strict=True)


def slowly(batch, rng):
    time.sleep(0.012)
    return batch[0] + rng.uniform()[:, None], batch[1]


def task(train_data, **changes) -> Task:
    plan = {"epochs": 20, "metric": "accuracy", "validation_data": arrays(NUMBERS, LABELS), "batch_size": 8}
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)),
        train_data=train_data,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        **(plan | changes),
    )


def dataset(**changes):
    return task(Slow(), **changes)


def loader(noisy: bool = False, **changes):
    return task(DataLoader(Slow(noisy), batch_size=8, shuffle=True), batch_size=None, **changes)


def pipeline(epochs=20):
    """As many steps in a tenth of the epochs: its processes are forked for each epoch."""
    train = arrays(NUMBERS.repeat(10, 1), LABELS.repeat(10)).shuffle(seed=1).batch(8).map(slowly)
    return task(train, batch_size=None, epochs=epochs // 10)


class ReaderIds(Dataset):
    """Each sample contains the ID of the process that read it."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return NUMBERS[index], torch.tensor(os.getpid())


class Other(ReaderIds):
    pass


def with_readers(batch):
    return batch[0], torch.full((len(batch[0]),), os.getpid())


def recording_readers(kind, validation=None, workers=0):
    """A task whose data, of the given kind, contain the IDs of their reading processes.

    ``workers``: worker processes of its validation data.
    """
    kinds = {
        "dataset": ReaderIds,
        "other": Other,
        "loader": lambda: DataLoader(ReaderIds(), batch_size=8, num_workers=workers),
        "pipeline": lambda: arrays(NUMBERS, LABELS).batch(8).map(with_readers),
    }
    return task(kinds[kind](), validation_data=kinds[validation or kind]())


def stream():
    return task(DataLoader(Stream(), batch_size=8), batch_size=None, epochs=2)
