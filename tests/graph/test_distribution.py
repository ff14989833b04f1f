"""Which neighbors are drawn: chi-squared tests of a million draws against the exact probabilities, for each hop."""

import itertools

import numpy
import pytest
from scipy import stats

from hasten.graph.sampling.hops import DrawOptions, EdgeMatrix, sample, sample_hop
from hasten.graph.sampling.numbering import NodeTable, Numbering

DRAWS = 1_000_000
WEIGHTS = numpy.array([1.0, 2.0, 3.0, 4.0, 10.0, 0.5])
HOPS = 3
EDGE = ("", "", "")


def drawn(matrix: EdgeMatrix, fanout: int, options: DrawOptions) -> numpy.ndarray:
    """The neighbors drawn for node 0, (draws // fanout, fanout), each row with a random stream of its own."""
    rows = DRAWS // fanout
    nodes = numpy.zeros(rows, numpy.int64)
    sources, _, counts = sample_hop(matrix, nodes, fanout, key=3, streams=numpy.arange(rows), options=options)
    assert (counts == fanout).all()
    return sources.reshape(rows, fanout)


def drawn_in_hop(hop: int, degree: int, fanout: int, weights: numpy.ndarray | None, replace: bool) -> numpy.ndarray:
    """As ``drawn``, by a sample of several hops, for the nodes that the hop before found.

    Node n of the hops before has one edge, from node n of the next hop; each of the last has an edge from every one of
    ``degree`` common sources.
    """
    rows = DRAWS // fanout
    chain = numpy.arange(hop * rows + 1)
    indptr = numpy.concatenate([chain, hop * rows + degree * numpy.arange(1, rows + 1), numpy.zeros(degree, int)])
    indptr[(hop + 1) * rows + 1 :] = indptr[(hop + 1) * rows]
    first_source = (hop + 1) * rows
    indices = numpy.concatenate([chain[:-1] + rows, numpy.tile(first_source + numpy.arange(degree), rows)])
    edge_weights = None
    if weights is not None:
        edge_weights = numpy.concatenate([numpy.ones(hop * rows), numpy.tile(weights, rows)])
    matrix = EdgeMatrix(indptr, indices, edge_weights)
    numbering = Numbering(numpy.arange(rows), NodeTable(len(indptr) - 1))
    fanouts = {EDGE: [-1] * hop + [fanout]}
    found = sample({EDGE: matrix}, {"": numbering}, fanouts, key=5, options=DrawOptions(replace))[EDGE]
    sources = numbering.nodes()[found.row[-rows * fanout :]] - first_source
    assert found.by_hop == [rows] * hop + [rows * fanout]
    return sources.reshape(rows, fanout)


def star(degree: int, weights: numpy.ndarray | None = None) -> EdgeMatrix:
    return EdgeMatrix(numpy.array([0, degree]), numpy.arange(degree), weights)


def check_uniform(neighbors: numpy.ndarray, degree: int, replace: bool) -> None:
    """Each of ``degree`` neighbors is drawn equally often."""
    rows, fanout = neighbors.shape
    if not replace:
        assert (numpy.diff(numpy.sort(neighbors, axis=1), axis=1) > 0).all()
    counts = numpy.bincount(neighbors.ravel(), minlength=degree)
    expected = rows * fanout / degree
    # Without replacement, counts are negatively correlated: the statistic shrinks by (degree - fanout) / (degree - 1).
    shrink = 1 if replace else (degree - fanout) / (degree - 1)
    statistic = ((counts - expected) ** 2 / expected).sum() / shrink
    assert stats.chi2.sf(statistic, degree - 1) > 0.001


def check_pairs(neighbors: numpy.ndarray, probabilities: dict[tuple[int, int], float]) -> None:
    """Each pair of two draws without replacement has its probability."""
    low, high = numpy.sort(neighbors, axis=1).T
    codes = numpy.bincount(low * 100 + high, minlength=10_000)
    counts = [codes[a * 100 + b] for a, b in probabilities]
    assert sum(counts) == len(neighbors)
    assert stats.chisquare(counts, len(neighbors) * numpy.array(list(probabilities.values()))).pvalue > 0.001


def check_weighted(neighbors: numpy.ndarray, replace: bool) -> None:
    """Draws in proportion to ``WEIGHTS``; without replacement, pairs as if drawn one after the other."""
    share = WEIGHTS / WEIGHTS.sum()
    if replace:
        counts = numpy.bincount(neighbors.ravel(), minlength=len(WEIGHTS))
        assert stats.chisquare(counts, counts.sum() * share).pvalue > 0.001
        return
    pairs = itertools.combinations(range(len(WEIGHTS)), 2)
    check_pairs(
        neighbors,
        {(a, b): share[a] * share[b] / (1 - share[a]) + share[b] * share[a] / (1 - share[b]) for a, b in pairs},
    )


@pytest.mark.parametrize(("degree", "fanout"), [(2, 1), (7, 3), (7, 6), (100, 5), (1_000, 70)])
@pytest.mark.parametrize("replace", [False, True])
def test_sample_hop_uniform_draws_each_neighbor_equally_often(degree, fanout, replace):
    check_uniform(drawn(star(degree), fanout, DrawOptions(replace)), degree, replace)


@pytest.mark.parametrize("hop", range(HOPS))
@pytest.mark.parametrize("replace", [False, True])
def test_sample_uniform_in_each_hop_draws_each_neighbor_equally_often(hop, replace):
    check_uniform(drawn_in_hop(hop, 7, 3, None, replace), 7, replace)


@pytest.mark.parametrize("hop", range(HOPS))
@pytest.mark.parametrize("replace", [False, True])
def test_sample_weighted_in_each_hop_draws_in_proportion_to_the_weights(hop, replace):
    check_weighted(drawn_in_hop(hop, len(WEIGHTS), 2, WEIGHTS, replace), replace)


def test_sample_hop_without_replacement_draws_each_pair_equally_often():
    check_pairs(drawn(star(6), 2, DrawOptions()), dict.fromkeys(itertools.combinations(range(6), 2), 1 / 15))


def test_sample_hop_draws_of_neighboring_streams_are_independent():
    neighbors = drawn(star(8), 1, DrawOptions())[:, 0]
    table = numpy.zeros((8, 8))
    numpy.add.at(table, (neighbors[:-1], neighbors[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 0.001
