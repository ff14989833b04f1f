"""gradient_clipping: the norm of all gradients together never exceeds max_norm; shorter gradients are unchanged."""

from dataclasses import replace

import pytest
import torch

from hasten import ConfigurationError
from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.testing.models import LookUp


def _norms(task, max_norm: float) -> tuple[float, float]:
    """Returns the norm of the first step's gradients before and after clipping."""
    program = build(task, [make_method("gradient_clipping", {"max_norm": max_norm})])

    def gradients() -> float:
        return torch.cat([parameter.grad.flatten() for parameter in program.run.model.parameters()]).norm().item()

    program.forward_backward(next(iter(program.train)))
    before = gradients()
    program.grad_transform()
    return before, gradients()


def test_long_gradients_are_shortened(perceptron):
    before, after = _norms(perceptron(), 0.1)
    assert before > 0.1 and after == pytest.approx(0.1, rel=1e-4)


def test_short_gradients_are_unchanged(perceptron):
    before, after = _norms(perceptron(), 100.0)
    assert before == after


@pytest.mark.parametrize("recipe", ["gradient_clipping", "float16"])
def test_method_that_needs_the_norm_of_sparse_gradients_has_no_effect(recipe, transformer, trained):
    def sparse_table():
        model = LookUp()
        model.scores.sparse = True
        return model

    task = transformer(model=sparse_table, optimizer=lambda model: torch.optim.SGD(model.parameters()))
    run = trained(task, recipe, 2)
    assert dict(run.run.no_effect)[recipe].startswith("the gradients of scores are sparse (sparse=True), and ")
    with pytest.raises(
        ConfigurationError, match=r"clip_grad_norm=\) cannot be used: the gradients of scores are sparse"
    ):
        build(replace(task, clip_grad_norm=1.0))
