"""MaxK in models of PyTorch Geometric: ``apply_maxk`` alters the layers that aggregate hidden features.

The instance gets a ``forward`` that keeps the k largest values of each input row and aggregates them in CBSR form.
Where the kernel cannot compute what the layer does, the input is masked and the layer's own ``forward`` does the rest.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch_geometric.nn import GCNConv

from hasten.graph.aggregation.adjacency import AdjacencyCache
from hasten.graph.aggregation.aggregate import aggregate
from hasten.graph.aggregation.layers import LAYERS, REDUCTIONS, adjacency_of, check_model, obstacle, update
from hasten.graph.aggregation.maxk import MaxK, compress

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
        ConfigurationError: k is no integer from 1 up, or ``model`` is no module.
    """
    check_model(model)
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
        if type(module) in LAYERS:
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
    if why := obstacle(layer, source, target, edge_index, args, kwargs):
        calls[why] += 1
        masked = mask(source)
        target = masked if target is source else None if target is None else mask(target)
        return original((masked, target) if is_pair else masked, edge_index, *args, **kwargs)
    calls[SPARSE] += 1
    sparse = compress(source, mask.k)
    if target is source and not isinstance(layer, GCNConv):
        target = sparse.to_dense()
    elif target is not source and target is not None:
        target = mask(target)
    adjacency = adjacency_of(layer, masking.cache, source, target, edge_index, *args, **kwargs)
    return update(layer, aggregate(adjacency, sparse, REDUCTIONS[str(layer.aggr)]), target)
