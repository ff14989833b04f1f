"""Which neighbors are drawn: chi-squared tests of the sampling kernels against the exact probabilities."""

import itertools

import numpy
import pytest
from scipy import stats

from hasten.graph.sampling.hops import DrawOptions, EdgeMatrix, sample_hop

DRAWS = 200_000
WEIGHTS = numpy.array([1.0, 2.0, 3.0, 4.0, 10.0, 0.5])


def drawn(matrix: EdgeMatrix, fanout: int, options: DrawOptions) -> numpy.ndarray:
    """The neighbors drawn for node 0, (draws, fanout), each draw with a random stream of its own."""
    nodes = numpy.zeros(DRAWS, numpy.int64)
    sources, _, counts = sample_hop(matrix, nodes, fanout, key=3, streams=numpy.arange(DRAWS), options=options)
    assert (counts == fanout).all()
    return sources.reshape(DRAWS, fanout)


def star(degree: int, weights: numpy.ndarray | None = None) -> EdgeMatrix:
    return EdgeMatrix(numpy.array([0, degree]), numpy.arange(degree), weights)


@pytest.mark.parametrize(("degree", "fanout"), [(2, 1), (7, 3), (7, 6), (100, 5), (1_000, 70)])
@pytest.mark.parametrize("replace", [False, True])
def test_sample_hop_uniform_draws_each_neighbor_equally_often(degree, fanout, replace):
    neighbors = drawn(star(degree), fanout, DrawOptions(replace))
    if not replace:
        assert (numpy.diff(numpy.sort(neighbors, axis=1), axis=1) > 0).all()
    counts = numpy.bincount(neighbors.ravel(), minlength=degree)
    expected = DRAWS * fanout / degree
    # Without replacement, counts are negatively correlated: the statistic shrinks by (degree - fanout) / (degree - 1).
    shrink = 1 if replace else (degree - fanout) / (degree - 1)
    statistic = ((counts - expected) ** 2 / expected).sum() / shrink
    assert stats.chi2.sf(statistic, degree - 1) > 0.001


def test_sample_hop_without_replacement_draws_each_pair_equally_often():
    neighbors = numpy.sort(drawn(star(6), 2, DrawOptions()), axis=1)
    pairs = list(itertools.combinations(range(6), 2))
    counts = [int((neighbors == pair).all(axis=1).sum()) for pair in pairs]
    assert stats.chisquare(counts).pvalue > 0.001


def test_sample_hop_weighted_with_replacement_draws_in_proportion_to_the_weights():
    neighbors = drawn(star(6, WEIGHTS), 3, DrawOptions(replace=True))
    counts = numpy.bincount(neighbors.ravel(), minlength=6)
    assert stats.chisquare(counts, counts.sum() * WEIGHTS / WEIGHTS.sum()).pvalue > 0.001


def test_sample_hop_weighted_without_replacement_draws_pairs_as_one_after_the_other():
    neighbors = numpy.sort(drawn(star(6, WEIGHTS), 2, DrawOptions()), axis=1)
    share = WEIGHTS / WEIGHTS.sum()
    pairs = list(itertools.combinations(range(6), 2))
    expected = [share[a] * share[b] / (1 - share[a]) + share[b] * share[a] / (1 - share[b]) for a, b in pairs]
    counts = [int((neighbors == pair).all(axis=1).sum()) for pair in pairs]
    assert stats.chisquare(counts, DRAWS * numpy.array(expected)).pvalue > 0.001


def test_sample_hop_draws_of_neighboring_streams_are_independent():
    neighbors = drawn(star(8), 1, DrawOptions())[:, 0]
    table = numpy.zeros((8, 8))
    numpy.add.at(table, (neighbors[:-1], neighbors[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 0.001
