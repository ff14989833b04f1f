"""The neighbor sampler: what is drawn is right, a function of (seed, epoch, batch), and serves PyG's loaders."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.nn import GraphSAGE

from hasten import ConfigurationError
from hasten.graph import NeighborSampler
from helpers.graphs import assert_edges_are_those_of, random_graph, typed_graph


def batches(graph, sampler, **options) -> list:
    return list(NodeLoader(graph, sampler, **{"batch_size": 100, **options}))


def same(first, second) -> bool:
    return all(
        torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index) and torch.equal(a.e_id, b.e_id)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"disjoint": True}, {"weight_attr": "weight"}])
def test_sampler_any_options_draws_edges_of_the_graph_into_each_node(options):
    graph = random_graph()
    for batch in batches(graph, NeighborSampler(graph, [4, 3], seed=1, **options)):
        assert_edges_are_those_of(graph, batch)
        degrees = torch.bincount(graph.edge_index[1], minlength=500)[batch.n_id]
        drawn = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)
        seeds, hop = batch.batch_size, batch.num_sampled_nodes[1]
        assert torch.equal(batch.n_id[:seeds], batch.input_id)
        for nodes, fanout in ((slice(0, seeds), 4), (slice(seeds, seeds + hop), 3)):
            limit = (
                torch.where(degrees[nodes] > 0, fanout, 0) if "replace" in options else degrees[nodes].clamp(max=fanout)
            )
            assert torch.equal(drawn[nodes], limit)
        if "replace" not in options:
            assert len(torch.unique(batch.e_id)) == len(batch.e_id) or "disjoint" in options
        assert sum(batch.num_sampled_nodes) == batch.num_nodes
        assert sum(batch.num_sampled_edges) == batch.num_edges


def test_sampler_without_disjoint_has_each_node_once():
    graph = random_graph()
    for batch in batches(graph, NeighborSampler(graph, [10, 10, 10], seed=1)):
        assert len(torch.unique(batch.n_id)) == batch.num_nodes


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "weight", "replace": True}])
def test_sampler_with_minus_one_draws_all_edges(options):
    graph = random_graph()
    batch = batches(graph, NeighborSampler(graph, [-1], seed=1, **options), batch_size=500)[0]
    assert torch.equal(batch.e_id.sort().values, torch.arange(graph.num_edges))


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"weight_attr": "weight", "replace": True}])
def test_sampler_any_threads_and_workers_returns_the_same_bits(options):
    graph = random_graph(nodes=9_000, edges=50_000)
    loader = {"batch_size": 4_500}
    expected = batches(graph, NeighborSampler(graph, [3, 3], seed=7, num_threads=1, **options), **loader)
    for threads in (2, 4):
        sampler = NeighborSampler(graph, [3, 3], seed=7, num_threads=threads, **options)
        assert same(expected, batches(graph, sampler, **loader))
        assert same(expected, batches(graph, sampler, **loader, num_workers=2))
    assert not same(expected, batches(graph, NeighborSampler(graph, [3, 3], seed=8, **options), **loader))


@pytest.mark.multiprocess
def test_sampler_new_epoch_changes_the_samples_of_workers_that_live_on():
    graph = random_graph()
    sampler = NeighborSampler(graph, [3], seed=1)
    loader = NodeLoader(graph, sampler, batch_size=100, num_workers=1, persistent_workers=True)
    first = list(loader)
    sampler.set_epoch(1)
    second = list(loader)
    sampler.set_epoch(0)
    assert not same(first, second)
    assert same(first, list(loader))


def test_sampler_without_seed_follows_the_seed_of_pytorch():
    graph = random_graph()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(batches(graph, NeighborSampler(graph, [3])))
    assert same(drawn[0], drawn[1])
    assert not same(drawn[0], drawn[2])


def test_sampler_later_samples_of_any_size_leave_a_sample_as_it_is():
    graph = random_graph(nodes=3_000, edges=30_000)
    sampler = NeighborSampler(graph, [5, 5, 5], seed=1)
    first = batches(graph, sampler, batch_size=10, input_nodes=torch.arange(30))
    expected = copy.deepcopy(first)
    large = batches(graph, sampler, batch_size=2_000)
    assert same(first, expected)
    assert same(batches(graph, sampler, batch_size=10, input_nodes=torch.arange(30)), expected)
    assert same(batches(graph, NeighborSampler(graph, [5, 5, 5], seed=1), batch_size=2_000), large)


def test_sampler_after_two_billion_numbers_samples_the_same():
    graph = random_graph()
    sampler = NeighborSampler(graph, [3, 3], seed=1)
    expected = batches(graph, sampler)
    for distance in (5_000, 1_500, 400):  # from the largest start: the five samples end before it, or pass it
        (table,) = sampler._tables[0].values()
        table.start = 2**31 - 1 - distance
        assert same(batches(graph, sampler), expected)
    assert table.start < 5_000


def test_sampler_pickled_samples_the_same():
    graph = random_graph()
    sampler = NeighborSampler(graph, [3, 3], seed=1)
    expected = batches(graph, sampler)
    assert same(expected, batches(graph, pickle.loads(pickle.dumps(sampler))))


def test_sampler_disjoint_keeps_the_trees_of_seeds_apart():
    graph = random_graph()
    batch = batches(graph, NeighborSampler(graph, [3, 3, 3], seed=1, disjoint=True))[0]
    assert torch.equal(*batch.batch[batch.edge_index])
    pairs = batch.batch * graph.num_nodes + batch.n_id
    assert len(torch.unique(pairs)) == batch.num_nodes
    assert len(torch.unique(batch.n_id)) < batch.num_nodes


def test_sampler_induced_returns_all_edges_between_the_nodes():
    graph = random_graph()
    batch = batches(graph, NeighborSampler(graph, [3], seed=1, subgraph_type="induced"))[0]
    inside = torch.isin(graph.edge_index, batch.n_id).all(dim=0)
    assert torch.equal(batch.e_id.sort().values, inside.nonzero().flatten())


def test_sampler_weights_of_zero_are_never_drawn():
    graph = random_graph()
    graph.weight[::2] = 0
    for replace in (False, True):
        sampler = NeighborSampler(graph, [5], seed=1, weight_attr="weight", replace=replace)
        assert all((batch.weight > 0).all() for batch in batches(graph, sampler))


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_sampler_with_times_draws_no_later_node(strategy):
    graph = random_graph()
    for batch in batches(graph, NeighborSampler(graph, [2, 2], seed=1, time_attr="time", temporal_strategy=strategy)):
        assert (batch.time <= batch.time[batch.batch]).all()
        if strategy == "last":
            seed = batch.edge_index[1] == 0
            earlier = graph.time[graph.edge_index[0, graph.edge_index[1] == batch.n_id[0]]]
            earlier = earlier[earlier <= batch.time[0]].sort().values
            assert torch.equal(batch.time[batch.edge_index[0, seed]].sort().values, earlier[-2:])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sampler_typed_graph_draws_edges_of_each_type(direction):
    graph = typed_graph()
    sampler = NeighborSampler(graph, [4, 4], seed=1, sample_direction=direction)
    for batch in NodeLoader(graph, sampler, input_nodes=("user", torch.arange(30)), batch_size=10):
        for kind in graph.edge_types:
            source, target = (batch[kind[0]].n_id, batch[kind[2]].n_id)
            row, col = batch[kind].edge_index
            assert batch[kind].num_edges > 0
            assert torch.equal(torch.stack([source[row], target[col]]), graph[kind].edge_index[:, batch[kind].e_id])


def test_sampler_serves_neighbor_and_link_loaders_and_trimmed_layers():
    graph = random_graph()
    sampler = NeighborSampler(graph, [3, 3], seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = next(iter(NeighborLoader(graph, [3, 3], neighbor_sampler=sampler, batch_size=10)))
    model = GraphSAGE(1, 4, num_layers=2)
    whole = model(batch.x, batch.edge_index)[:10]
    hops = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes, "num_sampled_edges_per_hop": batch.num_sampled_edges}
    trimmed = model(batch.x, batch.edge_index, **hops)[:10]
    torch.testing.assert_close(whole, trimmed)
    links = LinkNeighborLoader(graph, [3, 3], edge_label_index=graph.edge_index[:, :40], neg_sampling_ratio=1.0,
                               neighbor_sampler=sampler, batch_size=20)  # fmt: skip
    for batch in links:
        assert_edges_are_those_of(graph, batch)
        positive = batch.edge_label == 1
        assert torch.equal(batch.n_id[batch.edge_label_index[:, positive]], graph.edge_index[:, batch.input_id])


def test_sampler_empty_batch_duplicate_seeds_self_loops_and_isolated_nodes_are_sampled():
    graph = Data(edge_index=torch.tensor([[0, 0, 1], [0, 1, 1]]), num_nodes=3)
    sampler = NeighborSampler(graph, [2, 2], seed=1)
    batch = batches(graph, sampler, input_nodes=torch.tensor([1, 2, 1]))[0]
    assert batch.n_id.tolist() == [1, 2, 1, 0]
    assert sorted(batch.edge_index.t().tolist()) == [[0, 0], [0, 2], [3, 0], [3, 2], [3, 3]]
    loader = NodeLoader(graph, sampler, batch_size=2)
    empty = loader(torch.empty(0, dtype=torch.int64))
    assert (empty.num_nodes, empty.num_edges) == (0, 0)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"edge_index": torch.rand(2, 8)}, {}, r"edge_index must hold integers (int64), not torch.float32"),
        ({"edge_index": torch.tensor([[0], [600]])}, {}, "edge_index has target 600, but nodes are 0 to 499"),
        ({"edge_index": torch.tensor([[-1], [3]])}, {}, "edge_index has source -1, but nodes are 0 to 499"),
        ({}, {"is_sorted": True}, "edge_index is not sorted by target; leave out is_sorted=True"),
        ({}, {"num_neighbors": [3, -2]}, "the number of neighbors must be -1 (all) or from 0 up, not [3, -2]"),
        ({"weight": torch.full((8_000,), -1.0)}, {"weight_attr": "weight"}, "weights that are negative or not finite"),
        ({}, {"disjoint": True, "subgraph_type": "induced"}, "'induced' cannot be combined with disjoint samples"),
    ],
)
def test_sampler_damaged_graph_or_option_is_refused_with_one_line(change, options, message):
    graph = random_graph()
    graph.update(change)
    with pytest.raises(ConfigurationError, match=re.escape(message)) as refusal:
        NeighborSampler(graph, **{"num_neighbors": [3], **options})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("seed", [-1, 500])
def test_sampler_seed_that_is_no_node_is_refused(seed):
    graph = random_graph()
    with pytest.raises(ConfigurationError, match=f"seed node {seed} does not exist; nodes are 0 to 499"):
        batches(graph, NeighborSampler(graph, [3]), input_nodes=torch.tensor([seed]))


def test_sampler_edge_times_without_seed_times_are_refused():
    graph = random_graph()
    del graph.time
    graph.when = torch.arange(graph.num_edges)
    with pytest.raises(ConfigurationError, match="edges have times, so each seed needs one: pass input_time"):
        batches(graph, NeighborSampler(graph, [3], time_attr="when"))
