"""Samples the neighborhood of seed nodes in a graph with one or several types of nodes and edges, on NumPy arrays.

``sample`` is the whole algorithm; ``sampler.py`` gives it the interface of PyTorch Geometric.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from hasten.graph.sampling import kernels
from hasten.graph.sampling.numbering import Ids, Numbering
from hasten.graph.threads import run_equal_ranges

EdgeType = tuple[str, str, str]  # (type of the sources, name, type of the targets)


@dataclass(frozen=True)
class EdgeMatrix:
    """The edges of one type in CSC form: those into node n are ``indptr[n]`` to ``indptr[n + 1]`` (exclusive).

    Attributes:
        indptr: int64, of shape (targets + 1,).
        indices: source of each edge, int32 or int64, of shape (edges,).
        weights: of each edge; a fanout from 0 up draws edges with probabilities proportional to them, so none of weight
            0, and a fanout of -1 takes all. None: all edges are equally likely.
        times: of each edge, ascending among the edges into a node; edges later than the time of the seed are not drawn.
        node_times: of each source node, in place of ``times``: the time of a source is that of its edges.
    """

    indptr: Ids
    indices: NDArray
    weights: NDArray | None = None
    times: NDArray | None = None
    node_times: NDArray | None = None

    @property
    def has_times(self) -> bool:
        return self.times is not None or self.node_times is not None


@dataclass(frozen=True)
class DrawOptions:
    """How edges are drawn: ``replace``: with replacement; ``latest``: the latest, not random ones, if edges have times;
    ``threads``: the largest number of threads that draw.
    """

    replace: bool = False
    latest: bool = False
    threads: int = 1


@dataclass(frozen=True)
class SampledEdges:
    """Sampled edges of one type, in three int64 arrays of shape (edges,).

    ``row``, ``col``: source and target of each edge, as numbers of nodes in the sample. ``edges``: positions in the
    ``EdgeMatrix``. ``by_hop``: number of edges of each hop; empty for an induced subgraph.
    """

    row: Ids
    col: Ids
    edges: Ids
    by_hop: list[int]


class EdgeBuffer:
    """Collects the sampled edges of one type, hop by hop.

    ``capacity``: expected number of edges; a sample with more edges copies them to a larger array.
    """

    def __init__(self, capacity: int = 0):
        self._arrays = numpy.empty((3, capacity), numpy.int64)  # in one piece: large enough for huge pages
        self._by_hop: list[int] = []

    def add_hop(self, edges: int) -> tuple[Ids, Ids, Ids]:
        """Adds a hop of ``edges`` edges; returns views for the caller to fill: sources, targets, positions."""
        first = sum(self._by_hop)
        if first + edges > self._arrays.shape[1]:
            larger = numpy.empty((3, max(first + edges, 2 * self._arrays.shape[1])), numpy.int64)
            larger[:, :first] = self._arrays[:, :first]
            self._arrays = larger
        self._by_hop.append(edges)
        row, col, positions = self._arrays[:, first : first + edges]
        return row, col, positions

    def sampled(self) -> SampledEdges:
        """All edges so far."""
        row, col, positions = self._arrays[:, : sum(self._by_hop)]
        return SampledEdges(row, col, positions, self._by_hop)


DEFAULT = DrawOptions()


def sample(
    matrices: Mapping[EdgeType, EdgeMatrix],
    numberings: Mapping[str, Numbering],
    fanouts: Mapping[EdgeType, Sequence[int]],
    key: int,
    seed_times: NDArray | None = None,
    options: DrawOptions = DEFAULT,
    expected: Mapping[EdgeType, int] | None = None,
) -> dict[EdgeType, SampledEdges]:
    """Draws up to ``fanouts[type][hop]`` edges into each node that the hop before found first, by hop and type of edge.

    Args:
        matrices: the graph, by type of edge; the order of the types changes the result.
        numberings: by type of node; they hold the seeds, and get the nodes that are found.
        fanouts: edges for each node, by hop; -1 takes all.
        key: a number below 2**64, from which all random numbers of the sample follow.
        seed_times: the time of each seed, where edges have times.
        options: how edges are drawn.
        expected: about how many edges will be sampled, by type; it changes the memory and time, not the sample.

    Returns:
        The sampled edges by type of edge.
    """
    hops = max((len(by_hop) for by_hop in fanouts.values()), default=0)
    buffers = {edge_type: EdgeBuffer((expected or {}).get(edge_type, 0)) for edge_type in matrices}
    for hop in range(hops):
        for position, (edge_type, matrix) in enumerate(matrices.items()):
            targets = numberings[edge_type[2]]
            batch = targets.batch_of_hop(hop)
            limits = seed_times[batch] if matrix.has_times and seed_times is not None else None
            draws = _limit(matrix, targets.by_hop[hop], fanouts[edge_type][hop], limits, options)
            sources, col, edges = buffers[edge_type].add_hop(draws.total)
            base = sum(len(nodes) for nodes in targets.by_hop[:hop])
            _draw(matrix, draws, targets.streams(hop), hop_key(key, hop, position), options.threads, sources, edges)
            draws.run(options.threads, kernels.repeat_positions, (draws.offsets, base), (col,))
            numberings[edge_type[0]].number(sources, None if batch is None else batch[col - base])
        for numbering in numberings.values():
            numbering.end_hop()
    return {edge_type: buffer.sampled() for edge_type, buffer in buffers.items()}


def sample_hop(
    matrix: EdgeMatrix,
    nodes: Ids,
    fanout: int,
    key: int,
    streams: Ids | None = None,
    options: DrawOptions = DEFAULT,
) -> tuple[Ids, Ids, Ids]:
    """Draws at most ``fanout`` edges into each node; -1 takes all.

    Args:
        matrix: the edges.
        nodes: ids, int64, of shape (N,).
        fanout: edges for each node.
        key: a number below 2**64. What is drawn for a node is a function of the key and its stream alone.
        streams: selects the random stream of each node, int64; by default the id of the node.
        options: how edges are drawn.

    Returns:
        int64: the sources of the edges, their positions in the matrix, and the number of edges of each node.
    """
    draws = _limit(matrix, nodes, fanout, None, options)
    sources, edges = (numpy.empty(draws.total, numpy.int64) for _ in range(2))
    _draw(matrix, draws, nodes if streams is None else streams, key, options.threads, sources, edges)
    return sources, edges, numpy.diff(draws.offsets)


@dataclass(frozen=True)
class _Draws:
    """``offsets[i + 1] - offsets[i]`` edges are drawn from those from ``first[i]`` to ``last[i]`` (exclusive)."""

    first: Ids
    last: Ids
    offsets: Ids
    replace: bool
    is_weighted: bool

    @property
    def total(self) -> int:
        return int(self.offsets[-1])

    def run(self, threads: int, kernel: Callable, inputs: tuple, outputs: tuple) -> None:
        """Calls a kernel for all nodes, in threads."""
        run_equal_ranges(lambda begin, end: kernel(*inputs, begin, end, *outputs), len(self.first), threads)


def _limit(matrix: EdgeMatrix, nodes: Ids, fanout: int, limits: NDArray | None, options: DrawOptions) -> _Draws:
    """The edges that may be drawn into each node, up to time ``limits[i]`` if given, and how many are drawn."""
    replace = options.replace and fanout >= 0  # all edges are all, not as many draws
    first, last = (numpy.empty(len(nodes), numpy.int64) for _ in range(2))
    offsets = numpy.zeros(len(nodes) + 1, numpy.int64)
    counts, weights = offsets[1:], matrix.weights
    times, sources = (matrix.times, None) if matrix.node_times is None else (matrix.node_times, matrix.indices)

    def limit(begin: int, end: int) -> None:
        kernels.edges_of(matrix.indptr, nodes, begin, end, first, last)
        if limits is not None:
            kernels.end_at_times(times, sources, limits, first, begin, end, last)
            if options.latest and fanout >= 0:
                numpy.maximum(first[begin:end], last[begin:end] - fanout, out=first[begin:end])
        if weights is None or fanout < 0:
            kernels.count(first, last, fanout, replace, begin, end, counts)
        else:
            kernels.count_weighted(first, last, weights, fanout, replace, begin, end, counts)

    run_equal_ranges(limit, len(nodes), options.threads)
    numpy.cumsum(counts, out=counts)
    return _Draws(first, last, offsets, replace, weights is not None and fanout >= 0)


def _draw(matrix: EdgeMatrix, draws: _Draws, streams: Ids, key: int, threads: int, sources: Ids, edges: Ids) -> None:
    """Draws the edges; writes their sources to ``sources`` and their positions in the matrix to ``edges``."""
    pick, weights = (kernels.pick_weighted, (matrix.weights,)) if draws.is_weighted else (kernels.pick, ())
    inputs = (matrix.indices, *weights, streams, draws.first, draws.last, draws.replace, numpy.uint64(key))
    draws.run(threads, pick, inputs, (draws.offsets, edges, sources))


def induce(
    matrices: Mapping[EdgeType, EdgeMatrix], numberings: Mapping[str, Numbering], options: DrawOptions = DEFAULT
) -> dict[EdgeType, SampledEdges]:
    """By type of edge, all edges of the graph whose source and target both have a number; ``by_hop`` is empty."""
    found = {}
    for edge_type, matrix in matrices.items():
        targets = numberings[edge_type[2]].nodes()
        sources, edges, counts = sample_hop(matrix, targets, -1, 0, options=DrawOptions(threads=options.threads))
        row = numberings[edge_type[0]].find(sources)
        inside = row >= 0
        col = numpy.repeat(numpy.arange(len(targets)), counts)
        found[edge_type] = SampledEdges(row[inside], col[inside], edges[inside], [])
    return found


def hop_key(key: int, hop: int, position: int) -> int:
    """A key for one hop and type of edge."""
    return int(kernels.key_of(numpy.uint64(key), numpy.array([hop, position])))
