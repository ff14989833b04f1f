"""copy_model copies models that deepcopy refuses, with their own weights."""

import copy

import pytest
import torch
from torch import nn

from hasten.distributed import collectives
from hasten.methods.compile import Compile
from hasten.utils.copy_model import copy_model


class Remembering(nn.Module):
    """Keeps results of the last batch: a tensor, one inside containers, and a view of the weight."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(2, 2), {}

    def forward(self, inputs):
        self.output = self.layer(inputs)
        self.kept["states"] = [(self.output * 2, 0)]
        self.flat = self.layer.weight.view(-1)
        return self.output


def used() -> Remembering:
    model = Remembering()
    model(torch.ones(3, 2))
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)
    return model


def test_results_are_copied_as_values():
    model = used()
    copied = copy_model(model)
    for original, own in (
        (model.output, copied.output),
        (model.kept["states"][0][0], copied.kept["states"][0][0]),
        (model.flat, copied.flat),
    ):
        assert torch.equal(own, original) and own.grad_fn is None and own.data_ptr() != original.data_ptr()
    assert copied.layer.weight is not model.layer.weight and copied.layer.weight.requires_grad


def test_shared_tensors_are_those_of_the_model():
    model = used()
    copied = copy_model(model, shared=[model.layer.weight])
    assert copied.layer.weight is model.layer.weight and copied.layer.bias is not model.layer.bias


def test_weight_of_weight_norm_is_computed_from_the_copy():
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.utils.weight_norm(nn.Linear(2, 2))
    copied = copy_model(model)
    with torch.no_grad():
        model.weight_g.zero_()
    assert copied(torch.ones(1, 2)).isfinite().all() and copied(torch.ones(1, 2)).abs().sum() > 0
    copied(torch.ones(1, 2)).sum().backward()
    assert copied.weight_v.grad is not None and model.weight_v.grad is None


def test_compiled_blocks_and_means_over_ranks_are_copied_so(monkeypatch):
    model = used()
    exported = Compile(scope="blocks").export(model, None)
    assert exported.layer.weight is model.layer.weight
    monkeypatch.setattr(collectives, "find_divergent_tensors", lambda tensors: [])
    assert torch.equal(collectives.average_model(model).layer.weight, model.layer.weight)
