"""Samples the neighborhood of seed nodes in a graph with one or several types of nodes and edges, on NumPy arrays.

``sample`` is the whole algorithm; ``sampler.py`` gives it the interface of PyTorch Geometric.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy
from numpy.typing import NDArray

from hasten.graph.sampling import kernels
from hasten.graph.sampling.numbering import Ids, Numbering
from hasten.graph.threads import run_equal_ranges

EdgeType = tuple[str, str, str]  # (type of the sources, name, type of the targets)


@dataclass(frozen=True)
class EdgeMatrix:
    """The edges of one type in CSC form: those into node n are ``indptr[n]`` to ``indptr[n + 1]`` (exclusive).

    ``indices``: their sources. ``weights``: edges are drawn in proportion to them. ``times``: edges later than the time
    of the seed are not drawn; sorted for each node.
    """

    indptr: Ids
    indices: Ids
    weights: NDArray | None = None
    times: NDArray | None = None


@dataclass(frozen=True)
class DrawOptions:
    """``replace``: draws with replacement. ``latest``: takes the latest edges, not random ones, if they have times."""

    replace: bool = False
    latest: bool = False
    threads: int = 1


@dataclass(frozen=True)
class SampledEdges:
    """Edges of one type: ``row`` and ``col`` number sources and targets; ``edges`` are positions in the matrix."""

    row: Ids
    col: Ids
    edges: Ids
    by_hop: list[int]


DEFAULT = DrawOptions()


def sample(
    matrices: Mapping[EdgeType, EdgeMatrix],
    numberings: Mapping[str, Numbering],
    fanouts: Mapping[EdgeType, Sequence[int]],
    key: int,
    seed_times: NDArray | None = None,
    options: DrawOptions = DEFAULT,
) -> dict[EdgeType, SampledEdges]:
    """Draws ``fanouts[type][hop]`` edges into each node that the hop before found first, for each hop and type of edge.

    Args:
        matrices: the graph, by type of edge; their order is part of the result.
        numberings: by type of node; they hold the seeds, and get the nodes that are found.
        fanouts: edges for each node, by hop; -1 takes all.
        key: a number below 2**64. The sample is a function of the key, the graph and the seeds.
        seed_times: the time of each tree of the numberings, where edges have times.
        options: how edges are drawn.
    """
    hops = max((len(by_hop) for by_hop in fanouts.values()), default=0)
    parts: dict[EdgeType, list[tuple[Ids, Ids, Ids]]] = {kind: [] for kind in matrices}
    for hop in range(hops):
        for position, (kind, matrix) in enumerate(matrices.items()):
            targets = numberings[kind[2]]
            trees = targets.trees(hop)
            limits = seed_times[trees] if matrix.times is not None and seed_times is not None else None
            sources, edges, counts = sample_hop(
                matrix,
                targets.by_hop[hop],
                fanouts[kind][hop],
                hop_key(key, hop, position),
                targets.streams(hop),
                limits,
                options,
            )
            first = sum(len(nodes) for nodes in targets.by_hop[:hop])
            col = numpy.repeat(numpy.arange(first, first + len(counts)), counts)
            row = numberings[kind[0]].add(sources, None if trees is None else numpy.repeat(trees, counts))
            parts[kind].append((row, col, edges))
        for numbering in numberings.values():
            numbering.end_hop()
    return {kind: _joined(by_hop) for kind, by_hop in parts.items()}


def sample_hop(
    matrix: EdgeMatrix,
    nodes: Ids,
    fanout: int,
    key: int,
    streams: Ids | None = None,
    limits: NDArray | None = None,
    options: DrawOptions = DEFAULT,
) -> tuple[Ids, Ids, Ids]:
    """Draws at most ``fanout`` edges into each node; -1 takes all.

    Args:
        matrix: the edges.
        nodes: ids, int64, of shape (N,).
        fanout: edges for each node.
        key: a number below 2**64. What is drawn for a node is a function of the key and its stream alone.
        streams: selects the random stream of each node, int64; by default the id of the node.
        limits: the largest time of an edge, for each node.
        options: how edges are drawn.

    Returns:
        The sources of the edges, their positions in the matrix, and the number of edges of each node.
    """
    threads, replace = options.threads, options.replace and fanout >= 0  # all edges are all, not as many draws
    streams = nodes if streams is None else streams
    first, last, counts = (numpy.empty(len(nodes), numpy.int64) for _ in range(3))
    weights = matrix.weights

    def limit(begin: int, end: int) -> None:
        kernels.edges_of(matrix.indptr, nodes, begin, end, first, last)
        if limits is not None:
            kernels.end_at_times(matrix.times, limits, first, begin, end, last)
            if options.latest and fanout >= 0:
                numpy.maximum(first[begin:end], last[begin:end] - fanout, out=first[begin:end])
        if weights is None:
            kernels.count(first, last, fanout, replace, begin, end, counts)
        else:
            kernels.count_weighted(first, last, weights, fanout, replace, begin, end, counts)

    run_equal_ranges(limit, len(nodes), threads)
    offsets = numpy.zeros(len(nodes) + 1, numpy.int64)
    numpy.cumsum(counts, out=offsets[1:])
    edges, sources = (numpy.empty(offsets[-1], numpy.int64) for _ in range(2))
    drawn = (streams, first, last, replace, numpy.uint64(key))
    if weights is None:
        pick = partial(_call, kernels.pick, (matrix.indices, *drawn), (offsets, edges, sources))
    else:
        pick = partial(_call, kernels.pick_weighted, (matrix.indices, weights, *drawn), (offsets, edges, sources))
    run_equal_ranges(pick, len(nodes), threads)
    return sources, edges, counts


def induce(
    matrices: Mapping[EdgeType, EdgeMatrix], numberings: Mapping[str, Numbering], options: DrawOptions = DEFAULT
) -> dict[EdgeType, SampledEdges]:
    """All edges of the graph between nodes that have a number; there are no hops."""
    found = {}
    for kind, matrix in matrices.items():
        targets = numberings[kind[2]].nodes()
        sources, edges, counts = sample_hop(matrix, targets, -1, 0, options=DrawOptions(threads=options.threads))
        row = numberings[kind[0]].find(sources)
        inside = row >= 0
        col = numpy.repeat(numpy.arange(len(targets)), counts)
        found[kind] = SampledEdges(row[inside], col[inside], edges[inside], [])
    return found


def _call(kernel, inputs: tuple, outputs: tuple, begin: int, end: int) -> None:
    kernel(*inputs, begin, end, *outputs)


def hop_key(key: int, hop: int, position: int) -> int:
    """A key for one hop and type of edge."""
    return int(kernels.key_of(numpy.uint64(key), numpy.array([hop, position])))


def _joined(parts: list[tuple[Ids, Ids, Ids]]) -> SampledEdges:
    if not parts:
        none = numpy.empty(0, numpy.int64)
        return SampledEdges(none, none, none, [])
    row, col, edges = (numpy.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return SampledEdges(row, col, edges, [len(edges) for _, _, edges in parts])
