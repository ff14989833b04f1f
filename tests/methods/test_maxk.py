"""The method maxk: which layers it alters, what it reports, and that a task with graph layers trains."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv

from hasten import Task
from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.graph import apply_maxk
from hasten.methods.activation_checkpointing import ActivationCheckpointing
from hasten.testing import check_method, tasks
from hasten.testing.effects import observe_effect
from hasten.utils.run_facts import model_facts
from helpers.graph_layers import CLASSES, FEATURES, GRAPH, HIDDEN, NODES, GraphModel, graph_task


def built(task: Task, k: int):
    return build(task, make_methods(Recipe({"maxk": {"k": k}})))


@pytest.mark.slow  # a dozen trainings each
@pytest.mark.parametrize("layer", [SAGEConv, GCNConv])
def test_method_passes_the_contract_suite(layer):
    aggr = "mean" if layer is SAGEConv else "sum"
    results = check_method("maxk", graph_task(lambda: GraphModel(layer, aggr)), k=4)
    assert set(results.values()) - {"passed"} == {"skipped: maxk has an effect on every task"}, results


@pytest.mark.parametrize(("aggr", "evidence"), [("mean", "1 aggregations of a step"), ("max", "aggregated as dense")])
def test_effect_states_how_the_layers_aggregated(aggr, evidence):
    effect = observe_effect(graph_task(lambda: GraphModel(aggr=aggr)), Recipe({"maxk": {"k": 4}}))
    assert effect.acts and evidence in effect.text


@pytest.mark.parametrize(
    ("task", "k", "why"),
    [
        (tasks.perceptron, 4, "the model has no SAGEConv, GCNConv or GINConv of PyTorch Geometric"),
        (graph_task, HIDDEN + 1, "of PyTorch Geometric after the first is wider than k=25; the widest has 24"),
    ],
)
def test_model_without_a_layer_to_alter_has_no_effect(task, k, why):
    ((name, reason),) = built(task(), k).run.no_effect
    assert name == "maxk" and why in reason


def test_graph_layers_are_a_fact_of_the_model():
    assert "graph_layers" in model_facts(GraphModel())
    assert "graph_layers" not in model_facts(nn.Linear(2, 2))


def test_training_with_maxk_learns():
    program = built(graph_task(epochs=30), 8)
    losses = [loss.item() for loss in train_steps(program)]
    assert losses[-1] < 0.9 * losses[0] and not program.run.no_effect


class RepeatedLayers(nn.Module):
    """Three layers in a list, where activation_checkpointing finds them; ``k``: the model applies MaxK by itself."""

    def __init__(self, k: int = 0):
        super().__init__()
        widths = (FEATURES, HIDDEN, HIDDEN, CLASSES)
        self.layers = nn.ModuleList([SAGEConv(width, next_width) for width, next_width in pairwise(widths)])
        if k:
            apply_maxk(self, k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = GRAPH[:, GRAPH.amax(0) < len(x)]
        for layer in self.layers[:-1]:
            x = layer(x, graph).relu()
        return self.layers[-1](x, graph)


@pytest.mark.parametrize("k_of_script", [0, 8])
def test_method_with_activation_checkpointing_trains_as_without(trained, k_of_script):
    task = partial(graph_task, partial(RepeatedLayers, k_of_script))
    usual, less = (trained(task(), recipe) for recipe in ("maxk:k=4", "maxk:k=4 + activation_checkpointing"))
    assert usual.losses == less.losses and usual.same_bits(less)
    evidence = less.program.effects.evidence
    assert evidence["activation_checkpointing"] == "3 of 3 blocks were recomputed in the backward pass"
    assert "read 4 values per row" in evidence["maxk"]


def test_apply_maxk_after_activation_checkpointing_computes_the_same():
    torch.manual_seed(0)
    model, x = RepeatedLayers(), torch.randn(NODES, FEATURES)
    expected = copy.deepcopy(model)
    ActivationCheckpointing().model(model, RunContext(torch.device("cpu"), None))
    for altered in (model, expected):
        apply_maxk(altered, 4)
    assert torch.equal(model(x), expected(x))
