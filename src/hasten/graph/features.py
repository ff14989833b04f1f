"""Features of nodes: rows of a matrix in memory or in a file. ``remote_features.py`` reads rows of other ranks."""

from abc import ABC, abstractmethod
from pathlib import Path

import numpy
import torch
from torch import Tensor

from hasten.core.errors import ConfigurationError, format_error
from hasten.graph.sampling.checks import out_of_range


class FeatureSource(ABC):
    """A matrix with one row for each node. ``width``: elements per row; ``dtype``: of the elements.

    ConfigurationError unless ``shape`` is (nodes, width), with ``num_nodes`` nodes if that is given.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, num_nodes: int | None = None):
        if len(shape) != 2:
            raise ConfigurationError(f"features must have two dimensions (nodes, width); got shape {shape}")
        if num_nodes is not None and shape[0] != num_nodes:
            counts = f"features have {shape[0]} rows, but there are {num_nodes} nodes"
            raise ConfigurationError(f"{counts}; one row is a node")
        self._num_rows, self.width = shape
        self.dtype = dtype

    @abstractmethod
    def rows(self, node_ids: Tensor) -> Tensor:
        """The rows of some nodes.

        Args:
            node_ids: int64, of shape (N,), in any order; duplicates are allowed.

        Returns:
            A tensor of shape (N, width) that shares no memory with the source.

        Raises:
            ConfigurationError: an id is out of range, or is not an integer.
        """

    def __len__(self) -> int:
        """Number of nodes."""
        return self._num_rows


class InMemoryFeatures(FeatureSource):
    """The rows of a tensor of shape (nodes, width), on the CPU."""

    def __init__(self, features: Tensor, num_nodes: int | None = None):
        super().__init__(tuple(features.shape), features.dtype, num_nodes)
        self.features = features.contiguous()

    def rows(self, node_ids: Tensor) -> Tensor:
        check_node_ids(node_ids, len(self))
        return self.features.index_select(0, node_ids)


class MemoryMappedFeatures(FeatureSource):
    """The rows of a matrix in a ``.npy`` file, which need not fit into memory.

    Args:
        path: a file that ``numpy.save`` wrote.
        num_nodes: number of nodes of the graph, to be checked.
        first: the first row of the file that belongs to this source, and ``end`` the row after the last: a rank's part.
        end: see ``first``; by default the number of rows.

    Raises:
        ConfigurationError: the file cannot be read, is no array of two dimensions of a dtype that PyTorch has, or lacks
            the rows from ``first`` to ``end``; or these are not ``num_nodes`` rows.
    """

    def __init__(self, path: str | Path, num_nodes: int | None = None, first: int = 0, end: int | None = None):
        try:
            array = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # of a damaged header, numpy.load raises errors of many types
            raise ConfigurationError(f"{path} is not a readable .npy file: {format_error(error)}") from None
        if not isinstance(array, numpy.ndarray):
            raise ConfigurationError(f"{path} is an archive of arrays; save one array with numpy.save")
        if array.ndim != 2:
            raise ConfigurationError(f"{path} must have two dimensions (nodes, width); it has shape {array.shape}")
        end = len(array) if end is None else end
        if not 0 <= first <= end <= len(array):
            expected = f"expected 0 <= first <= end <= {len(array)}"
            raise ConfigurationError(f"{path} has {len(array)} rows; {expected}, got first={first}, end={end}")
        self._array = array[first:end]
        try:
            dtype = torch.from_numpy(numpy.empty(0, array.dtype)).dtype
        except (TypeError, ValueError):  # of an unknown type, or one whose bytes are in another order
            unknown = f"{path} has elements of type {array.dtype}, which PyTorch does not know"
            raise ConfigurationError(f"{unknown}; save it in another dtype, such as float32") from None
        super().__init__(self._array.shape, dtype, num_nodes)

    def rows(self, node_ids: Tensor) -> Tensor:
        check_node_ids(node_ids, len(self))
        # sorted: the file is read forward, each row once
        unique, positions = torch.unique(node_ids, return_inverse=True)
        return torch.from_numpy(self._array[unique.numpy()]).index_select(0, positions)


def check_node_ids(node_ids: Tensor, num_nodes: int, name: str = "node ids") -> None:
    """Raises ConfigurationError unless the ids are one-dimensional int64 in [0, num_nodes)."""
    if node_ids.dtype != torch.int64 or node_ids.ndim != 1:
        shape = tuple(node_ids.shape)
        raise ConfigurationError(f"{name} must be int64 of one dimension; got {node_ids.dtype} of shape {shape}")
    if (wrong := out_of_range(node_ids, num_nodes)) is not None:
        raise ConfigurationError(f"{name} must be in [0, {num_nodes}); got {wrong}: is it an id of another graph?")
