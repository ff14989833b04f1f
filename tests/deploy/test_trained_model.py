"""What of a batch is input and what is target, for a model that goes elsewhere."""

import pytest

from hasten.deploy.trained_model import _named_inputs
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
