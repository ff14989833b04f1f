"""Sorted graphs of the last aggregations, so that a full graph is sorted once per training."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from hasten._torch_compat import in_place_version
from hasten.graph.aggregation.adjacency import Adjacency

ENTRIES = 16


class AdjacencyCache:
    """Maps the tensors of a graph to its ``Adjacency``, as long as they live. A copied model has an empty one."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, Adjacency] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return AdjacencyCache, ()

    def get(
        self, tensors: tuple[torch.Tensor | None, ...], settings: Hashable, build: Callable[[], Adjacency]
    ) -> Adjacency:
        """The matrix that ``build`` made of the same tensors, unchanged since, under the same settings."""
        if any(tensor is not None and tensor.is_inference() for tensor in tensors):  # they do not count their changes
            return build()
        key = (*((id(tensor), None if tensor is None else in_place_version(tensor)) for tensor in tensors), settings)
        if key not in self._entries:
            self._entries[key] = build()
            for tensor in tensors:  # another one may get its id; and a sampled graph must not outlive its batch
                if tensor is not None:
                    weakref.finalize(tensor, self._entries.pop, key, None)
            if len(self._entries) > ENTRIES:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key]
