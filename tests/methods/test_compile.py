"""compile: the compiled model trains; the exported model is not compiled and shares its weights."""

import copy

import pytest
import torch

from hasten.core.errors import ConfigurationError
from hasten.engine.loop import evaluate
from hasten.engine.registry import make_method


def test_trained_model_is_compiled_and_the_exported_one_is_not(transformer, trained):
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run = trained(transformer(), "compile:backend=eager", 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs, "nothing was compiled"
    exported = run.program.export()
    assert exported._compiled_call_impl is None and run.run.model._compiled_call_impl is not None
    assert exported.state_dict().keys() == transformer().model().state_dict().keys()
    assert all(a is b for a, b in zip(exported.parameters(), run.run.model.parameters(), strict=True))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    evaluate(run.program)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "the evaluation compiled something"


def test_compiled_model_can_be_copied_for_averaging(perceptron, trained):
    run = trained(perceptron(), "compile:backend=eager", 2).run
    copied = copy.deepcopy(run.model)
    assert copied._compiled_call_impl is None


def test_unknown_mode_is_refused():
    with pytest.raises(ConfigurationError, match="compile: mode must be one of default, max-autotune-no-cudagraphs"):
        make_method("compile", {"mode": "fastest"})


@pytest.mark.slow
def test_inductor_backend_gives_the_same_gradients(transformer):
    from hasten.benchmarking.exactness import check_exactness
    from hasten.core.card import Exactness
    from hasten.core.recipe import Recipe

    proof = check_exactness(transformer(), Recipe(), Recipe.parse("compile"), Exactness.EQUIVALENT_MATH, device="cpu")
    assert proof.passed, proof.why
