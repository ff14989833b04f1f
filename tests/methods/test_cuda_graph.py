"""cuda_graph: replays equal normal steps; state changed by warm-up and capture is restored. Most tests need a GPU."""

import pytest
import torch

from hasten.core.recipe import Recipe
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.methods.cuda_graph import signature_of
from hasten.utils.tree import bitwise_equal

needs_gpu = pytest.mark.gpu


def test_run_without_gpu_has_no_effect(perceptron, trained):
    usual, graph = trained(perceptron()), trained(perceptron(), "cuda_graph")
    assert graph.run.no_effect == [("cuda_graph", "CUDA graphs need an NVIDIA GPU; this run is on cpu")]
    assert usual.same_bits(graph)


def test_signature_of_a_batch_holds_shapes_and_the_values_that_are_no_tensors():
    """A graph has them recorded: with another number, or another text, it would compute what was captured."""
    batch = {"x": torch.zeros(2, 3), "length": 7, "names": ["a", "b"]}
    same = {"x": torch.ones(2, 3), "length": 7, "names": ["a", "b"]}
    assert bitwise_equal(signature_of(batch), signature_of(same))
    for change in ({"x": torch.zeros(1, 3)}, {"x": torch.zeros(2, 3).double()}, {"length": 8}, {"names": ["a", "c"]}):
        assert not bitwise_equal(signature_of(batch), signature_of(batch | change)), change


@needs_gpu
@pytest.mark.parametrize(
    "more", ["", " + gradient_accumulation:accumulation_steps=3", " + float16", " + bfloat16", " + fused_optimizer"]
)
@pytest.mark.parametrize("name", ["perceptron", "convolutional", "transformer"])
def test_run_with_graph_equals_run_without(name, more, request):
    """Batches of 20 from 96 samples: the last batch of each epoch has another shape and runs outside the graph."""
    task = request.getfixturevalue(name)(batch_size=20)
    usual = _weights(task, more.removeprefix(" + ") or "baseline")
    graph = _weights(task, "cuda_graph" + more)
    for key in usual:
        torch.testing.assert_close(graph[key], usual[key], rtol=1e-3, atol=1e-4)


@needs_gpu
def test_run_that_begins_with_the_short_batch_captures_the_full_ones(perceptron):
    """96 samples in batches of 20: resumed at the fifth batch, which has 16."""
    task = perceptron(batch_size=20)
    usual, graph = (_weights(task, recipe, first=4) for recipe in ("baseline", "cuda_graph"))
    for key in usual:
        torch.testing.assert_close(graph[key], usual[key], rtol=1e-3, atol=1e-4)


def _weights(task, recipe, first: int = 0):
    program = build(task, make_methods(Recipe.coerce(recipe)), device="cuda")
    program.run.progress.batch = first
    with program.process_context():
        for _ in train_steps(program):
            pass
    return {name: value.float().cpu() for name, value in program.export().state_dict().items()}
