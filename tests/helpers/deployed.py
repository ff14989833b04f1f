"""Small trained runs for the tests of export, quantization and serving."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hasten
from hasten.workloads.digits import digits

OUTLIER = 1000.0  # factor of the weights of one channel


class DepthwiseDigits(nn.Sequential):
    """A small convolutional network with a depthwise layer, on the 64 pixels of a digit."""

    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.ReLU(),
            nn.Conv2d(16, 32, 1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )


def depthwise_digits() -> hasten.Task:
    """The digits, learned by the depthwise network."""
    return replace(digits(), model=DepthwiseDigits, epochs=6, name="depthwise")


def few_epochs() -> hasten.Task:
    """The digits workload, trained for a short time."""
    return replace(digits(), epochs=15, name="digits")


def train_run(task: hasten.Task, directory: Path) -> Path:
    """Trains a task into a run directory; returns it."""
    hasten.train(task, out=directory, device="cpu")
    return directory


def plant_outliers(run: Path) -> None:
    """Rescales one channel of the depthwise network, so that it computes the same with one scale a tensor useless.

    ReLU(a x) = a ReLU(x) for a > 0: the depthwise channel is multiplied by what the one before it is divided by.
    """
    path = run / "model.safetensors"
    weights = load_file(path)
    weights["1.weight"][0] /= OUTLIER
    weights["1.bias"][0] /= OUTLIER
    weights["3.weight"][0] *= OUTLIER
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of ``b``."""
    return float((a - b).abs().max() / b.abs().max())
