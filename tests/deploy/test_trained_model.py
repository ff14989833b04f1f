"""What of a batch is input and what is target, for a model that goes elsewhere."""

from types import SimpleNamespace

import pytest
import torch

from hasten import RunError
from hasten.deploy.trained_model import _input_names, _named_inputs
from hasten.utils.batch import split_inputs_target


@pytest.mark.parametrize(
    ("batch", "inputs"),
    [
        ({"x": 1, "y": 2}, {"x": 1}),
        ({"x": 1, "y": 2, "labels": 3}, {"x": 1, "y": 2}),  # y is what a decoder reads
        ((1, 2, 3), {"0": 1, "1": 2}),
    ],
)
def test_inputs_are_those_of_the_training(batch, inputs):
    assert _named_inputs(batch) == inputs
    positional, named, _ = split_inputs_target(batch)
    assert list(inputs.values()) == [*positional, *named.values()]


def test_graph_is_refused():
    graph = pytest.importorskip("torch_geometric.data").Data(x=torch.ones(2, 1), y=torch.zeros(2))
    with pytest.raises(RunError, match="cora trains on graphs"):
        _input_names(torch.nn.Linear(1, 1), graph, SimpleNamespace(name="cora"))
