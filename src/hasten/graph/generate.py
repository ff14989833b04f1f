"""Generated graphs with features and labels, for measurements at a scale that no small public graph has.

``rmat`` has the skewed degrees of social networks, ``stochastic_block_model`` has communities that are the labels. Both
are a function of their arguments, and draw edges in chunks to bound their memory. Edges may repeat, as the models have
it; none is a self loop.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from hasten.core.errors import ConfigurationError

CHUNK = 2**20  # edges drawn at a time
QUADRANTS = (0.57, 0.19, 0.19, 0.05)  # of the Graph 500 benchmark
MIN_PROBABILITY = 1e-3  # of a quadrant: nearly all edges would be self loops, which are drawn again
MAX_NODES = 2**31
Ids = NDArray[numpy.int64]


class GeneratedGraph(NamedTuple):
    """A directed graph: ``edge_index`` int64 (2, edges), rows source and target, unsorted; ``x`` float32
    (nodes, width); ``y`` int64 (nodes,), the class of each node.
    """

    edge_index: Ids
    x: NDArray[numpy.float32]
    y: Ids


def rmat(
    num_nodes: int,
    num_edges: int,
    *,
    num_features: int = 64,
    num_classes: int = 16,
    quadrants: tuple[float, float, float, float] = QUADRANTS,
    noise: float = 1.0,
    seed: int = 0,
) -> GeneratedGraph:
    """A graph by R-MAT (Chakrabarti, Zhan and Faloutsos 2004).

    Each edge falls into a quadrant of the adjacency matrix, then into a quadrant of that, until one cell is left. Cells
    outside ``num_nodes`` rows and columns, and self loops, are drawn again. Labels are random: they follow no edge.

    Args:
        num_nodes: any number from 2 on.
        num_edges: edges, each in one direction.
        num_features: width of ``x``.
        num_classes: classes of ``y``.
        quadrants: probabilities of the quadrants (upper left, upper right, lower left, lower right), at least 0.001.
        noise: standard deviation of the features around the mean of their class.
        seed: of all random numbers.

    Raises:
        ConfigurationError: a size is out of range, or the probabilities do not sum to 1.
    """
    _check_sizes(num_nodes, num_edges, num_features, num_classes)
    possible = len(quadrants) == 4 and all(quadrant >= MIN_PROBABILITY for quadrant in quadrants)
    if not possible or not abs(sum(quadrants) - 1) <= 1e-6:
        expected = f"four probabilities of at least {MIN_PROBABILITY:g} that sum to 1"
        raise ConfigurationError(f"quadrants must be {expected}, not {quadrants}")
    rng = numpy.random.default_rng(seed)
    levels = (num_nodes - 1).bit_length()
    upper = quadrants[0] + quadrants[1]
    right = numpy.array([quadrants[1] / upper, quadrants[3] / (1 - upper)], numpy.float32)  # in each half of the rows

    def draw(count: int) -> tuple[Ids, Ids]:
        source, target = numpy.zeros(count, numpy.int64), numpy.zeros(count, numpy.int64)
        for _ in range(levels):
            is_lower = rng.random(count, numpy.float32) >= upper
            is_right = rng.random(count, numpy.float32) < right[is_lower.view(numpy.uint8)]
            source += source + is_lower
            target += target + is_right
        valid = (source < num_nodes) & (target < num_nodes)
        return source[valid], target[valid]

    edges = _draw_edges(draw, num_edges)
    names = rng.permutation(num_nodes)  # else the nodes of high degree would have the lowest numbers
    for row in edges:
        row[:] = names[row]
    labels = rng.integers(0, num_classes, num_nodes)
    return _graph(edges, labels, num_classes, num_features, noise, rng)


def stochastic_block_model(
    num_nodes: int,
    num_edges: int,
    *,
    num_features: int = 64,
    num_classes: int = 16,
    homophily: float = 0.8,
    noise: float = 1.0,
    seed: int = 0,
) -> GeneratedGraph:
    """A graph of communities (Holland, Laskey and Leinhardt 1983), which are the labels.

    The target of an edge is a random node, its source lies in the same community with probability ``homophily`` and in
    a random one, including the same, otherwise. Aggregated neighbors say more of a label than a node's own features.

    Args:
        num_nodes: any number from 2 on; communities have equal sizes, but for one node.
        num_edges: edges, each in one direction.
        num_features: width of ``x``.
        num_classes: number of communities; each needs two nodes.
        homophily: from 0 to 1.
        noise: standard deviation of the features around the mean of their class.
        seed: of all random numbers.

    Raises:
        ConfigurationError: a size or ``homophily`` is out of range.
    """
    _check_sizes(num_nodes, num_edges, num_features, num_classes)
    if not 0 <= homophily <= 1:
        raise ConfigurationError(f"homophily must be a number from 0 to 1, not {homophily}")
    if num_nodes < 2 * num_classes:
        raise ConfigurationError(f"{num_classes} communities require {2 * num_classes} nodes; got {num_nodes}")
    rng = numpy.random.default_rng(seed)
    order = rng.permutation(num_nodes)  # community c: positions starts[c] to starts[c + 1]
    starts = numpy.arange(num_classes + 1) * num_nodes // num_classes
    community = numpy.repeat(numpy.arange(num_classes), numpy.diff(starts))  # of each position
    labels = numpy.empty(num_nodes, numpy.int64)
    labels[order] = community

    def draw(count: int) -> tuple[Ids, Ids]:
        target = rng.integers(0, num_nodes, count)
        source = rng.integers(0, num_nodes, count)
        inside = numpy.flatnonzero(rng.random(count, numpy.float32) < homophily)
        first = starts[community[target[inside]]]
        size = starts[community[target[inside]] + 1] - first
        source[inside] = first + (rng.random(len(inside)) * size).astype(numpy.int64)
        return order[source], order[target]

    edges = _draw_edges(draw, num_edges)
    return _graph(edges, labels, num_classes, num_features, noise, rng)


def _draw_edges(draw: Callable[[int], tuple[Ids, Ids]], num_edges: int) -> Ids:
    """``num_edges`` edges without self loops, from chunks of ``draw(count)``, which may return fewer than ``count``."""
    edges = numpy.empty((2, num_edges), numpy.int64)
    done = 0
    while done < num_edges:
        source, target = draw(min(CHUNK, num_edges - done))
        differ = source != target
        found = int(differ.sum())
        edges[0, done : done + found], edges[1, done : done + found] = source[differ], target[differ]
        done += found
    return edges


def _graph(
    edges: Ids, labels: Ids, num_classes: int, width: int, noise: float, rng: numpy.random.Generator
) -> GeneratedGraph:
    """Adds features around a random mean for each class, with components of standard deviation 1 / sqrt(width)."""
    means = rng.standard_normal((num_classes, width), numpy.float32) / numpy.float32(width**0.5)
    features = rng.standard_normal((len(labels), width), numpy.float32)
    features *= numpy.float32(noise)
    for first in range(0, len(labels), CHUNK):
        features[first : first + CHUNK] += means[labels[first : first + CHUNK]]
    return GeneratedGraph(edges, features, labels)


def _check_sizes(num_nodes: int, num_edges: int, num_features: int, num_classes: int) -> None:
    if not 2 <= num_nodes <= MAX_NODES:
        raise ConfigurationError(f"a generated graph has from 2 to {MAX_NODES} nodes; got num_nodes={num_nodes}")
    sizes = {"num_edges": num_edges, "num_features": num_features, "num_classes": num_classes}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1, not {value}")
