"""Fashion images for two machines of one core each with a slow network: a batch takes about 45 ms of arithmetic, its
gradients have 2.7 MB.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hasten import Task
from hasten.workloads.fashion_mnist import MEAN, STD, Clothes

HIDDEN, SAMPLES, TESTS = 512, 40_000, 10_000


def clothes(split: str, count: int) -> TensorDataset:
    """Returns the first images of a split as vectors, and their labels."""
    them = Clothes(split)
    images = torch.tensor(them.images[:count]).flatten(1) / 255
    return TensorDataset((images - MEAN) / STD, torch.tensor(them.labels[:count]).long())


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(28 * 28, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    )


def task() -> Task:
    return Task(
        name="clothes_on_a_slow_network",
        model=model,
        train_data=clothes("train", SAMPLES),
        validation_data=clothes("t10k", TESTS),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=5e-4),
        metric="accuracy",
        target=0.86,
        batch_size=512,
        epochs=6,
        evaluate_every=SAMPLES // 2,
    )
