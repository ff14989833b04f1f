"""Fused aggregation: graph layers sum over neighbors by one kernel, without a row of features for each edge."""

import sys
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext, WrapOrder

LAYERS = "SAGEConv, GCNConv or GINConv of PyTorch Geometric"


@dataclass(frozen=True)
class FusedAggregation(Method):
    """Sums over the neighbors of each node by one kernel on the CPU, where PyTorch Geometric gathers and scatters.

    Acts on SAGEConv, GCNConv and GINConv of PyTorch Geometric whose aggregation is a sum or mean over an ``edge_index``
    of float32 or float64 features; other layers, and those that ``maxk`` has altered, stay as they are. The order of
    the additions differs, and A (X W) may be computed in place of (A X) W. The bits are the same for any number of
    threads. The kernels are compiled on their first use, which takes some seconds. Classes of layers and names of
    weights stay the same.
    """

    card = Card(
        summary="graph layers sum over neighbors by one kernel, without a row of features for each edge",
        exactness=Exactness.EQUIVALENT_MATH,
        source="https://pytorch-geometric.readthedocs.io/en/latest/advanced/sparse_tensor.html",
        gain_when="forward and backward of a graph network take most of the step, on a CPU",
        accelerates={"forward", "backward"},
        applies_to={"graph_layers", "cpu"},
        order=WrapOrder.FIRST,  # activation_checkpointing recomputes the altered layers, too
        after=("maxk",),
        trial_priority=1,
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if "torch_geometric" not in sys.modules:  # importing it takes seconds, and the model can have no layer of it
            return run.report_no_effect(self, f"the model has no {LAYERS}", model)
        if run.device.type != "cpu":
            return run.report_no_effect(self, "its kernel runs on the CPU only", model)
        from hasten.graph.aggregation.fused_layers import fuse_aggregation

        calls: Counter[str] = Counter()
        layers = fuse_aggregation(model, calls)
        if not layers:
            return run.report_no_effect(self, f"the model has no {LAYERS}", model)
        run.observe_effect(self, partial(_observe, len(layers), calls))
        return model


def _observe(layers: int, calls: Counter[str]) -> Generator[None, None, str]:
    """Effect check: how the altered layers aggregated in one step."""
    from hasten.graph.aggregation.fused_layers import FUSED

    calls.clear()
    yield
    others = "; ".join(reason for reason in calls if reason != FUSED)
    if not calls[FUSED]:
        raise NoEffectError(others or f"none of the {layers} altered layers was called in a step")
    return f"{calls[FUSED]} aggregations of a step were one kernel each" + f"; others were not: {others}" * bool(others)
