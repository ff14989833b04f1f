"""Fused aggregation in models of PyTorch Geometric: ``fuse_aggregation`` alters the layers of a model.

The instance gets a ``forward`` that sums over the neighbors by one kernel. The formula is that of the layer. The order
of the additions differs, and A (X W) may be computed in place of (A X) W.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch_geometric.nn import GCNConv

from hasten.graph.aggregation.adjacency import Adjacency, AdjacencyCache
from hasten.graph.aggregation.aggregate import aggregate
from hasten.graph.aggregation.layers import (
    LAYERS,
    REDUCTIONS,
    adjacency_of,
    can_transform,
    check_model,
    obstacle,
    transform,
    update,
)

FUSED = "aggregations by one kernel"  # key of the counter; the others are reasons for PyTorch Geometric's own


@dataclass(frozen=True, eq=False)
class Fusion:
    """What the altered layers of a model share, as their attribute ``hasten_fusion``; ``calls`` as in
    ``fuse_aggregation``.
    """

    calls: Counter[str]
    cache: AdjacencyCache


def fuse_aggregation(model: torch.nn.Module, calls: Counter[str] | None = None) -> list[str]:
    """Lets ``SAGEConv``, ``GCNConv`` and ``GINConv`` layers sum over the neighbors by one kernel, on the CPU.

    PyTorch Geometric copies a row of features for each edge and adds the rows up; the kernel does both at once. Altered
    are layers of exactly these classes, except those that ``apply_maxk`` has altered. Where a layer has features that
    the kernel does not take, such as those on a GPU, its own ``forward`` runs. A second call replaces the first.

    Args:
        model: Altered in place; the class of each layer and the names of its weights stay.
        calls: Counts aggregations of the altered layers by ``FUSED``, or by the reason why there was no kernel.

    Returns:
        The names of the altered layers; empty if there are none.

    Raises:
        ConfigurationError: ``model`` is no module.
    """
    check_model(model)
    fusion = Fusion(Counter() if calls is None else calls, AdjacencyCache())
    names: list[str] = []
    for name, layer in model.named_modules():
        if type(layer) not in LAYERS or hasattr(layer, "hasten_maxk"):
            continue
        altered: Any = layer
        if not hasattr(layer, "hasten_fusion"):
            altered.forward = partial(_forward, layer, layer.forward)
        altered.hasten_fusion = fusion
        names.append(name)
    return names


@torch.compiler.disable
def _forward(
    layer: Any, original: Callable[..., torch.Tensor], x: Any, edge_index: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    fusion: Fusion = layer.hasten_fusion
    is_pair = isinstance(x, (tuple, list))
    source, target = x if is_pair else (x, x)
    why = obstacle(layer, source, target, edge_index, args, kwargs) or _own_obstacle(layer, source, is_pair)
    if why:
        fusion.calls[why] += 1
        return original(x, edge_index, *args, **kwargs)
    fusion.calls[FUSED] += 1
    adjacency = adjacency_of(layer, fusion.cache, source, target, edge_index, *args, **kwargs)
    is_transformed = can_transform(layer) and _narrows(layer, adjacency, source)
    if is_transformed:
        source = transform(layer, source)
    return update(layer, aggregate(adjacency, source, REDUCTIONS[str(layer.aggr)]), target, is_transformed)


def _own_obstacle(layer: Any, source: torch.Tensor, is_pair: bool) -> str:
    if source.device.type != "cpu":
        return "the features are not on the CPU"
    return "GCNConv got a pair of features, which it refuses" if is_pair and isinstance(layer, GCNConv) else ""


def _narrows(layer: Any, adjacency: Adjacency, source: torch.Tensor) -> bool:
    """Whether it pays to multiply by the weights before the aggregation, which then reads narrower rows.

    It does not pay where some sources are no targets: the layer would multiply more rows than otherwise.
    """
    if adjacency.num_rows < adjacency.num_sources or torch.is_autocast_enabled("cpu"):
        return False
    # features of the data need no gradient, and so no aggregation in the backward pass
    return layer.out_channels * 2 < source.shape[1] * (1 + source.requires_grad)
