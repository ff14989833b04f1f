"""Sorted graphs of the last aggregations, so that a full graph is sorted once per training."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from hasten._torch_compat import in_place_version
from hasten.graph.aggregation.adjacency import Adjacency

ENTRIES = 16


@dataclass(frozen=True, eq=False)
class Entry:
    """A sorted graph, and the versions of the tensors that it was made of."""

    versions: list[int]
    adjacency: Adjacency
    references: list[weakref.ref[torch.Tensor]]  # the death of a tensor removes the entry


class AdjacencyCache:
    """Maps the tensors of a graph to its ``Adjacency``, as long as they live. A copied model has an empty one."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return AdjacencyCache, ()

    def get(
        self, tensors: tuple[torch.Tensor | None, ...], settings: Hashable, build: Callable[[], Adjacency]
    ) -> Adjacency:
        """The matrix that ``build`` made of the same tensors, unchanged since, under the same settings."""
        given = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.is_inference() for tensor in given):  # they do not count their changes
            return build()
        key, versions = (*map(id, tensors), settings), [in_place_version(tensor) for tensor in given]
        entry = self._entries.get(key)
        if entry is None or entry.versions != versions:
            # another tensor may get the id of one that has died; and a sampled graph must not outlive its batch
            references = [weakref.ref(tensor, lambda _: self._entries.pop(key, None)) for tensor in given]
            self._entries[key] = entry = Entry(versions, build(), references)
            if len(self._entries) > ENTRIES:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return entry.adjacency
