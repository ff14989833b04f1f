"""num_threads: the count applies during the run and is restored afterwards."""

import os
from contextlib import nullcontext

import pytest
import torch

from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.methods.num_threads import NumThreads

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there is no other count to choose")


@two_cores
def test_count_applies_during_the_run_only(perceptron):
    program = build(perceptron(), [NumThreads(2)])
    assert torch.get_num_threads() == 1
    with pytest.raises(KeyError), program.process_context():
        assert torch.get_num_threads() == 2
        raise KeyError
    assert torch.get_num_threads() == 1


@two_cores
def test_gradients_are_equal(convolutional, trained):
    def task():
        return convolutional(
            model=lambda: convolutional().model().double(), train_data=Double(convolutional().train_data), epochs=5
        )

    plain, other = trained(task()), trained(task(), [NumThreads(2)])
    assert other.run.no_effect == []
    for name, value in plain.weights.items():
        torch.testing.assert_close(value, other.weights[name], rtol=1e-10, atol=1e-12)


class Double(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x.double(), y


@pytest.mark.parametrize(("count", "reason"), [(1, "already"), (4096, "cores")])
def test_no_effect_states_its_reason(count, reason):
    run = RunContext(torch.device("cpu"), None)
    assert NumThreads(count).process_context(nullcontext, run) is nullcontext
    assert reason in run.no_effect[0][1]


def test_invalid_options_are_refused():
    with pytest.raises(ValueError, match="count"):
        make_methods(Recipe.coerce("num_threads:count=0"))
