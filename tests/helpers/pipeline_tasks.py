"""Tasks whose data are pipelines that draw random numbers."""

import time

import torch

from hasten import Task
from hasten.data import arrays
from helpers.pipelines import scaled, shifted

ROWS = 96
NUMBERS = torch.linspace(-1, 1, ROWS * 6).view(ROWS, 6)
LABELS = torch.arange(ROWS) % 3


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def task(train_data, **changes) -> Task:
    plan = {
        "epochs": 2,
        "metric": "accuracy",
        "target": 0.5,
        "validation_data": arrays(NUMBERS, LABELS).shuffle(seed=3).map(scaled),
    }
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)),
        train_data=train_data,
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        **(plan | changes),
    )


def random_pipeline():
    return arrays(NUMBERS, LABELS).shuffle(seed=1).map(scaled).batch(8).map(shifted)


def here():
    return task(random_pipeline())


def threads():
    return task(random_pipeline().prefetch(threads=2))


def processes():
    return task(random_pipeline().prefetch(processes=2))


def slowly(batch):
    time.sleep(0.005)
    return batch


def longer():
    return task(random_pipeline().map(slowly).prefetch(threads=2), epochs=12)
