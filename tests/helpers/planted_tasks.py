"""Tasks with one planted bottleneck of known size. Mostly sleep, which a busy machine hardly changes."""

import time

import torch
from torch import nn

from hasten import Task

WIDTH, CLASSES = 16, 4
STEP_SECONDS = 0.012  # seconds of sleep in the quiet step
INPUT_SECONDS = 0.024  # seconds of sleep while a slow batch of 8 is read


class Vectors(torch.utils.data.Dataset):
    """Random vectors with random labels; every read sleeps."""

    def __init__(self, length: int = 256, sleep: float = 0.0):
        self.inputs = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(0))
        self.sleep = sleep

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.sleep:
            time.sleep(self.sleep)
        return self.inputs[index], index % CLASSES


class Sleepy(nn.Linear):
    """A layer that takes a known time."""

    def __init__(self, seconds: float = STEP_SECONDS):
        super().__init__(WIDTH, CLASSES)
        self.seconds = seconds

    def forward(self, x):
        if self.training:
            time.sleep(self.seconds)
        return super().forward(x)


class ManyParameters(nn.Module):
    """Little arithmetic, spread over very many small parameters."""

    def __init__(self, count: int = 400):
        super().__init__()
        self.rows = nn.ParameterList(torch.randn(WIDTH) * 0.1 for _ in range(count))

    def forward(self, x):
        return x @ torch.stack(list(self.rows)).T[:, :CLASSES]


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((3, 64, 64), index / 64), index % CLASSES


def quiet(**changes) -> Task:
    """12 ms a step, all of it in forward."""
    usual = {
        "model": Sleepy,
        "train_data": Vectors(),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        "batch_size": 8,
        "epochs": 2,
    }
    return Task(**(usual | changes))


def slow_dataset() -> Task:
    return quiet(train_data=Vectors(sleep=INPUT_SECONDS / 8))


def item_every_step() -> Task:
    def loss(output, target):
        value = nn.functional.cross_entropy(output, target)
        value.item()
        return value

    return quiet(loss=loss)


def tiny_batch() -> Task:
    return quiet(model=lambda: nn.Linear(WIDTH, CLASSES), batch_size=1)


def for_loop_optimizer() -> Task:
    return quiet(
        model=ManyParameters,
        train_data=Vectors(length=4096),
        batch_size=64,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False, fused=False),
    )


def expensive_evaluation() -> Task:
    """Every 64 samples (8 steps, about 0.1 s) an evaluation of 0.2 s."""
    return quiet(validation_data=Vectors(length=16, sleep=0.2 / 16), evaluate_every=64)


def wasteful_allocator() -> Task:
    """Little arithmetic on activations of 33 MB, which glibc returns to the system after every use."""
    return quiet(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 64, 1),
            *(nn.ReLU() for _ in range(3)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        ),
        train_data=Images(),
        batch_size=32,
    )
