"""Generated graphs: sizes, degrees, communities, features, seeds and refused arguments."""

import numpy
import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("numba")

from hasten import ConfigurationError
from hasten.graph import generate
from hasten.graph.generate import rmat, stochastic_block_model

MODELS = [rmat, stochastic_block_model]


@pytest.mark.parametrize("model", MODELS)
def test_generated_graph_has_the_requested_sizes_and_no_self_loops(model):
    edges, x, y = model(1000, 20_000, num_features=8, num_classes=5)
    assert edges.shape == (2, 20_000) and edges.min() >= 0 and edges.max() < 1000 and (edges[0] != edges[1]).all()
    assert (edges.dtype, x.dtype, y.dtype) == (numpy.int64, numpy.float32, numpy.int64)
    assert x.shape == (1000, 8) and y.shape == (1000,) and set(y) == set(range(5))


@pytest.mark.parametrize("model", MODELS)
def test_generated_graph_is_a_function_of_its_seed(model):
    first, again, other = (model(300, 2000, seed=seed) for seed in (1, 1, 2))
    assert all(map(numpy.array_equal, first, again))
    assert not any(map(numpy.array_equal, first, other))


def test_rmat_degrees_are_skewed_and_those_of_random_edges_are_not():
    degrees = numpy.bincount(rmat(4096, 100_000).edge_index[1], minlength=4096)
    uniform = numpy.bincount(rmat(4096, 100_000, quadrants=(0.25,) * 4).edge_index[1], minlength=4096)
    assert degrees.max() > 20 * degrees.mean() and uniform.max() < 3 * uniform.mean()
    assert degrees.argmax() != 0  # nodes are numbered at random


def test_rmat_edges_fall_into_quadrants_with_their_probabilities(monkeypatch):
    monkeypatch.setattr(generate, "_draw_edges", lambda draw, count: numpy.stack(draw(count)))  # with self loops
    quadrants, count, nodes = (0.4, 0.3, 0.2, 0.1), 200_000, 2
    source, target = rmat(nodes, count, quadrants=quadrants).edge_index
    shares = numpy.bincount(2 * source + target, minlength=4) / count
    # the two nodes may be named in either order
    assert min(abs(shares - quadrants).max(), abs(shares[::-1] - quadrants).max()) < 0.005


@pytest.mark.parametrize("homophily", [0.0, 0.5, 1.0])
def test_stochastic_block_model_has_the_requested_homophily(homophily):
    edges, _, labels = stochastic_block_model(4000, 100_000, num_classes=10, homophily=homophily)
    inside = (labels[edges[0]] == labels[edges[1]]).mean()
    assert inside == pytest.approx(homophily + (1 - homophily) / 10, abs=0.01)
    assert numpy.bincount(labels).tolist() == [400] * 10


def test_features_lie_around_the_mean_of_their_class():
    _, x, labels = stochastic_block_model(20_000, 10, num_features=16, num_classes=4, noise=0.5)
    means = numpy.stack([x[labels == label].mean(axis=0) for label in range(4)])
    assert x[labels == 0].std(axis=0) == pytest.approx(0.5, abs=0.03)
    assert min(numpy.linalg.norm(means[0] - means[other]) for other in (1, 2, 3)) > 0.3


def test_more_edges_than_a_chunk_are_drawn_completely(monkeypatch):
    monkeypatch.setattr(generate, "CHUNK", 100)
    edges = rmat(50, 1234).edge_index
    assert edges.shape == (2, 1234) and len(numpy.unique(edges, axis=1).T) > 300


@pytest.mark.parametrize(
    ("model", "changed", "message"),
    [
        (rmat, {"num_nodes": 1}, "from 2 to .* nodes; got num_nodes=1"),
        (rmat, {"num_edges": 0}, "num_edges must be at least 1, not 0"),
        (rmat, {"quadrants": (0.5, 0.5, 0.5, 0.5)}, "sum to 1"),
        (rmat, {"quadrants": (1 - 3e-9, 1e-9, 1e-9, 1e-9)}, "at least 0.001"),  # self loops only, drawn again forever
        (rmat, {"quadrants": (float("nan"),) * 4}, "at least 0.001"),
        (stochastic_block_model, {"homophily": 1.5}, "homophily must be a number from 0 to 1, not 1.5"),
        (stochastic_block_model, {"num_classes": 60}, "60 communities require 120 nodes; got 100"),
    ],
)
def test_impossible_graph_is_refused(model, changed, message):
    with pytest.raises(ConfigurationError, match=message):
        model(**{"num_nodes": 100, "num_edges": 10, **changed})
