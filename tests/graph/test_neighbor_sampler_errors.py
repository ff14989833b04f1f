"""The neighbor sampler refuses damaged graphs, seeds and options with one line that names the fault."""

import re

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from hasten import ConfigurationError
from hasten.graph import NeighborSampler
from hasten.graph.sampling.checks import check_csc
from helpers.graphs import random_graph, typed_graph


def read(graph, sampler, **options) -> None:
    next(iter(NodeLoader(graph, sampler, batch_size=100, **options)))


@pytest.mark.parametrize("attribute", ["time", "when"])
def test_sampler_times_that_do_not_ascend_among_the_edges_of_a_node_are_refused(attribute):
    graph = Data(edge_index=torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 1, 2]]), num_nodes=3)
    order = {"time": torch.tensor([1, 0, 2]), "when": torch.tensor([1, 2, 5, 4, 0])}
    graph[attribute] = order[attribute]
    options = {"time_attr": attribute, "is_sorted": True}
    with pytest.raises(ConfigurationError, match="times that do not ascend among the edges into a node; sort them"):
        NeighborSampler(graph, [2], **options)
    graph[attribute] = {"time": torch.tensor([0, 1, 0]), "when": torch.tensor([1, 2, 4, 5, 0])}[attribute]
    NeighborSampler(graph, [2], **options)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"edge_index": torch.rand(2, 8)}, {}, r"edge_index must hold integers (int64), not torch.float32"),
        (
            {"edge_index": torch.tensor([[0], [600]])},
            {},
            "edge_index has target 600; expected ids of nodes in [0, 500)",
        ),
        ({"edge_index": torch.tensor([[-1], [3]])}, {}, "edge_index has source -1; expected ids of nodes in [0, 500)"),
        ({}, {"is_sorted": True}, "edge_index is not sorted by target; leave out is_sorted=True"),
        ({}, {"is_sorted": True, "sample_direction": "backward"}, "edge_index is not sorted by source; leave out"),
        ({}, {"seed": 1.0}, "seed must be an integer; got 1.0"),
        ({}, {"seed": True}, "seed must be an integer; got True"),
        ({}, {"temporal_strategy": "latest"}, "temporal_strategy must be uniform or last, not 'latest'"),
        ({}, {"num_neighbors": 5}, "num_neighbors must be a list of integers from -1 (all), one for each hop; got 5"),
        ({}, {"sample_direction": "foo"}, "sample_direction must be forward or backward, not 'foo'"),
        *(({}, {"num_threads": n}, f"num_threads must be an integer from 1 up; got {n!r}") for n in (0, 1.5, "a")),
        ({}, {"num_neighbors": [2.5]}, "one for each hop; got [2.5]"),
        ({}, {"num_neighbors": [2**63]}, "one for each hop; got [9223372036854775808]"),
        ({}, {"num_neighbors": {("a", "to", "b"): [2]}}, "but the graph has one type of edges; pass a list"),
        (
            {"weight": [1.0]},
            {"weight_attr": "weight"},
            "weight must be a tensor with a real number for each edge, shape",
        ),
        ({"weight": torch.ones(8_000) * 1j}, {"weight_attr": "weight"}, "got torch.complex64 of shape (8000,)"),
        (
            {"time": torch.ones(500, 2)},
            {"time_attr": "time"},
            "time must be a tensor with a real number for each node or",
        ),
        ({"time": torch.ones(500) * float("nan")}, {"time_attr": "time"}, "has 8000 edges with a time that is NaN"),
        (
            {},
            {"weight_attr": "wieght"},
            "no attribute weight_attr='wieght'; it has edge_index, time, weight",
        ),
        ({}, {"time_attr": "when"}, "the graph has no attribute time_attr='when'; it has edge_index, time, weight, x"),
        ({}, {"weight_attr": "x"}, "a real number for each edge, shape (8000,); got torch.float32 of shape (500, 1)"),
        ({}, {"time_attr": "time", "sample_direction": "backward"}, "not yet supported for backward sampling"),
        (
            {"weight": torch.full((8_000,), 1e307, dtype=torch.float64)},
            {"weight_attr": "weight"},
            "weights with an infinite sum",
        ),
        (
            {},
            {"num_neighbors": [3, -2]},
            "a list of integers from -1 (all), one for each hop; got [3, -2]",
        ),
        (
            {"weight": torch.full((8_000,), -1.0)},
            {"weight_attr": "weight"},
            "8000 weights that are negative or not finite",
        ),
        (
            {"weight": torch.arange(8_000.0).where(torch.arange(8_000) != 7, torch.nan)},
            {"weight_attr": "weight"},
            "weight has 1 weights that are negative or not finite; the first is nan of edge 7; correct them",
        ),
        ({}, {"disjoint": True, "subgraph_type": "induced"}, "'induced' cannot be combined with disjoint samples"),
    ],
)
def test_sampler_damaged_graph_or_option_is_refused_with_one_line(change, options, message):
    graph = random_graph()
    graph.update(change)
    with pytest.raises(ConfigurationError, match=re.escape(message)) as refusal:
        NeighborSampler(graph, **{"num_neighbors": [3], **options})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("num_neighbors", "message"),
    [
        (4, "num_neighbors must be a list of integers"),
        ({("user", "bought", "item"): [4]}, "num_neighbors: Missing number of neighbors for edge type"),
        ({("user", "sold", "item"): [4]}, "num_neighbors: Not all edge types specified"),
        ({("user", "bought", "item"): [4], ("item", "bought_by", "user"): [4, "3"]}, "got [4, '3']"),
        ({("user", "bought", "item"): [2**63], ("item", "bought_by", "user"): [4]}, "got [9223372036854775808]"),
    ],
)
def test_sampler_typed_numbers_of_neighbors_that_do_not_fit_are_refused(num_neighbors, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        NeighborSampler(typed_graph(), num_neighbors)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sampler_typed_graph_of_unknown_size_is_refused():
    graph = typed_graph()
    del graph["item"].x
    with pytest.raises(ConfigurationError, match=r"of type 'item' is unknown; set data\['item'\].num_nodes"):
        NeighborSampler(graph, [3])


@pytest.mark.parametrize(
    ("indptr", "indices"), [([0, 1], [0]), ([0, 1, 1, 1], [0]), ([0, 1, 1], [2]), ([[0, 1, 1]], [0]), ([0, 2, 1], [0])]
)
def test_check_csc_matrix_of_another_size_is_refused(indptr, indices):
    with pytest.raises(ConfigurationError, match="the graph: ind"):
        check_csc("the graph", torch.tensor(indptr), torch.tensor(indices), num_targets=2, num_sources=2)
    check_csc("the graph", torch.tensor([0, 1, 1]), torch.tensor([1]), num_targets=2, num_sources=2)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([-1], "seed node -1 does not exist; expected ids of nodes in [0, 500)"),
        ([500], "seed node 500 does not exist"),
        ([1.0], "seed nodes must be integers of one dimension; got torch.float32 of shape (1,)"),
        ([[1, 2]], "seed nodes must be integers of one dimension; got torch.int64 of shape (1, 2)"),
    ],
)
def test_sampler_seeds_that_are_no_nodes_are_refused(seeds, message):
    graph = random_graph()
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        read(graph, NeighborSampler(graph, [3]), input_nodes=torch.tensor(seeds))


@pytest.mark.parametrize("epoch", [-1, 1.5, "a", None, 2**64])
def test_sampler_epoch_that_is_no_number_is_refused(epoch):
    with pytest.raises(ConfigurationError, match="epoch must be an integer from 0 to 9223372036854775807; got"):
        NeighborSampler(random_graph(), [3]).set_epoch(epoch)


def test_sampler_edge_times_without_seed_times_are_refused():
    graph = random_graph()
    del graph.time
    graph.when = torch.arange(graph.num_edges)
    with pytest.raises(ConfigurationError, match="edges have times, so each seed needs one: pass input_time"):
        read(graph, NeighborSampler(graph, [3], time_attr="when"))


def test_sampler_seeds_of_a_type_without_times_are_refused():
    graph = typed_graph()
    graph["user"].time = torch.arange(100)
    loader = NodeLoader(graph, NeighborSampler(graph, [3], time_attr="time"), input_nodes=("item", torch.arange(5)))
    with pytest.raises(ConfigurationError, match="edges have times, so each seed needs one: pass input_time"):
        next(iter(loader))


def test_sampler_seeds_of_an_unknown_type_are_refused():
    graph = typed_graph()
    loader = NodeLoader(graph, NeighborSampler(graph, [3]), input_nodes=("usr", torch.arange(5)))
    with pytest.raises(ConfigurationError, match="the graph has no nodes of type 'usr'; it has item, user"):
        next(iter(loader))
