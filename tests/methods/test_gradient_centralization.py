"""gradient_centralization: every row of a gradient loses its mean, as NumPy computes it."""

import numpy
import pytest

from hasten.core.recipe import Recipe
from hasten.engine.plan import build
from hasten.engine.registry import make_methods


@pytest.mark.parametrize("convolutions_only", [False, True])
def test_gradient_equals_the_numpy_formula(convolutional, convolutions_only):
    recipe = Recipe().with_method("gradient_centralization", convolutions_only=convolutions_only)
    plain, changed = build(convolutional()), build(convolutional(), make_methods(recipe))
    for program in (plain, changed):
        program.forward_backward(next(iter(program.train.epoch(0, 0))))
        program.grad_transform()
    for (name, before), after in zip(plain.run.model.named_parameters(), changed.run.model.parameters(), strict=True):
        g = before.grad.double().numpy()
        touched = g.ndim == 4 or (g.ndim == 2 and not convolutions_only)
        rows = g.reshape(len(g), -1)
        expected = (rows - rows.mean(1, keepdims=True)).reshape(g.shape) if touched else g
        numpy.testing.assert_allclose(after.grad.numpy(), expected, rtol=1e-4, atol=1e-7, err_msg=name)


def test_weights_differ_from_the_baseline(convolutional, trained):
    task = convolutional()
    assert not trained(task).same_bits(trained(task, "gradient_centralization"))


def test_model_without_convolutions_has_no_effect(perceptron, trained):
    run = trained(perceptron(), "gradient_centralization:convolutions_only=true").run
    assert [(name, "4 or more" in why) for name, why in run.no_effect] == [("gradient_centralization", True)]
