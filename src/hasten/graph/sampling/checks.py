"""Checks of graphs, seeds and options before a kernel, which checks no bounds, reads them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from hasten.core.errors import ConfigurationError

INTEGERS = (torch.int64, torch.int32)


def check_graph(data: Any, is_sorted: bool, backward: bool = False) -> None:
    """ConfigurationError if an edge index is no integer tensor of shape (2, edges), names a node that does not exist or
    is not sorted although ``is_sorted``, or if the number of nodes of a type is unknown.

    ``data`` is a Data or HeteroData of PyTorch Geometric; other graphs are checked in CSC form alone. ``is_sorted``
    means by target, with ``backward`` by source.
    """
    for node_type in getattr(data, "node_types", ()):
        if data[node_type].num_nodes is None:
            advice = f"set data[{node_type!r}].num_nodes"
            raise ConfigurationError(f"the number of nodes of type {node_type!r} is unknown; {advice}")
    sorted_row, end_name = (0, "source") if backward else (1, "target")
    for name, edge_index, sizes in _edge_indices(data):
        if edge_index.dtype not in INTEGERS:
            raise ConfigurationError(f"{name} must hold integers (int64), not {edge_index.dtype}")
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ConfigurationError(f"{name} must have the shape (2, edges), not {tuple(edge_index.shape)}")
        for row, end, size in zip(edge_index, ("source", "target"), sizes, strict=True):
            if (wrong := out_of_range(row, size)) is not None:
                raise ConfigurationError(f"{name} has {end} {wrong}; expected ids of nodes in [0, {size})")
        order = edge_index[sorted_row]
        if is_sorted and bool((order[1:] < order[:-1]).any()):
            raise ConfigurationError(f"{name} is not sorted by {end_name}; leave out is_sorted=True")


def check_attributes(data: Any, time_attr: str | None, weight_attr: str | None) -> None:
    """ConfigurationError if no node or edge of a Data or HeteroData has the attribute ``time_attr`` or ``weight_attr``,
    if it is not one real number each, or if weights are negative, not finite or of infinite sum.
    """
    nodes: list[Any] = list(getattr(data, "node_stores", ()))
    edges: list[Any] = list(getattr(data, "edge_stores", ()))
    for option, name, stores in (("time_attr", time_attr, nodes + edges), ("weight_attr", weight_attr, edges)):
        if name is not None and stores and not any(name in store for store in stores):
            known = ", ".join(sorted({key for store in stores for key in store}))
            raise ConfigurationError(f"the graph has no attribute {option}={name!r}; it has {known or 'none'}")
    for store in nodes + edges:
        if time_attr is not None and time_attr in store:
            _check_vector(time_attr, store[time_attr])
    for store in edges:
        if weight_attr is not None and weight_attr in store:
            _check_weights(weight_attr, store[weight_attr], store.num_edges)


def check_csc(name: str, indptr: Tensor, indices: Tensor, num_targets: int, num_sources: int) -> None:
    """ConfigurationError unless ``indptr`` has ``num_targets + 1`` pointers that ascend from 0 to the number of edges,
    and ``indices`` holds sources in [0, num_sources); both integers. ``name`` begins the message.
    """
    if indptr.dtype not in INTEGERS or indices.dtype not in INTEGERS:
        raise ConfigurationError(f"{name}: indptr and indices must be int64; got {indptr.dtype} and {indices.dtype}")
    if indptr.shape != (num_targets + 1,) or indices.ndim != 1:
        shapes = f"got {tuple(indptr.shape)} and {tuple(indices.shape)}"
        expected = f"indptr must have the shape ({num_targets + 1},), and indices one dimension"
        raise ConfigurationError(f"{name}: {expected}; {shapes}")
    if (int(indptr[0]), int(indptr[-1])) != (0, len(indices)) or bool((indptr.diff() < 0).any()):
        raise ConfigurationError(f"{name}: indptr must ascend from 0 to the number of edges, which is {len(indices)}")
    if (wrong := out_of_range(indices, num_sources)) is not None:
        raise ConfigurationError(f"{name}: indices must be in [0, {num_sources}), the ids of the nodes; got {wrong}")


def check_times(name: str, times: Tensor, indptr: Tensor) -> None:
    """ConfigurationError unless there is one time for each edge, ascending among the edges into each node."""
    if times.shape != (int(indptr[-1]),):
        raise ConfigurationError(f"{name} has times of the shape {tuple(times.shape)} for {int(indptr[-1])} edges")
    if wrong := int(times.isnan().sum()):
        raise ConfigurationError(f"{name} has {wrong} edges with a time that is NaN; remove them, or pass their times")
    if first_descent(times, indptr) is not None:
        advice = "sort them, or leave out is_sorted=True"
        raise ConfigurationError(f"{name} has times that do not ascend among the edges into a node; {advice}")


def check_fanouts(fanouts: Any, name: str = "num_neighbors") -> None:
    """ConfigurationError unless these are numbers of neighbors: integers from -1 (all), one for each hop."""
    numbers: Any = fanouts if isinstance(fanouts, Sequence) and not isinstance(fanouts, str) else [None]
    if not all(_is_integer(number) and -1 <= number < 2**63 for number in numbers):
        expected = "a list of integers from -1 (all), one for each hop"
        raise ConfigurationError(f"{name} must be {expected}; got {fanouts!r:.80}")


def check_integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """The value as an int. ConfigurationError unless it is an integer from ``low`` to ``high``, both inclusive."""
    if _is_integer(value) and (low is None or value >= low) and (high is None or value <= high):
        return int(value)
    bounds = "" if low is None else f" from {low} up" if high is None else f" from {low} to {high}"
    raise ConfigurationError(f"{name} must be an integer{bounds}; got {value!r:.80}")


def check_seeds(nodes: Tensor, size: int, node_type: str = "") -> None:
    """ConfigurationError if a seed is no integer or no node of the graph."""
    if nodes.is_floating_point() or nodes.is_complex() or nodes.dtype == torch.bool or nodes.ndim != 1:
        given = f"{nodes.dtype} of shape {tuple(nodes.shape)}"
        raise ConfigurationError(f"seed nodes must be integers of one dimension; got {given}")
    if (wrong := out_of_range(nodes, size)) is not None:
        kind = f"nodes of type {node_type!r}" if node_type else "nodes"
        raise ConfigurationError(f"seed node {wrong} does not exist; expected ids of {kind} in [0, {size})")


def first_descent(values: Tensor, indptr: Tensor) -> int | None:
    """The first position whose value is smaller than the one before in its row; None if every row ascends."""
    descends = ~(values[1:] >= values[:-1])
    starts = indptr[(indptr > 0) & (indptr < len(values))].long()
    descends[starts - 1] = False  # the first value of a row may be smaller than the last of the row before
    return int(descends.nonzero()[0]) + 1 if bool(descends.any()) else None


def out_of_range(ids: Tensor, size: int) -> int | None:
    """An id that is not in [0, size); None if all are."""
    if not ids.numel():
        return None
    low, high = (int(value) for value in torch.aminmax(ids))
    return low if low < 0 else high if high >= size else None


def _edge_indices(data: Any) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
    """(name, edge index, (number of sources, of targets)) of each type of edge that has an edge index."""
    for store in getattr(data, "edge_stores", ()):
        if not isinstance(store.get("edge_index"), Tensor):
            continue
        edge_type = store._key
        ends = (data, data) if edge_type is None else (data[edge_type[0]], data[edge_type[-1]])
        name = "edge_index" if edge_type is None else f"edge_index of {edge_type}"
        yield name, store["edge_index"].as_subclass(Tensor), (ends[0].num_nodes, ends[1].num_nodes)


def _check_weights(name: str, weights: Tensor, num_edges: int) -> None:
    """ConfigurationError unless there is one weight from 0 up for each edge, with a finite sum."""
    _check_vector(name, weights, num_edges)
    is_wrong = ~(torch.isfinite(weights) & (weights >= 0))
    if wrong := int(is_wrong.sum()):
        first = int(is_wrong.nonzero()[0])
        advice = f"the first is {weights[first].item()} of edge {first}; correct them, or remove the edges"
        raise ConfigurationError(f"{name} has {wrong} weights that are negative or not finite; {advice}")
    if not bool(torch.isfinite(weights.double().sum())):
        raise ConfigurationError(f"{name} has weights with an infinite sum; divide them by their maximum")


def _check_vector(name: str, values: Any, num_edges: int | None = None) -> None:
    """ConfigurationError unless this is a tensor of real numbers with one dimension, of ``num_edges`` if given."""
    if isinstance(values, Tensor) and values.ndim == 1 and not values.is_complex() and num_edges in (None, len(values)):
        return
    items = "node or edge" if num_edges is None else f"edge, shape ({num_edges},)"
    given = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
    raise ConfigurationError(f"{name} must be a tensor with a real number for each {items}; got {given}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, numpy.integer)) and not isinstance(value, bool)
