"""What ``SAGEConv``, ``GCNConv`` and ``GINConv`` of PyTorch Geometric compute, for layers that aggregate by a kernel.

``apply_maxk`` and ``fuse_aggregation`` replace the ``forward`` of an instance; its class and its state dict stay. Where
a layer does something that no kernel here computes, such as a maximum over the neighbors, its own ``forward`` runs.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch_geometric.nn import GCNConv, GINConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from hasten.graph.aggregation.adjacency import Adjacency, AdjacencyCache
from hasten.graph.aggregation.aggregate import FLOATS

LAYERS = (SAGEConv, GCNConv, GINConv)
REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean"}


def adjacency_of(
    layer: Any, cache: AdjacencyCache, source: torch.Tensor, target: Any, edge_index: Any, *args: Any, **kwargs: Any
) -> Adjacency:
    """The matrix of ``edge_index`` as the layer weighs it; ``args`` and ``kwargs`` are those of its ``forward``."""
    matrix = _normalized if isinstance(layer, GCNConv) else _plain
    return matrix(layer, cache, source, target, edge_index, *args, **kwargs)


def update(layer: Any, sums: torch.Tensor, target: torch.Tensor | None, is_transformed: bool = False) -> torch.Tensor:
    """The output of the layer.

    Args:
        layer: An instance of LAYERS.
        sums: Sum or mean of the features of each node's neighbors.
        target: The features of the node itself.
        is_transformed: Whether the features were multiplied by ``weight_of(layer)`` before they were summed, because
            A (X W) equals (A X) W.
    """
    return _UPDATES[type(layer)](layer, sums, target, is_transformed)


def weight_of(layer: Any) -> torch.Tensor | None:
    """The weights (outputs, inputs) that multiply the sums of the neighbors; None if a network does, or it lacks them.

    A layer that takes the number of its inputs from its first batch lacks them until then.
    """
    linear: Any = getattr(layer, {SAGEConv: "lin_l", GCNConv: "lin"}.get(type(layer), ""), None)
    return None if linear is None or is_lazy(linear.weight) else linear.weight


def obstacle(layer: Any, source: torch.Tensor, edge_index: Any, args: tuple[Any, ...], kwargs: Any) -> str:
    """Why the kernel cannot compute this aggregation; empty if it can."""
    if type(edge_index) is not torch.Tensor or edge_index.layout != torch.strided:
        return "the graph is not a tensor of shape (2, edges)"
    if not isinstance(layer.aggr, str) or layer.aggr not in REDUCTIONS:
        return f"the aggregation is {layer.aggr}, neither a sum nor a mean"
    if source.dtype not in FLOATS or source.ndim != 2:
        return f"the features are {str(source.dtype).removeprefix('torch.')} of shape {tuple(source.shape)}"
    if source.device.type not in ("cpu", "cuda"):
        return f"there is no kernel for {source.device.type}"
    if source.device.type == "cuda" and find_spec("triton") is None:
        return "Triton is not installed"
    if layer.flow != "source_to_target" or getattr(layer, "project", False) or layer.explain:
        return "the layer has flow=target_to_source, project=True or is being explained"
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
        return "the edge weights are trained"
    return ""


def _sage(layer: Any, sums: torch.Tensor, target: torch.Tensor | None, is_transformed: bool) -> torch.Tensor:
    out = _with_bias(sums, layer.lin_l.bias) if is_transformed else layer.lin_l(sums)
    if layer.root_weight and target is not None:
        out = out + layer.lin_r(target)
    return torch.nn.functional.normalize(out, p=2.0, dim=-1) if layer.normalize else out


def _gin(layer: Any, sums: torch.Tensor, target: torch.Tensor | None, is_transformed: bool) -> torch.Tensor:
    return layer.nn(sums if target is None else sums + (1 + layer.eps) * target)


def _gcn(layer: Any, sums: torch.Tensor, target: torch.Tensor | None, is_transformed: bool) -> torch.Tensor:
    return _with_bias(sums if is_transformed else layer.lin(sums), layer.bias)


def _with_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias


def _normalized(
    layer: Any, cache: AdjacencyCache, source: torch.Tensor, target: Any, edge_index: Any, edge_weight: Any = None
) -> Adjacency:
    """The matrix of ``edge_index`` as ``GCNConv`` weighs it, which takes weights of shape (edges, 1) and integers."""
    nodes = len(source)

    def build() -> Adjacency:
        edges: Any = edge_index
        weights: Any = edge_weight
        if weights is not None:
            weights = weights.reshape(-1).to(weights.dtype if weights.is_floating_point() else source.dtype)
        if layer.normalize:
            options = layer.improved, layer.add_self_loops, layer.flow, source.dtype
            edges, weights = gcn_norm(edges, weights, nodes, *options)
        return Adjacency.from_edge_index(edges, nodes, nodes, weights)

    settings = nodes, layer.normalize, layer.improved, layer.add_self_loops, source.dtype
    return cache.get((edge_index, edge_weight), settings, build)


def _plain(
    layer: Any, cache: AdjacencyCache, source: torch.Tensor, target: Any, edge_index: Any, size: Any = None
) -> Adjacency:
    """The matrix of ``edge_index`` without weights."""
    targets = len(target) if target is not None else len(source) if size is None else size[1]
    build = partial(Adjacency.from_edge_index, edge_index, len(source), targets)
    return cache.get((edge_index,), (len(source), targets), build)


_UPDATES: dict[type, Callable[..., torch.Tensor]] = {SAGEConv: _sage, GCNConv: _gcn, GINConv: _gin}
