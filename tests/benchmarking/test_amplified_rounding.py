"""Exactness of a task that amplifies rounding: its first steps decide, if rounding explains the rest."""

import dataclasses

import pytest
import torch

from hasten.benchmarking.exactness import check_exactness
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.testing import tasks
from helpers import amplified_rounding


@pytest.mark.parametrize(("name", "passed"), [("RoundsOtherwise", True), ("ActsLate", False), ("ActsEarly", False)])
def test_training_that_amplifies_rounding_is_judged_by_its_first_steps(name, passed):
    x = 1 - 0.03 * torch.rand(30 * 8, 1, generator=torch.Generator().manual_seed(0))
    task = dataclasses.replace(
        tasks.perceptron(),
        model=amplified_rounding.Logistic,
        train_data=torch.utils.data.TensorDataset(x, x),
        validation_data=None,
        loss=lambda output, target: output,
        metric="loss",
        target=None,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        batch_size=8,
        epochs=1,
    )
    recipe = Recipe().with_method(f"{amplified_rounding.__file__}:{name}")
    result = check_exactness(task, Recipe(), recipe, Exactness.EQUIVALENT_MATH, device="cpu")
    assert result.passed is passed, result.why
    assert ("after 5 steps" in result.why and "grows to" in result.why) is passed, result.why


def normalized() -> torch.nn.Module:
    """Biases before batch normalization, whose gradient is zero in exact arithmetic."""
    blocks = [
        (torch.nn.Conv2d(n, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
        for n in (1, 8)
    ]
    ends = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4)
    return torch.nn.Sequential(*blocks[0], *blocks[1], *ends)


def test_gradients_that_are_rounding_alone_count_as_zero():
    """Adam divides what rounding leaves of them by its own size."""
    drawn = torch.Generator().manual_seed(0)
    images, labels = torch.randn(30 * 32, 1, 16, 16, generator=drawn), torch.randint(4, (30 * 32,), generator=drawn)
    task = dataclasses.replace(
        tasks.perceptron(),
        model=normalized,
        train_data=torch.utils.data.TensorDataset(images, labels),
        validation_data=None,
        target=None,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        batch_size=32,
        epochs=1,
    )
    how = {"device": "cpu"}
    recipe = Recipe.parse("channels_last + fused_optimizer")
    exact = check_exactness(task, Recipe(), recipe, Exactness.EQUIVALENT_MATH, **how)
    assert exact.passed and "after 30 steps, below" in exact.why, exact.why
    other = check_exactness(task, Recipe(), Recipe.parse("gradient_centralization"), Exactness.EQUIVALENT_MATH, **how)
    assert not other.passed and ", most in " in other.why, other.why
