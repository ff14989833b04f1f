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
from torch_geometric.nn import GCNConv, GINConv, Linear, MeanAggregation, SAGEConv, SumAggregation
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from hasten._torch_compat import has_forward_hooks, in_function_transform
from hasten.core.errors import ConfigurationError
from hasten.graph.aggregation.adjacency import Adjacency, AdjacencyCache
from hasten.graph.aggregation.aggregate import FLOATS

LAYERS = (SAGEConv, GCNConv, GINConv)
REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean"}
MODULES = {"sum": SumAggregation, "mean": MeanAggregation}
HOOKED = ("_propagate", "_message", "_aggregate")  # what the kernels replace


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
        is_transformed: Whether the features passed ``transform`` before they were summed.
    """
    return _UPDATES[type(layer)](layer, sums, target, is_transformed)


def check_model(model: Any) -> None:
    """Raises ConfigurationError for anything but a module, whose layers can be altered."""
    if not isinstance(model, torch.nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigurationError(f"the layers of a model can be altered; got {given}")


def can_transform(layer: Any) -> bool:
    """Whether ``transform`` knows the matrix W by which the layer multiplies its sums."""
    if isinstance(layer, GCNConv):
        return True
    linear = getattr(layer, "lin_l", None)  # a hook may replace its weights, such as those of torch.nn.utils.prune
    return type(linear) is Linear and not is_lazy(linear.weight) and not has_forward_hooks(linear)


def transform(layer: Any, source: torch.Tensor) -> torch.Tensor:
    """X W, so that A (X W) can be computed in place of (A X) W."""
    return layer.lin(source) if isinstance(layer, GCNConv) else torch.nn.functional.linear(source, layer.lin_l.weight)


def obstacle(
    layer: Any, source: torch.Tensor, target: torch.Tensor | None, edge_index: Any, args: tuple[Any, ...], kwargs: Any
) -> str:
    """Why no kernel can compute this aggregation; empty if one can. The arguments are those of ``forward``."""
    return (
        _obstacle_in_layer(layer)
        or _obstacle_in_features(source)
        or _obstacle_in_graph(layer, source, target, edge_index, (*args, *kwargs.values()))
    )


def _obstacle_in_layer(layer: Any) -> str:
    if not isinstance(layer.aggr, str) or layer.aggr not in REDUCTIONS:
        return f"the aggregation is {layer.aggr}, neither a sum nor a mean"
    if type(layer.aggr_module) is not MODULES[REDUCTIONS[layer.aggr]]:
        return f"the aggregation is {type(layer.aggr_module).__name__}, neither a sum nor a mean"
    if layer.flow != "source_to_target" or getattr(layer, "project", False) or layer.explain:
        return "the layer has flow=target_to_source, project=True or is being explained"
    hooks = [value for name, value in vars(layer).items() if name.startswith(HOOKED) and name.endswith("_hooks")]
    if not layer.fuse or any(hooks):
        return "the layer has hooks on its messages"
    return ""


def _obstacle_in_features(source: torch.Tensor) -> str:
    if source.dtype not in FLOATS or source.ndim != 2:
        return f"the features are {str(source.dtype).removeprefix('torch.')} in {source.ndim} dimensions"
    if source.device.type not in ("cpu", "cuda"):
        return f"there is no kernel for {source.device.type}"
    if source.device.type == "cuda" and find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def _obstacle_in_graph(
    layer: Any, source: torch.Tensor, target: torch.Tensor | None, edge_index: Any, others: tuple[Any, ...]
) -> str:
    if type(edge_index) is not torch.Tensor or edge_index.layout != torch.strided:
        return "the graph is not a tensor of shape (2, edges)"
    if torch.jit.is_tracing():
        return "the model is being traced, which would fix the graph"
    if in_function_transform():
        return "a transform of torch.func computes the layer"
    for other in others:
        if isinstance(other, torch.Tensor) and other.requires_grad:
            return "the edge weights are trained"
        if isinstance(other, torch.Tensor) and torch.promote_types(other.dtype, source.dtype) != source.dtype:
            return f"the edge weights are {str(other.dtype).removeprefix('torch.')}"
        if isinstance(other, (tuple, list)) and not _is_size(other, source, target):
            return "the size is not that of the features"
    return ""


def _is_size(size: Any, source: torch.Tensor, target: torch.Tensor | None) -> bool:
    """Whether ``size`` of a layer's ``forward`` holds the numbers of sources and targets."""
    if len(size) != 2:
        return False
    sources, targets = size
    return sources == len(source) and isinstance(targets, int) and (target is None or targets == len(target))


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
    """The matrix of ``edge_index`` as ``GCNConv`` weighs it, which takes weights of shape (edges, 1) and integers.

    A layer with ``cached=True`` uses the graph of its first call, as in PyTorch Geometric.
    """
    nodes, is_normalized = len(source), False
    if layer.normalize and layer._cached_edge_index is not None:
        edge_index, edge_weight = layer._cached_edge_index
        is_normalized = True

    def build() -> Adjacency:
        edges: Any = edge_index
        weights: Any = edge_weight
        if weights is not None:
            weights = weights.reshape(-1).to(weights.dtype if weights.is_floating_point() else source.dtype)
        if layer.normalize and not is_normalized:
            options = layer.improved, layer.add_self_loops, layer.flow, source.dtype
            edges, weights = gcn_norm(edges, weights, nodes, *options)
            if layer.cached:
                layer._cached_edge_index = edges, weights
        return Adjacency.from_edge_index(edges, nodes, nodes, weights)

    settings = nodes, layer.normalize, layer.improved, layer.add_self_loops, source.dtype, is_normalized
    return cache.get((edge_index, edge_weight), settings, build)


def _plain(
    layer: Any, cache: AdjacencyCache, source: torch.Tensor, target: Any, edge_index: Any, size: Any = None
) -> Adjacency:
    """The matrix of ``edge_index`` without weights."""
    targets = len(target) if target is not None else len(source) if size is None else size[1]
    build = partial(Adjacency.from_edge_index, edge_index, len(source), targets)
    return cache.get((edge_index,), (len(source), targets), build)


_UPDATES: dict[type, Callable[..., torch.Tensor]] = {SAGEConv: _sage, GCNConv: _gcn, GINConv: _gin}
