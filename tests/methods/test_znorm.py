"""znorm: every gradient becomes the z-score that NumPy computes."""

import numpy
import pytest
import torch

from hasten.core.recipe import Recipe
from hasten.engine.plan import build
from hasten.engine.registry import make_methods


def gradients_of(task, recipe):
    """Returns (before, after): gradients of one batch by parameter name, as float64 NumPy arrays."""
    plain, changed = build(task), build(task, make_methods(Recipe.coerce(recipe)))
    for program in (plain, changed):
        program.forward_backward(next(iter(program.train.epoch(0, 0))))
        program.grad_transform()
    return tuple(
        {name: p.grad.double().numpy() for name, p in each.run.model.named_parameters()} for each in (plain, changed)
    )


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("skip_1d", [True, False])
def test_gradient_equals_the_numpy_formula(convolutional, granularity, skip_1d):
    before, after = gradients_of(
        convolutional(), f"znorm:granularity={granularity},skip_1d={str(skip_1d).lower()},eps=1e-8"
    )
    for name, g in before.items():
        if g.ndim == 1 and skip_1d:
            expected = g
        elif granularity == "row" and g.ndim > 1:
            rows = g.reshape(len(g), -1)
            expected = ((rows - rows.mean(1, keepdims=True)) / (rows.std(1, keepdims=True) + 1e-8)).reshape(g.shape)
        else:
            expected = (g - g.mean()) / (g.std() + 1e-8)
        if g.std() > 1e-6:  # a bias before a normalization has no gradient except rounding errors
            numpy.testing.assert_allclose(after[name], expected, rtol=2e-3, atol=2e-4)


def test_half_precision_gradients_are_computed_in_single_precision(perceptron):
    program = build(perceptron(), make_methods(Recipe.coerce("znorm")))
    weight = next(program.run.model.parameters())
    weight.data = weight.data.half()
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).mul(1e-4).half()
    program.grad_transform()
    assert weight.grad.dtype == torch.float16
    assert weight.grad.float().std(correction=0).item() == pytest.approx(1, abs=0.01)


def test_weights_differ_from_the_baseline(perceptron, trained):
    task = perceptron()
    assert not trained(task).same_bits(trained(task, "znorm"))


def test_model_of_vectors_has_no_effect(perceptron, trained):
    class Vectors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(12))

        def forward(self, x):
            return (x * self.scale)[:, :4]

    assert "two or more dimensions" in trained(perceptron(model=Vectors), "znorm").run.no_effect[0][1]
    assert trained(perceptron(model=Vectors), "znorm:skip_1d=false").run.no_effect == []


def test_embeddings_are_unchanged(transformer):
    before, after = gradients_of(transformer(), "znorm:skip_1d=false")
    same = {name for name in before if numpy.array_equal(before[name], after[name])}
    assert same == {"embedding.weight"}
