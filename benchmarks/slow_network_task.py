"""Digits for two machines of one core each with a slow network between them: a batch takes some 180 ms of arithmetic, its gradients are 10 MB."""

import torch
from torch import nn

from hasten import Task
from hasten_workloads import digits

CHANNELS, SIDE, HIDDEN = 96, 8, 384


def model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(CHANNELS * SIDE * SIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10),
    )  # fmt: skip


def task() -> Task:
    usual = digits.digits()
    return Task(
        name="digits_on_a_slow_network",
        model=model,
        train_data=usual.train_data,
        validation_data=usual.validation_data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=5e-4),
        metric="accuracy",
        target=0.96,
        batch_size=128,
        epochs=20,
        evaluate_every=4 * len(usual.train_data),
    )
