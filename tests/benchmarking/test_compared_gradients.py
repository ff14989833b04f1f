"""Gradients of lower precision are compared with those of the same batches in float64, where both runs used them."""

import dataclasses
import math
from types import SimpleNamespace

import torch

from hasten.benchmarking import equivalence_runs
from hasten.benchmarking.exactness import check_exactness
from hasten.core.card import Card, Exactness
from hasten.core.method import Method
from hasten.core.recipe import Recipe
from hasten.testing import tasks


class OverflowsTwice(Method):
    """Like a loss scale that settles: in float32 the gradients of the first two batches overflow, and are not used."""

    card = Card(summary="overflows at first", exactness=Exactness.REDUCED_PRECISION)

    def grad_transform(self, grad_transform, run):
        self.batches = 0

        def overflowing():
            grad_transform()
            self.batches += 1
            self.skips = self.batches <= 2 and next(run.model.parameters()).dtype == torch.float32
            if self.skips:
                next(run.model.parameters()).grad.fill_(math.inf)

        return overflowing

    def optimizer_step(self, optimizer_step, run):
        return lambda: None if self.skips else optimizer_step()


def test_gradients_of_batches_that_overflow_are_compared_with_those_of_no_other_batch():
    candidate = Recipe().with_method(f"{__name__}:OverflowsTwice")
    result = check_exactness(tasks.perceptron(), Recipe(), candidate, Exactness.REDUCED_PRECISION, device="cpu")
    assert result.passed and "over 3 batches" in result.why, result.why


class SlowInFloat64(torch.nn.Module):
    def forward(self, x):
        if x.dtype == torch.float64:
            equivalence_runs.time.sleep(0.6)
        return x


def test_model_that_is_slow_in_float64_is_compared_over_the_batches_that_it_reaches(monkeypatch):
    slept = []
    monkeypatch.setattr(equivalence_runs, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    usual = tasks.perceptron()
    task = dataclasses.replace(usual, model=lambda: torch.nn.Sequential(*usual.model(), SlowInFloat64()))
    recipe = Recipe.coerce("bfloat16")
    result = check_exactness(task, Recipe(), recipe, Exactness.REDUCED_PRECISION, device="cpu", seconds=4)
    assert result.passed and "over 2 batches" in result.why, result.why
