"""gradient_clipping: the norm of all gradients together never exceeds max_norm; shorter gradients are unchanged."""

import pytest
import torch

from hasten.engine.plan import build
from hasten.engine.registry import make_method


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
