"""The sparse matrix A of an aggregation, by rows (CSR): row i holds the sources of the edges that end in node i."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any

import numpy
import torch

from hasten._torch_compat import in_place_version
from hasten.core.errors import ConfigurationError
from hasten.graph.sampling.checks import check_integer, first_descent, out_of_range

MAX_NODES = 2**31 - 1  # for 32-bit indices; a larger graph must be partitioned
CACHE_ENTRIES = 16  # graphs, so that a full graph is sorted once per training
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Adjacency:
    """A sparse matrix in CSR form, checked once.

    Attributes:
        indptr: Row pointers, stored as int64, shape (rows + 1,).
        indices: Source of each edge, ascending in every row, stored as int32, shape (edges,).
        num_sources: Columns of the matrix.
        weights: Value of each edge, float, shape (edges,); None for ones. They receive no gradient.

    Args:
        check_invariants: Whether to check all positions. ``aggregate`` reads memory there without a check; False is for
            matrices that are right by construction.

    Raises:
        ConfigurationError: The pointers or indices are not integers, not sorted, or out of range; or the weights are
            not one float per edge, or require a gradient.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    num_sources: int
    weights: torch.Tensor | None = None
    check_invariants: InitVar[bool] = True

    def __post_init__(self, check_invariants: bool) -> None:
        if not check_invariants:
            return
        _check_integer(indptr=self.indptr, indices=self.indices)
        check_integer("num_sources", self.num_sources, 0, MAX_NODES)
        object.__setattr__(self, "indptr", self.indptr.to(torch.int64).contiguous())
        self._check()
        object.__setattr__(self, "indices", self.indices.to(torch.int32).contiguous())
        if self.weights is not None:
            _check_weights(self.weights, self.indices)

    @classmethod
    def from_edge_index(
        cls, edge_index: torch.Tensor, num_sources: int, num_targets: int, weights: torch.Tensor | None = None
    ) -> "Adjacency":
        """The matrix of PyTorch Geometric's ``edge_index``, shape (2, edges): sources, then targets, in any order.

        Equal edges stay separate entries, whose contributions add up.
        """
        check_integer("num_sources", num_sources, 0, MAX_NODES)
        check_integer("num_targets", num_targets, 0, MAX_NODES)
        if not isinstance(edge_index, torch.Tensor):
            raise ConfigurationError(
                f"edge_index is a {type(edge_index).__name__}; expected a tensor of shape (2, edges)"
            )
        _check_integer(edge_index=edge_index)
        if edge_index.ndim != 2 or len(edge_index) != 2:
            raise ConfigurationError(f"edge_index has the shape {tuple(edge_index.shape)}; expected (2, edges)")
        _check_range("source", edge_index[0], num_sources)
        _check_range("target", edge_index[1], num_targets)
        if weights is not None:
            _check_weights(weights, edge_index[0])
        indptr, indices, order = _sorted(edge_index, num_sources, num_targets)
        weights = None if weights is None else weights.detach()[order]
        return cls(indptr, indices.to(torch.int32), num_sources, weights, check_invariants=False)

    def _check(self) -> None:
        """Raises ConfigurationError unless ``indptr`` and ``indices`` are CSR rows of ascending sources that exist."""
        indptr, indices = self.indptr, self.indices
        if indptr.ndim != 1 or indices.ndim != 1 or not len(indptr) or int(indptr[0]) != 0:
            raise ConfigurationError("indptr must have one dimension and start with 0, and indices one dimension")
        if int(indptr[-1]) != len(indices):
            found = f"indptr ends with {int(indptr[-1])}"
            raise ConfigurationError(f"{found}; expected {len(indices)}, the number of indices")
        if bool((indptr[1:] < indptr[:-1]).any()):
            raise ConfigurationError("indptr decreases; expected the row pointers of a CSR matrix")
        _check_range("source", indices, self.num_sources)
        if (edge := first_descent(indices, indptr)) is not None:
            row = int(torch.searchsorted(indptr, edge, right=True)) - 1
            advice = "sort each row, or use Adjacency.from_edge_index"
            raise ConfigurationError(f"the sources of row {row} are not in ascending order; {advice}")

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @cached_property
    def transposed(self) -> "Adjacency":
        """The matrix with every edge reversed, as the gradient of an aggregation needs it."""
        rows = torch.repeat_interleave(self.indptr.diff())  # of each edge
        indptr, indices, order = _sorted(torch.stack([rows, self.indices]), self.num_rows, self.num_sources)
        weights = None if self.weights is None else self.weights[order]
        return Adjacency(indptr, indices.to(torch.int32), self.num_rows, weights, check_invariants=False)

    @cached_property
    def edges_before_source(self) -> numpy.ndarray:
        """Number of edges that start in the sources before each source, int64, of shape (num_sources + 1,)."""
        counts = torch.bincount(self.indices, minlength=self.num_sources)
        return numpy.concatenate([[0], counts.cumsum(0).numpy()])


@dataclass(frozen=True, eq=False)
class Entry:
    """A sorted graph, the states of the tensors that it was made of, and weak references to them."""

    states: list[tuple[int, int]]
    adjacency: Adjacency
    references: list[weakref.ref[torch.Tensor]]  # the death of a tensor removes the entry


class AdjacencyCache:
    """Maps the tensors of a graph to its ``Adjacency``, as long as they live; holds the ``CACHE_ENTRIES`` last used;
    a copy or pickle of it is empty.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return AdjacencyCache, ()

    def get(
        self, tensors: tuple[torch.Tensor | None, ...], settings: Hashable, build: Callable[[], Adjacency]
    ) -> Adjacency:
        """The matrix that ``build`` made of these tensors with these settings; calls it if they are new or changed.

        Results for inference tensors, which do not count their changes, are not stored.
        """
        given = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.is_inference() for tensor in given):
            return build()
        key, states = (*map(id, tensors), settings), [_state(tensor) for tensor in given]
        entry = self._entries.get(key)
        if entry is None or entry.states != states:
            # another tensor may get the id of one that has died; and a sampled graph must not outlive its batch
            references = [weakref.ref(tensor, lambda _: self._entries.pop(key, None)) for tensor in given]
            self._entries[key] = entry = Entry(states, build(), references)
            if len(self._entries) > CACHE_ENTRIES:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return entry.adjacency


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """The in-place version of a tensor and, on the CPU, a checksum: NumPy and ``tensor.data`` write uncounted."""
    if tensor.device.type != "cpu":
        return in_place_version(tensor), 0
    from hasten.graph.aggregation.kernels import checksum

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(-1).view(integers[tensor.itemsize])
    return in_place_version(tensor), int(checksum(bits.numpy()))


def _sorted(edge_index: torch.Tensor, num_sources: int, num_targets: int) -> tuple[torch.Tensor, ...]:
    if edge_index.device.type == "cpu":
        from hasten.graph.aggregation.kernels import sort_edges

        sources, targets = edge_index.contiguous().numpy()
        return tuple(map(torch.from_numpy, sort_edges(sources, targets, num_sources, num_targets)))
    sources, targets = edge_index.long()
    order = torch.argsort(targets * num_sources + sources, stable=True)
    counts = torch.bincount(targets, minlength=num_targets)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), sources[order], order


def _check_integer(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in INTEGERS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ConfigurationError(f"{name} is of type {dtype}; expected integers: node ids or positions")


def _check_range(end: str, nodes: torch.Tensor, bound: int) -> None:
    if (wrong := out_of_range(nodes, bound)) is not None:
        raise ConfigurationError(f"{end} {wrong} of an edge is out of range: there are {bound} {end} nodes")


def _check_weights(weights: torch.Tensor, indices: torch.Tensor) -> None:
    if weights.shape != indices.shape or not weights.is_floating_point():
        given = f"shape {tuple(weights.shape)} and type {str(weights.dtype).removeprefix('torch.')}"
        expected = f"one float per edge, shape {tuple(indices.shape)}"
        raise ConfigurationError(f"edge weights of {given}; expected {expected}")
    if weights.requires_grad:
        raise ConfigurationError("the edge weights require a gradient, which aggregate does not compute; detach them")
