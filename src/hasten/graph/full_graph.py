"""A whole graph as the data of a task: every step trains on all of it."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError
from hasten.graph.sampling.checks import out_of_range
from hasten.utils.batch import batch_tensors, map_tensors


class FullGraph:
    """The ``train_data`` or ``validation_data`` of a task: one batch, the graph with its ``seed_nodes``.

    ``Task(train_data=FullGraph(data, data.train_mask), validation_data=FullGraph(data, data.val_mask), ...)``. The
    model computes all nodes; loss and metric see the output and the labels of the seed nodes only.

    Args:
        data: a ``Data`` object of PyTorch Geometric, with labels ``y`` for each node.
        nodes: the nodes to train on or to evaluate: a mask of all nodes, or their numbers (int64).

    Raises:
        ConfigurationError: no node is selected, or a node does not exist.
    """

    def __init__(self, data: Any, nodes: Tensor):
        self.graph = copy.copy(data)
        self.dataset = self.graph.seed_nodes = _seed_nodes(nodes, data.num_nodes)
        self.batch_size = len(self.dataset)  # samples of a step

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([self.graph])

    def batches(self, batch_size: int, seed: int, training: bool) -> BatchSource:
        """The batches for the engine; ConfigurationError if a method has changed the batch size for training."""
        if training and batch_size != self.batch_size:
            problem = "the batch size cannot be changed: the batch is a full graph"
            raise ConfigurationError(f"{problem}; train on samples of it with a NodeLoader")
        batches = _source(self.graph, training)
        nbytes = sum(tensor.nbytes for tensor in batch_tensors(self.graph))
        batches.on_device = (nbytes, partial(_source, self.graph, training))
        return batches


def _source(graph: Any, training: bool, device: torch.device | None = None) -> BatchSource:
    placed = graph if device is None else map_tensors(lambda tensor: tensor.to(device), graph)

    def epoch(epoch: int, start: int = 0) -> Iterator[Any]:
        return iter([placed][start:])

    return BatchSource(epoch, length=1, training=training)


def _seed_nodes(nodes: Tensor, num_nodes: int) -> Tensor:
    if nodes.dtype == torch.bool:
        if nodes.shape != (num_nodes,):
            shape = tuple(nodes.shape)
            raise ConfigurationError(f"a mask of the nodes must have the shape ({num_nodes},), not {shape}")
        nodes = nodes.nonzero().flatten()
    if nodes.dtype == torch.uint8:
        problem = "FullGraph(nodes=) must be a mask of type bool or numbers of type int64, not uint8"
        raise ConfigurationError(f"{problem}; convert a mask with nodes.bool()")
    if nodes.ndim != 1 or nodes.is_floating_point() or not len(nodes):
        raise ConfigurationError(f"FullGraph(nodes=) must select at least one node, not {nodes!r:.80}")
    if (wrong := out_of_range(nodes, num_nodes)) is not None:
        raise ConfigurationError(f"FullGraph(nodes=) must be numbers from 0 to {num_nodes - 1}; found {wrong}")
    return nodes.long()
