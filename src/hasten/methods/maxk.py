"""MaxK: graph layers aggregate the k largest values of each node instead of all."""

import sys
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext, WrapOrder, option

LAYERS = "SAGEConv, GCNConv or GINConv of PyTorch Geometric"


@dataclass(frozen=True)
class MaxKAggregation(Method):
    """Keeps the k largest values of each row of hidden features before a graph layer aggregates them (MaxK-GNN).

    Acts on SAGEConv, GCNConv and GINConv of PyTorch Geometric that are wider than k and that the model registers after
    another layer with parameters. The first layer, which reads the features of the data, stays as it is; so do those
    beside it in a ModuleDict, as in HeteroConv. If another layer reads features of the data, MaxK masks them, too, and
    the run reports it. The input of an altered layer passes MaxK, also where it enters for the node itself. A ReLU
    before it stays: MaxK after ReLU equals MaxK in place of ReLU in every row with at least k positive values. A sum or
    mean over ``edge_index`` then reads k values and k column indices per edge instead of all values. Other aggregations
    read the masked features. GCNConv aggregates before its linear map. Classes of layers and names of weights stay the
    same.

    The trained weights belong to a model with MaxK: ``hasten.graph.apply_maxk(model, k)`` alters the model of a script
    in the same way before it loads them.
    """

    card = Card(
        summary="graph layers aggregate only the k largest hidden values of each node",
        exactness=Exactness.CHANGES_TRAINING,
        source="Peng et al. 2024, arXiv 2312.08656",
        gain_when="hidden layers of a few hundred values, k at most an eighth of them, and about 50 edges per node",
        accelerates={"forward", "backward"},
        applies_to={"graph_layers"},
        order=WrapOrder.FIRST,  # activation_checkpointing recomputes the altered layers, too
        presets=({"k": 32}, {"k": 16}),
    )

    k: int = option(32, at_least=1)  # values per row that stay

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if "torch_geometric" not in sys.modules:  # importing it takes seconds, and the model can have no layer of it
            return run.report_no_effect(self, f"the model has no {LAYERS}", model)
        from hasten.graph.aggregation.maxk_layers import apply_maxk, input_width, maxk_layers

        calls: Counter[str] = Counter()
        layers = apply_maxk(model, self.k, calls)
        if layers:
            run.observe_effect(self, partial(_observe, len(layers), self.k, calls))
        elif narrow := maxk_layers(model, 0):
            widest = max(map(input_width, narrow.values()))
            run.report_no_effect(self, f"no {LAYERS} after the first is wider than k={self.k}; the widest has {widest}")
        else:
            run.report_no_effect(self, f"the model has no {LAYERS} after another layer with parameters")
        return model


def _observe(layers: int, k: int, calls: Counter[str]) -> Generator[None, None, str]:
    """Effect check: how the altered layers aggregated in one step."""
    from hasten.graph.aggregation.maxk_layers import INPUTS, SPARSE

    calls.clear()
    yield
    if not calls:
        raise NoEffectError(f"none of the {layers} altered layers aggregated hidden features in a step")
    dense = "; ".join(reason for reason in calls if reason not in (SPARSE, INPUTS))
    of_data = f"; {calls[INPUTS]} {INPUTS}" * bool(calls[INPUTS])
    if not calls[SPARSE]:
        return f"hidden features were masked to {k} values, but aggregated as dense rows: {dense}{of_data}"
    others = f"; others were dense: {dense}" * bool(dense)
    return f"{calls[SPARSE]} aggregations of a step read {k} values per row{others}{of_data}"
