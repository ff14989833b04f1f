"""Digits for a network between processes that is slower than they are: 300,000 weights, whose gradients are 1.2 MB a step."""

import torch
from torch import nn

from hasten import Task
from hasten_workloads import digits


def task() -> Task:
    usual = digits.digits()
    return Task(
        name="digits_on_a_slow_network",
        model=lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        train_data=usual.train_data,
        validation_data=usual.validation_data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        metric="accuracy",
        target=0.95,
        batch_size=32,
        epochs=12,
    )
