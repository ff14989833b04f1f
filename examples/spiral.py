"""A task of 2,000 points on three spiral arms: train it, or tune it with --tune."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hasten
from hasten import Task


def spiral(samples: int, seed: int) -> TensorDataset:
    """Points (float32, shape (samples, 2)) and the arm that each lies on (int64, shape (samples,))."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(0, 3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = 4 * radius + arm * 2.1 + 0.2 * torch.randn(samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1), arm)


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)),
        train_data=spiral(2000, seed=0),
        validation_data=spiral(500, seed=1),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        metric="accuracy",
        target=0.9,
        batch_size=32,
        epochs=30,
    )


if __name__ == "__main__":
    if "--tune" in sys.argv:
        found = hasten.tune(task, budget=120, out="runs/spiral")
        print(found["verdict"], found["recipe"], found["speedup"])
        print(hasten.report("runs/spiral"))
    else:
        result = hasten.train(task)
        print(f"accuracy {result['best_metric']:.3f} after {result['steps']} steps in {result['seconds']:.1f} s")
