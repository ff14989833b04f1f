"""Samples neighbors of a rank's seed nodes where the graph is on every rank (hybrid) or partitioned too (vanilla).

What is drawn for a node is a function of (key, hop, node), whichever rank draws it, so both give the same sample, which
is also that of ``hasten.graph.NeighborSampler`` with the same seed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from hasten.core.errors import ConfigurationError
from hasten.graph.features import check_node_ids
from hasten.graph.partitions.exchange import RankExchange
from hasten.graph.partitions.partition import array_checksum, check_graph
from hasten.graph.sampling import kernels
from hasten.graph.sampling.checks import check_fanouts, check_integer
from hasten.graph.sampling.hops import EdgeMatrix, hop_key, sample, sample_hop
from hasten.graph.sampling.numbering import NodeTablePool, Numbering

NODE = ""  # the only type of nodes
EDGE = (NODE, "", NODE)


@dataclass(frozen=True)
class SampledNeighborhood:
    """Nodes and edges around seed nodes, as PyTorch Geometric numbers them.

    Attributes:
        n_id: int64: ids of the nodes; the seeds come first, then the nodes that each hop found.
        edge_index: int64, of shape (2, edges): positions in ``n_id`` of sources and targets.
        num_sampled_nodes: nodes by hop, the seeds first.
        num_sampled_edges: edges by hop.
    """

    n_id: Tensor
    edge_index: Tensor
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]


class PartitionedSampler(ABC):
    """Samples around seed nodes; subclasses differ in where the edges into a node are.

    Args:
        num_nodes: of the whole graph.
        fanouts: edges to draw into each node, by hop; -1 takes all.
        seed: of the random numbers.
    """

    def __init__(self, num_nodes: int, fanouts: Sequence[int], seed: int = 0):
        _check_options(fanouts, seed)
        self.num_nodes, self.fanouts, self.seed = num_nodes, tuple(fanouts), int(seed)
        self._tables = NodeTablePool({NODE: num_nodes})

    @property
    def shared_settings(self) -> dict[str, Any]:
        """Name -> value of each setting that must be equal on all ranks, for ``RankExchange.agree``."""
        options = {"fanouts": self.fanouts, "seeds of the sampler": self.seed}
        return {"samplers": type(self).__name__, "numbers of nodes": self.num_nodes, **options}

    def sample(self, seeds: Tensor, epoch: int = 0) -> SampledNeighborhood:
        """Samples around seed nodes: a function of (seed, epoch, seeds).

        Args:
            seeds: int64, distinct ids.
            epoch: number of the epoch.

        Raises:
            ConfigurationError: a seed is out of range; with ``VanillaSampler``, also if another rank owns it.
        """
        check_node_ids(seeds, self.num_nodes, "seed nodes")
        key = kernels.key_of(numpy.uint64(self.seed % 2**64), numpy.array([epoch]))
        key = int(kernels.key_of(numpy.uint64(key), seeds.numpy()))
        with self._tables.borrow() as tables:
            return self._sample(Numbering(seeds.numpy(), tables[NODE]), key)

    @abstractmethod
    def _sample(self, numbering: Numbering, key: int) -> SampledNeighborhood:
        """The sample of a key around the seeds, which have their numbers."""


class HybridSampler(PartitionedSampler):
    """The whole graph is on this rank: no communication.

    Args:
        indptr: int64, of shape (nodes + 1,): of the whole relabeled graph.
        indices: int64, of shape (edges,).
        fanouts: edges to draw into each node, by hop; -1 takes all.
        seed: of the random numbers.
    """

    def __init__(self, indptr: Tensor, indices: Tensor, fanouts: Sequence[int], seed: int = 0):
        check_graph(indptr, indices)
        super().__init__(len(indptr) - 1, fanouts, seed)
        self._matrix = EdgeMatrix(indptr.numpy(), indices.numpy())
        self._graph = indptr, indices

    @cached_property
    def shared_settings(self) -> dict[str, Any]:
        return super().shared_settings | {"graphs (checksums)": array_checksum(*self._graph)}

    def _sample(self, numbering: Numbering, key: int) -> SampledNeighborhood:
        found = sample({EDGE: self._matrix}, {NODE: numbering}, {EDGE: self.fanouts}, key)[EDGE]
        return _neighborhood(numbering, found.row, found.col, found.by_hop)


class VanillaSampler(PartitionedSampler):
    """This rank has the edges into its own nodes only: each hop but the first takes two rounds.

    All ranks must create and call it together. The seeds must be this rank's own.

    Args:
        indptr: int64, of shape (own nodes + 1,), from ``take_part``.
        indices: int64, of shape (own edges,), with the ids of the whole graph.
        exchange: who owns which node, and the process group.
        fanouts: edges to draw into each node, by hop; -1 takes all.
        seed: of the random numbers.

    Raises:
        ConfigurationError: on every rank, if the edges of one are not those into its own nodes, or the ranks' fanouts
            or seeds differ.
    """

    def __init__(self, indptr: Tensor, indices: Tensor, exchange: RankExchange, fanouts: Sequence[int], seed: int = 0):
        self.exchange = exchange
        self._first, self._end = exchange.bounds
        num_nodes = int(exchange.offsets[-1])

        def check() -> None:
            owned, given = self._end - self._first, len(indptr) - 1
            if given != owned:
                advice = "pass the result of take_part"
                raise ConfigurationError(f"rank {exchange.rank} owns {owned} nodes, but got edges of {given}; {advice}")
            check_graph(indptr, indices, num_nodes)
            _check_options(fanouts, seed)

        exchange.agree({"fanouts": fanouts, "seeds of the sampler": seed}, check)
        super().__init__(num_nodes, fanouts, seed)
        self._matrix = EdgeMatrix(indptr.numpy(), indices.numpy())

    def _sample(self, numbering: Numbering, key: int) -> SampledNeighborhood:
        seeds = numbering.by_hop[0]
        if len(seeds) and (seeds.min() < self._first or seeds.max() >= self._end):
            own = f"{self._first} to {self._end} (exclusive)"
            raise ConfigurationError(f"the seed nodes of rank {self.exchange.rank} must be its own, {own}")
        rows, cols, first = [], [], 0
        for hop, fanout in enumerate(self.fanouts):
            nodes, draw = numbering.by_hop[hop], self._draw if hop else self._draw_own
            sources, counts = draw(nodes, fanout, hop_key(key, hop, 0))
            cols.append(numpy.repeat(numpy.arange(first, first + len(nodes)), counts))
            numbering.number(sources)
            rows.append(sources)
            first += len(nodes)
            numbering.end_hop()
        return _neighborhood(numbering, numpy.concatenate(rows), numpy.concatenate(cols), [len(row) for row in rows])

    def _draw(self, nodes: numpy.ndarray, fanout: int, key: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The sources of the edges drawn into ``nodes`` of any rank (int64 ids), and the number of edges of each."""
        request = self.exchange.request(torch.from_numpy(nodes), numpy.uint64(key).astype(numpy.int64).item())
        answers = [
            self._draw_own(asked.numpy(), fanout, int(other) % 2**64)
            for asked, other in zip(request.ids.split(request.received), request.keys, strict=True)
        ]
        sources, counts = (torch.from_numpy(numpy.concatenate(arrays)) for arrays in zip(*answers, strict=True))
        found_counts, found = self.exchange.respond_ids(request, counts, sources)
        own_sources, own_counts = self._draw_own(nodes[request.own.numpy()], fanout, key)
        return _interleave(
            torch.cat([request.own, request.order]),
            torch.cat([torch.from_numpy(own_counts), found_counts]),
            torch.cat([torch.from_numpy(own_sources), found]),
        )

    def _draw_own(self, nodes: numpy.ndarray, fanout: int, key: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Draws edges into this rank's own nodes; the random stream of a node is that of its id in the whole graph."""
        sources, _, counts = sample_hop(self._matrix, nodes - self._first, fanout, key, streams=nodes)
        return sources, counts


def _neighborhood(
    numbering: Numbering, row: numpy.ndarray, col: numpy.ndarray, edges_by_hop: list[int]
) -> SampledNeighborhood:
    edge_index = torch.from_numpy(numpy.stack([row, col]))
    nodes_by_hop = [len(nodes) for nodes in numbering.by_hop]
    return SampledNeighborhood(torch.from_numpy(numbering.nodes()), edge_index, nodes_by_hop, edges_by_hop)


def _check_options(fanouts: Sequence[int], seed: int) -> None:
    check_fanouts(fanouts, "fanouts")
    check_integer("seed", seed)
    if not fanouts:
        raise ConfigurationError("fanouts must be one number for each hop; got none")


def _interleave(positions: Tensor, counts: Tensor, rows: Tensor) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Brings groups of rows into the order of their positions.

    Args:
        positions: a permutation: group i belongs at ``positions[i]``.
        counts: rows of each group.
        rows: of all groups, one after the other.

    Returns:
        The rows, then the number of rows of each group, both in the order of the positions.
    """
    ordered = torch.empty_like(counts)
    ordered[positions] = counts
    starts = ordered.cumsum(0) - ordered
    shifts = starts[positions] - (counts.cumsum(0) - counts)
    result = torch.empty_like(rows)
    result[torch.arange(len(rows)) + torch.repeat_interleave(shifts, counts)] = rows
    return result.numpy(), ordered.numpy()
