"""Maps and compares nested containers: tuples, named tuples, lists, mappings, dataclass instances, graphs of PyG.

``torch.utils._pytree`` and ``optree`` are not used, because this runs several times in a training step: ``map_tensors``
of ``(x, y)`` takes 0.6 µs, with optree 2.6 µs and with ``torch.utils._pytree`` at least 14 µs (torch 2.13, one core).
Both also treat unregistered mappings (``transformers.BatchEncoding``) and dataclass instances as leaves.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch

from hasten.utils.graph_batch import is_graph, map_graph


def tree_map(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Returns ``tree`` with ``function`` applied to every leaf, in new containers of the same types. A tensor is always
    a leaf, and so is everything that is not a container, and a node for which ``is_leaf`` is true.
    """
    if isinstance(tree, torch.Tensor) or (is_leaf is not None and is_leaf(tree)):
        return function(tree)
    if type(tree) is dict:  # before the slow check for any mapping
        return {key: tree_map(function, value, is_leaf) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [tree_map(function, item, is_leaf) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        kind: Any = type(tree)
        if isinstance(tree, defaultdict):
            kind = partial(kind, tree.default_factory)
        return kind({key: tree_map(function, value, is_leaf) for key, value in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **{name: tree_map(function, value, is_leaf) for name, value in fields.items()})
    if is_graph(tree):
        return map_graph(lambda value: tree_map(function, value, is_leaf), tree)
    return function(tree)


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
    if isinstance(a, (torch.Tensor, numpy.ndarray)) and type(a) is type(b):
        return a.dtype == b.dtype and a.shape == b.shape and _bytes_of(a) == _bytes_of(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(bitwise_equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(bitwise_equal, a, b))
    if type(a) is type(b) and dataclasses.is_dataclass(a):
        return all(bitwise_equal(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if is_graph(a) and is_graph(b):
        return bitwise_equal(a.to_dict(), b.to_dict())
    return a is b or bool(a == b or (a != a and b != b))


def _bytes_of(array: torch.Tensor | numpy.ndarray) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()
