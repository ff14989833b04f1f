"""MaxK in models of PyTorch Geometric: ``apply_maxk`` alters the layers that aggregate hidden features.

A layer's class stays as it is. The instance gets a ``forward`` that keeps the k largest values of each input row and
aggregates them in CBSR form. State dicts are unchanged. Where the layer does something that the kernel cannot compute,
such as a maximum over the neighbors, the input is masked and the layer's own ``forward`` does the rest.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch_geometric.nn import GCNConv, GINConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from hasten.graph.aggregation.adjacency import Adjacency, AdjacencyCache
from hasten.graph.aggregation.maxk import FLOATS, MaxK, aggregate, compress

REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean"}
SPARSE = "aggregations in CBSR form"  # keys of the counter; the others are reasons for a dense aggregation
INPUTS = "aggregations of features of the data, which no layer computed"


@dataclass(frozen=True, eq=False)
class Masking:
    """What the altered layers of a model share, as their attribute ``hasten_maxk``; ``calls`` as in ``apply_maxk``."""

    mask: MaxK
    calls: Counter[str]
    cache: AdjacencyCache


def apply_maxk(model: torch.nn.Module, k: int, calls: Counter[str] | None = None) -> list[str]:
    """Puts MaxK before the aggregation of ``SAGEConv``, ``GCNConv`` and ``GINConv`` layers of hidden features.

    Altered is every such layer (of exactly these classes) that is wider than k and that the model registers after
    another layer with parameters. Layers side by side in a ``ModuleDict``, as in ``HeteroConv``, come after the same
    ones. The choice depends on the model alone, so that evaluation in another process masks what training masked.
    ``GCNConv`` aggregates before its linear map, which gives the same result. A second call replaces the first.

    Args:
        model: Altered in place.
        k: Values that stay in each row.
        calls: Counts aggregations of the altered layers by ``SPARSE`` or, if dense, the reason; in training those whose
            input needs no gradient also by ``INPUTS``.

    Returns:
        The names of the altered layers.

    Raises:
        ConfigurationError: k is no integer from 1 up.
    """
    mask = MaxK(k)
    layers = maxk_layers(model, k)
    masking = Masking(mask, Counter() if calls is None else calls, AdjacencyCache())
    altered: list[Any] = [layer for layer in model.modules() if hasattr(layer, "hasten_maxk")]  # by an earlier call
    for layer in layers.values():
        if layer not in altered:
            layer.forward = partial(_forward, layer, layer.forward)  # survives deepcopy, as bound methods do
    for layer in (*altered, *layers.values()):
        layer.hasten_maxk = masking
    return list(layers)


def maxk_layers(model: torch.nn.Module, k: int) -> dict[str, Any]:
    """Name -> layer that ``apply_maxk`` alters."""
    layers: dict[str, Any] = {}
    seen: set[torch.nn.Module] = set()

    def collect(name: str, module: torch.nn.Module, is_after_another: bool) -> bool:
        """Whether what follows this module comes after another layer with parameters."""
        if module in seen:
            return is_after_another
        seen.add(module)
        if type(module) in UPDATES:
            if is_after_another and input_width(module) > k:
                layers[name] = module
            return True
        before = after = is_after_another or any(True for _ in module.parameters(recurse=False))
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            is_beside = isinstance(module, torch.nn.ModuleDict)
            after |= collect(path, child, before if is_beside else after)
        return after

    collect("", model, False)
    return layers


def input_width(layer: torch.nn.Module) -> float:
    """Number of values that a layer reads per source node; infinity if it does not know the number yet."""
    width: Any = getattr(layer, "in_channels", None)
    width = width[0] if isinstance(width, tuple) else width
    return width if isinstance(width, int) and width >= 0 else math.inf


@torch.compiler.disable
def _forward(
    layer: Any, original: Callable[..., torch.Tensor], x: Any, edge_index: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    masking: Masking = layer.hasten_maxk
    mask, calls = masking.mask, masking.calls
    is_pair = isinstance(x, (tuple, list))
    source, target = x if is_pair else (x, x)
    if source.shape[-1] <= mask.k or (is_pair and isinstance(layer, GCNConv)):  # GCNConv refuses pairs
        return original(x, edge_index, *args, **kwargs)
    if layer.training and torch.is_grad_enabled() and not source.requires_grad:
        calls[INPUTS] += 1
    obstacle = _obstacle(layer, source, edge_index, args, kwargs)
    if obstacle:
        calls[obstacle] += 1
        masked = mask(source)
        target = masked if target is source else None if target is None else mask(target)
        return original((masked, target) if is_pair else masked, edge_index, *args, **kwargs)
    calls[SPARSE] += 1
    sparse = compress(source, mask.k)
    if target is source and not isinstance(layer, GCNConv):
        target = sparse.to_dense()
    elif target is not source and target is not None:
        target = mask(target)

    matrix = _normalized if isinstance(layer, GCNConv) else _plain
    adjacency = matrix(layer, masking.cache, source, target, edge_index, *args, **kwargs)
    return UPDATES[type(layer)](layer, aggregate(adjacency, sparse, REDUCTIONS[str(layer.aggr)]), target)


def _obstacle(layer: Any, source: torch.Tensor, edge_index: Any, args: tuple[Any, ...], kwargs: Any) -> str:
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


def _sage(layer: Any, sums: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    out = layer.lin_l(sums)
    if layer.root_weight and target is not None:
        out = out + layer.lin_r(target)
    return torch.nn.functional.normalize(out, p=2.0, dim=-1) if layer.normalize else out


def _gin(layer: Any, sums: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    return layer.nn(sums if target is None else sums + (1 + layer.eps) * target)


def _gcn(layer: Any, sums: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """Aggregation, then the linear map: A (X W) = (A X) W."""
    out = layer.lin(sums)
    return out if layer.bias is None else out + layer.bias


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


UPDATES: dict[type, Callable[..., torch.Tensor]] = {SAGEConv: _sage, GCNConv: _gcn, GINConv: _gin}
