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
