"""Checks of graphs and seeds before a kernel, which checks no bounds, reads them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hasten.core.errors import ConfigurationError


def check_graph(data: Any, is_sorted: bool) -> None:
    """ConfigurationError if an edge index is no integer, names a node that does not exist, or is not sorted as claimed.

    ``data`` is a Data or HeteroData of PyTorch Geometric; other graphs are checked in CSC form alone.
    """
    for name, edge_index, sizes in _edge_indices(data):
        if edge_index.dtype not in (torch.int64, torch.int32):
            raise ConfigurationError(f"{name} must hold integers (int64), not {edge_index.dtype}")
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ConfigurationError(f"{name} must have the shape (2, edges), not {tuple(edge_index.shape)}")
        for row, end, size in zip(edge_index, ("source", "target"), sizes, strict=True):
            if row.numel() and (int(row.min()) < 0 or int(row.max()) >= size):
                wrong = int(row.min()) if int(row.min()) < 0 else int(row.max())
                raise ConfigurationError(f"{name} has {end} {wrong}, but nodes are 0 to {size - 1}")
        if is_sorted and bool((edge_index[1, 1:] < edge_index[1, :-1]).any()):
            raise ConfigurationError(f"{name} is not sorted by target; leave out is_sorted=True")


def check_matrix(name: str, indptr: Tensor, indices: Tensor, num_sources: int) -> None:
    """ConfigurationError if a CSC matrix has edges that do not exist, or sources that do not."""
    rises = indptr.numel() > 0 and bool((indptr.diff() >= 0).all())
    if not rises or (int(indptr[0]), int(indptr[-1])) != (0, indices.numel()):
        raise ConfigurationError(f"{name}: the offsets of the nodes must rise from 0 to the {indices.numel()} edges")
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= num_sources):
        raise ConfigurationError(f"{name} has sources outside of the {num_sources} nodes")


def check_weights(name: str, weights: Tensor, edges: int) -> None:
    """ConfigurationError unless there is one finite weight from 0 up for each edge."""
    if weights.shape != (edges,):
        raise ConfigurationError(f"{name} has weights of the shape {tuple(weights.shape)} for {edges} edges")
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise ConfigurationError(f"{name} has weights that are negative or not finite")


def check_fanouts(fanouts: list[int]) -> None:
    """ConfigurationError if a number of neighbors is below -1."""
    if any(fanout < -1 for fanout in fanouts):
        raise ConfigurationError(f"the number of neighbors must be -1 (all) or from 0 up, not {fanouts}")


def check_seeds(nodes: Tensor, size: int, kind: str = "") -> None:
    """ConfigurationError if a seed is no integer or no node of the graph."""
    if nodes.is_floating_point() or nodes.is_complex() or nodes.dtype == torch.bool:
        raise ConfigurationError(f"seed nodes must be integers, not {nodes.dtype}")
    if nodes.numel() and (int(nodes.min()) < 0 or int(nodes.max()) >= size):
        wrong = int(nodes.min()) if int(nodes.min()) < 0 else int(nodes.max())
        raise ConfigurationError(f"seed node {wrong} does not exist; {kind or 'node'}s are 0 to {size - 1}")


def _edge_indices(data: Any) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
    """(name, edge index, (number of sources, of targets)) of each type of edge that has an edge index."""
    for store in getattr(data, "edge_stores", ()):
        if not isinstance(store.get("edge_index"), Tensor):
            continue
        kind = store._key
        if kind is None:
            yield "edge_index", store["edge_index"].as_subclass(Tensor), (data.num_nodes, data.num_nodes)
        else:
            sizes = (data[kind[0]].num_nodes, data[kind[-1]].num_nodes)
            yield f"edge_index of {kind}", store["edge_index"].as_subclass(Tensor), sizes
