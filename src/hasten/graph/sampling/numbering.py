"""Numbers the nodes of a sample in the order in which they are found first, seeds before all others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy
from numpy.typing import NDArray

from hasten.graph.sampling import kernels

Ids = NDArray[numpy.int64]
SMALL_GRAPH = 2**30  # nodes; numbers of a sample, and those of samples before, fit into 32 bits


class NodeTable:
    """Node id -> number in the current sample: ``entries[id] - start``; below 0, the node has no number yet."""

    def __init__(self, num_nodes: int):
        self.entries = numpy.zeros(num_nodes, numpy.int32 if num_nodes < SMALL_GRAPH else numpy.int64)
        self.start = 1
        self.used = 0  # numbers of this sample

    def clear(self, seeds: int) -> None:
        """Makes all numbers invalid, before a sample with ``seeds`` seeds."""
        self.start += self.used
        if self.start + seeds + len(self.entries) > numpy.iinfo(self.entries.dtype).max:
            self.entries[:] = 0
            self.start = 1


class NodeTablePool:
    """Tables for samples that threads draw at the same time: each sample has tables of its own, which are reused.

    Args:
        sizes: number of nodes, by type of node.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes
        self.free: list[dict[str, NodeTable]] = []

    @contextmanager
    def borrow(self) -> Iterator[dict[str, NodeTable]]:
        """Tables by type of node, of this sample alone. After an error they are dropped: their state is unknown."""
        try:
            tables = self.free.pop()
        except IndexError:
            tables = {node_type: NodeTable(size) for node_type, size in self.sizes.items()}
        yield tables
        self.free.append(tables)


class Numbering:
    """The nodes of one type in a sample. A node that several seeds reach is one node.

    ``by_hop``: ids of the nodes that each hop found, int64; the first are the seeds, in their order.
    """

    def __init__(self, seeds: Ids, table: NodeTable):
        self._begin(seeds, table.used * 9 // 8)
        self._table = table
        table.clear(len(seeds))
        table.used = self.size
        # Numbers run backward, so that the first of equal seeds is the one that its neighbors refer to.
        table.entries[seeds[::-1]] = table.start + numpy.arange(len(seeds) - 1, -1, -1)

    def _begin(self, seeds: Ids, capacity: int) -> None:
        self.size = len(seeds)
        self._ids = numpy.empty(max(capacity, self.size), numpy.int64)  # by number
        self._ids[: self.size] = seeds
        self._ends = [self.size]  # by hop: the numbers of its nodes end here
        self.by_hop: list[Ids] = [self._ids[: self.size]]

    def number(self, nodes: Ids, batch: Ids | None = None) -> None:
        """Replaces each id in ``nodes`` by its number, in place; nodes without a number get one, in the next hop.

        ``batch``: in disjoint samples, the number of the seed of each node; otherwise ignored.
        """
        self._reserve(min(len(nodes), len(self._table.entries)))
        self.size += kernels.number_nodes(
            self._table.entries, self._table.start, nodes, self.size, self._ids[self.size :]
        )
        self._table.used = self.size

    def end_hop(self) -> None:
        """Makes a hop of the nodes that are new since the last call."""
        self.by_hop.append(self._ids[self._ends[-1] : self.size])
        self._ends.append(self.size)

    def nodes(self) -> Ids:
        """The ids of all nodes, by number."""
        return self._ids[: self.size]

    def find(self, nodes: Ids) -> Ids:
        """The numbers of ``nodes``; -1 for a node that has none."""
        return numpy.maximum(self._table.entries[nodes].astype(numpy.int64) - self._table.start, -1)

    def batch_of_hop(self, hop: int) -> Ids | None:
        """The number of the seed of each node of a hop; None here, since nodes belong to all seeds."""
        return None

    def streams(self, hop: int) -> Ids:
        """A number that selects the random stream of each node of a hop."""
        return self.by_hop[hop]

    def _reserve(self, more: int) -> None:
        """Makes the array of ids long enough for ``more`` further ones."""
        if self.size + more > len(self._ids):
            larger = numpy.empty(max(self.size + more, 2 * len(self._ids)), numpy.int64)
            larger[: self.size] = self._ids[: self.size]
            self._ids = larger


class DisjointNumbering(Numbering):
    """As ``Numbering``, where each seed has a disjoint subgraph: a node has a number for each seed that reaches it.

    Seeds are numbered over all types of nodes; ``first_seed`` is the number of the first of these.
    """

    def __init__(self, seeds: Ids, num_nodes: int, first_seed: int = 0):
        self.num_nodes = num_nodes
        self._begin((first_seed + numpy.arange(len(seeds))) * num_nodes + seeds, 0)  # pairs (seed, node)
        self.by_hop = [seeds]
        self._keys = self._numbers = numpy.empty(0, numpy.int64)
        self._reserve(0)

    def number(self, nodes: Ids, batch: Ids | None = None) -> None:
        assert batch is not None
        self._reserve(len(nodes))
        nodes += batch * self.num_nodes
        self.size += kernels.number_pairs(self._keys, self._numbers, nodes, self.size, self._ids[self.size :])

    def end_hop(self) -> None:
        super().end_hop()
        self.by_hop[-1] = self.by_hop[-1] % self.num_nodes

    def nodes(self) -> Ids:
        return self._ids[: self.size] % self.num_nodes

    def batch(self) -> Ids:
        """For each node of the sample, in the order of the numbers, the number of its seed."""
        return self._ids[: self.size] // self.num_nodes

    def batch_of_hop(self, hop: int) -> Ids:
        return self.streams(hop) // self.num_nodes

    def streams(self, hop: int) -> Ids:
        return self._ids[self._ends[hop] - len(self.by_hop[hop]) : self._ends[hop]]

    def _reserve(self, more: int) -> None:
        """As in ``Numbering``; makes the hash table long enough, too."""
        super()._reserve(more)
        if len(self._keys) >= 2 * (self.size + more):
            return
        length = 1 << (2 * (self.size + more)).bit_length()
        self._keys, self._numbers = numpy.full(length, kernels.EMPTY), numpy.empty(length, numpy.int64)
        pairs = self._ids[: self.size].copy()
        kernels.number_pairs(self._keys, self._numbers, pairs, 0, numpy.empty_like(pairs))
