"""A training that amplifies rounding, and methods that change it: by rounding alone, from a late step on, at once.

The file is both imported and given to hasten as the file of its methods.
"""

import math

import torch

from hasten import Card, Exactness, Method


class Logistic(torch.nn.Module):
    """Weights that SGD with lr=1 moves as the logistic map does: every rounding doubles in every step."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(0.1, 0.7, 32))

    def forward(self, x):
        return (x.sin() / math.sin(1)).mean() * (4 / 3 * self.w**3 - 1.5 * self.w**2).sum()


class ScalesGradients(Method):
    card = Card(summary="gradients times something", exactness=Exactness.EQUIVALENT_MATH)

    def grad_transform(self, grad_transform, run):
        def scaled():
            grad_transform()
            for p in run.model.parameters():
                self.scale(p.grad, run)

        return scaled


class RoundsOtherwise(ScalesGradients):
    """The same formula: a third of three times the gradient."""

    def scale(self, gradient, run):
        gradient.mul_(3).div_(3)


class ActsLate(ScalesGradients):
    """From the tenth step on another learning rate."""

    def scale(self, gradient, run):
        if run.progress.step >= 10:
            gradient.mul_(1.001)


class ActsEarly(ScalesGradients):
    def scale(self, gradient, run):
        gradient.mul_(1 + 1e-8)
