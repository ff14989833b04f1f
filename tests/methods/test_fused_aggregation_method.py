"""The method fused_aggregation: which layers it alters, and what it reports."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv

import hasten
from hasten.core.recipe import Recipe
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.testing import check_method, tasks
from hasten.testing.effects import observe_effect
from helpers.graph_layers import CLASSES, FEATURES, GRAPH, HIDDEN, GraphModel, graph_task


@pytest.mark.slow  # a dozen trainings each
@pytest.mark.parametrize("layer", [SAGEConv, GCNConv])
def test_fused_aggregation_passes_the_contract_suite(layer):
    aggr = "mean" if layer is SAGEConv else "sum"
    results = check_method("fused_aggregation", graph_task(lambda: GraphModel(layer, aggr)))
    assert set(results.values()) - {"passed"} == {"skipped: fused_aggregation has an effect on every task"}, results


def test_effect_counts_the_kernels():
    effect = observe_effect(graph_task(), Recipe({"fused_aggregation": {}}))
    assert effect.acts and effect.text == "2 aggregations of a step were one kernel each"


def test_aggregation_without_a_kernel_is_no_effect():
    effect = observe_effect(graph_task(lambda: GraphModel(aggr="max")), Recipe({"fused_aggregation": {}}))
    assert not effect.acts and "the aggregation is max, neither a sum nor a mean" in effect.text


@pytest.mark.parametrize("task", [tasks.perceptron, lambda: graph_task(lambda: nn.Sequential(nn.Linear(10, 3)))])
def test_model_without_graph_layers_has_no_effect(task):
    ((name, reason),) = build(task(), make_methods(Recipe({"fused_aggregation": {}}))).run.no_effect
    assert name == "fused_aggregation" and reason.startswith("the model has no SAGEConv, GCNConv or GINConv")


def test_layers_that_maxk_has_altered_are_left_to_it():
    recipe = Recipe({"maxk": {"k": 4}, "fused_aggregation": {}})
    effect = observe_effect(graph_task(), recipe)
    assert (
        effect.text == "1 aggregations of a step read 4 values per row; 1 aggregations of a step were one kernel each"
    )


def test_training_with_fused_aggregation_has_the_losses_of_the_training_without():
    runs = [[], []]
    for recipe, losses in zip((None, {"fused_aggregation": {}}), runs, strict=True):
        result = hasten.train(graph_task(epochs=5), recipe and Recipe(recipe), device="cpu", observers=[losses.extend])
    plain, fused = ([record["loss"] for record in run if "loss" in record] for run in runs)
    assert result["effects"] == {"fused_aggregation": "2 aggregations of a step were one kernel each"}
    assert len(plain) == 20 and fused == pytest.approx(plain, rel=1e-4)


class LayersInAList(nn.Module):
    """Three layers in a list, where activation_checkpointing finds them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SAGEConv(*widths) for widths in pairwise((FEATURES, HIDDEN, HIDDEN, CLASSES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = GRAPH[:, GRAPH.amax(0) < len(x)]
        for layer in self.layers:
            x = layer(x, graph).relu()
        return x


def test_fused_layers_are_computed_again_under_activation_checkpointing():
    recipe = {"fused_aggregation": {}, "activation_checkpointing": {}}
    result = hasten.train(graph_task(LayersInAList), Recipe(recipe), device="cpu")
    assert result["effects"].keys() == recipe.keys() and not result["no_effect"]
