"""Maps and compares nested containers: tuples, named tuples, lists, mappings, dataclass instances, graphs of PyG.

``torch.utils._pytree`` and ``optree`` are not used, because this runs several times in a training step: ``map_tensors``
of ``(x, y)`` takes 0.6 µs, with optree 2.6 µs and with ``torch.utils._pytree`` at least 14 µs (torch 2.13, one core).
Both also treat unregistered mappings (``transformers.BatchEncoding``) and dataclass instances as leaves.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from hasten.utils.graph_batch import is_graph, map_graph


def tree_map(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Returns ``tree`` with ``function`` applied to every leaf, in new containers of the same types. A tensor is always
    a leaf, and so is a PackedSequence, everything that is not a container, and a node for which ``is_leaf`` is true.
    """
    if isinstance(tree, torch.Tensor) or (is_leaf is not None and is_leaf(tree)):
        return function(tree)
    if type(tree) is dict:  # before the slow check for any mapping
        return {key: tree_map(function, value, is_leaf) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        if isinstance(tree, PackedSequence):
            return function(tree)
        items = [tree_map(function, item, is_leaf) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        kind: Any = type(tree)
        if isinstance(tree, defaultdict):
            kind = partial(kind, tree.default_factory)
        return kind({key: tree_map(function, value, is_leaf) for key, value in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        values = {field.name: tree_map(function, getattr(tree, field.name), is_leaf) for field in fields}
        return _rebuilt(tree, values, {field.name for field in fields if field.init})
    if is_graph(tree):
        return map_graph(lambda value: tree_map(function, value, is_leaf), tree)
    return function(tree)


def _rebuilt(instance: Any, values: dict[str, Any], arguments: set[str]) -> Any:
    """A dataclass instance with other ``values`` of its fields; ``arguments``: the names that its __init__ takes."""
    try:
        rebuilt = dataclasses.replace(instance, **{name: values[name] for name in arguments})
    except (TypeError, ValueError):  # it has an InitVar, whose value is unknown
        rebuilt = copy.copy(instance)
    for name, value in values.items():
        object.__setattr__(rebuilt, name, value)  # it may be frozen
    return rebuilt


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Returns every leaf of ``tree``, in order. The arguments are those of ``tree_map``."""
    leaves: list[Any] = []

    def collect(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    tree_map(collect, tree, is_leaf)
    return leaves


def bitwise_equal(a: Any, b: Any) -> bool:
    """Whether two trees are equal: dtypes, shapes and bytes of arrays, values of other leaves; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        return all(map(torch.equal, map(_as_bytes, _parts(a)), map(_as_bytes, _parts(b))))
    if isinstance(a, numpy.ndarray) and type(a) is type(b):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(bitwise_equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(bitwise_equal, a, b))
    if dataclasses.is_dataclass(a) and type(a) is type(b) and not isinstance(a, type):
        return all(bitwise_equal(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    graphs: tuple[Any, Any] = a, b
    if all(map(is_graph, graphs)):
        return bitwise_equal(*(graph.to_dict() for graph in graphs))
    return bool(a == b or (a != a and b != b))


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a tensor consists of: itself, or indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    entries = tensor.to_sparse_coo().coalesce()
    return entries.indices(), entries.values()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, or a copy if it is not contiguous or on another device."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
