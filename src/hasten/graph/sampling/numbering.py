"""Numbers the nodes of a sample in the order in which they are found first, seeds before all others."""

import numpy
from numpy.typing import NDArray

from hasten.graph.sampling import kernels

Ids = NDArray[numpy.int64]
LAST_ROUND = 2**31 - 1


class NodeTable:
    """Holds the number of every node of a graph during one sample: 8 bytes a node, never cleared between samples."""

    def __init__(self, num_nodes: int):
        self.entries = numpy.zeros(num_nodes, numpy.int64)
        self.round = 0

    def clear(self) -> None:
        """Forgets all numbers."""
        if self.round == LAST_ROUND:
            self.entries[:] = 0
            self.round = 0
        self.round += 1


class Numbering:
    """The nodes of one type in a sample. A node that several seeds reach is one node.

    ``by_hop``: ids of the nodes that each hop found, int64; the first are the seeds, in their order.
    """

    def __init__(self, seeds: Ids, table: NodeTable):
        self.by_hop: list[Ids] = [seeds]
        self.size = len(seeds)
        self._new: list[Ids] = []
        self._table = table
        table.clear()
        # Numbers run backward, so that the first of equal seeds is the one that its neighbors refer to.
        table.entries[seeds[::-1]] = table.round << 32 | numpy.arange(len(seeds) - 1, -1, -1)

    def add(self, nodes: Ids, trees: Ids | None = None) -> Ids:
        """The numbers of ``nodes``; those that are new belong to the next hop."""
        found, numbers = numpy.empty_like(nodes), numpy.empty_like(nodes)
        new = kernels.number_nodes(self._table.entries, self._table.round, nodes, self.size, found, numbers)
        self.size += new
        self._new.append(found[:new])
        return numbers

    def end_hop(self) -> None:
        """Makes a hop of the nodes that are new since the last call."""
        self.by_hop.append(_joined(self._new))
        self._new = []

    def nodes(self) -> Ids:
        """The ids of all nodes, by number."""
        return _joined(self.by_hop)

    def find(self, nodes: Ids) -> Ids:
        """The numbers of ``nodes``; -1 for a node that has none."""
        entries = self._table.entries[nodes]
        return numpy.where(entries >> 32 == self._table.round, entries & 0xFFFFFFFF, -1)

    def all_trees(self) -> Ids | None:
        """The seed that each node belongs to, by number; None, since nodes belong to all seeds."""
        return None

    def trees(self, hop: int) -> Ids | None:
        """The seed that each node of a hop belongs to; None, since nodes belong to all seeds."""
        return None

    def streams(self, hop: int) -> Ids:
        """A number that selects the random stream of each node of a hop."""
        return self.by_hop[hop]


class DisjointNumbering(Numbering):
    """As ``Numbering``, where each seed has a tree of nodes of its own. A tree has the number of its seed."""

    def __init__(self, seeds: Ids, num_nodes: int, first_tree: int = 0):
        self.num_nodes = num_nodes
        self.size = len(seeds)
        self.by_hop = [seeds]
        self._new = []
        self._pairs_by_hop = [(first_tree + numpy.arange(len(seeds))) * num_nodes + seeds]
        self._keys = self._numbers = numpy.empty(0, numpy.int64)
        self._pairs = self._pairs_by_hop[0]
        self._reserve(len(seeds))

    def add(self, nodes: Ids, trees: Ids | None = None) -> Ids:
        assert trees is not None
        self._reserve(len(nodes))
        pairs = trees * self.num_nodes + nodes
        found, numbers = numpy.empty_like(pairs), numpy.empty_like(pairs)
        new = kernels.number_pairs(self._keys, self._numbers, pairs, self.size, found, numbers)
        self.size += new
        self._new.append(found[:new])
        self._pairs = numpy.concatenate([self._pairs, found[:new]])
        return numbers

    def end_hop(self) -> None:
        self._pairs_by_hop.append(_joined(self._new))
        self.by_hop.append(self._pairs_by_hop[-1] % self.num_nodes)
        self._new = []

    def find(self, nodes: Ids) -> Ids:
        raise NotImplementedError("a node has a number in each tree")

    def all_trees(self) -> Ids:
        return _joined(self._pairs_by_hop) // self.num_nodes

    def trees(self, hop: int) -> Ids:
        return self._pairs_by_hop[hop] // self.num_nodes

    def streams(self, hop: int) -> Ids:
        return self._pairs_by_hop[hop]

    def _reserve(self, more: int) -> None:
        """Makes the hash table large enough for ``more`` pairs."""
        if len(self._keys) >= 2 * (self.size + more):
            return
        length = 1 << (2 * (self.size + more)).bit_length()
        self._keys, self._numbers = numpy.full(length, kernels.EMPTY), numpy.empty(length, numpy.int64)
        kernels.number_pairs(
            self._keys, self._numbers, self._pairs, 0, numpy.empty_like(self._pairs), numpy.empty_like(self._pairs)
        )


def _joined(arrays: list[Ids]) -> Ids:
    if len(arrays) == 1:
        return arrays[0]
    return numpy.concatenate(arrays) if arrays else numpy.empty(0, numpy.int64)
