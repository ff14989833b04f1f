"""The neighbor sampler: what is drawn is right, a function of (seed, epoch, batch), and serves PyG's loaders."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.nn import GraphSAGE

from hasten import ConfigurationError
from hasten.graph import NeighborSampler, threads
from hasten.graph.sampling import checks
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
def test_sampler_any_threads_and_workers_returns_the_same_bits(options, monkeypatch):
    monkeypatch.setattr(threads, "SMALLEST_RANGE", 64)
    graph = random_graph(nodes=9_000, edges=50_000)
    loader = {"batch_size": 4_500}
    expected = batches(graph, NeighborSampler(graph, [3, 3], seed=7, num_threads=1, **options), **loader)
    for num_threads in (2, 4):
        sampler = NeighborSampler(graph, [3, 3], seed=7, num_threads=num_threads, **options)
        assert same(expected, batches(graph, sampler, **loader))
        assert same(expected, batches(graph, sampler, **loader, num_workers=2))
    assert not same(expected, batches(graph, NeighborSampler(graph, [3, 3], seed=8, **options), **loader))


def test_sampler_with_4_threads_samples_in_4_threads(monkeypatch):
    """Each kernel waits until four threads run it, which would never end with fewer."""
    monkeypatch.setattr(threads, "SMALLEST_RANGE", 64)
    meeting = threading.Barrier(4, timeout=20)
    original, seen = threads._run, set()

    def run(kernel, bounds, number) -> None:
        def met(begin: int, end: int) -> None:
            if number == 4:
                meeting.wait()
                seen.add(threading.get_ident())
            kernel(begin, end)

        original(met, bounds, number)

    graph = random_graph(nodes=2_000, edges=20_000)
    expected = batches(graph, NeighborSampler(graph, [3, 3], seed=7, num_threads=1), batch_size=1_000)
    monkeypatch.setattr(threads, "_run", run)
    assert same(expected, batches(graph, NeighborSampler(graph, [3, 3], seed=7, num_threads=4), batch_size=1_000))
    assert len(seen) == 4 and threading.get_ident() not in seen


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
        (table,) = sampler._tables.free[0].values()
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


@pytest.mark.parametrize("options", [{"num_neighbors": [-1]}, {"num_neighbors": [3], "subgraph_type": "induced"}])
def test_sampler_all_edges_include_those_of_weight_zero(options):
    graph = random_graph()
    graph.weight[::2] = 0
    batch = batches(graph, NeighborSampler(graph, seed=1, weight_attr="weight", **options), batch_size=500)[0]
    assert torch.equal(batch.e_id.sort().values, torch.arange(graph.num_edges))


@pytest.mark.parametrize("weight", [5e-324, 1e-320, 1e300])
def test_sampler_weights_of_any_size_draw_edges_of_the_node(weight):
    """A denormal sum, times a number below 1, is rounded up to the sum, which would draw the edge after the last."""
    graph = Data(edge_index=torch.tensor([[0, 1, 2], [0, 0, 0]]), num_nodes=3)
    graph.weight = torch.tensor([weight, 0.0, 0.0], dtype=torch.float64)
    sampler = NeighborSampler(graph, [200], seed=1, weight_attr="weight", replace=True)
    batch = batches(graph, sampler, input_nodes=torch.tensor([0]))[0]
    assert batch.num_edges == 200 and set(batch.e_id.tolist()) == {0}


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


def test_sampler_options_by_position_are_those_of_pytorch_geometric():
    graph = random_graph()
    options = ("directional", False, False, "uniform", None, None, True)
    with pytest.raises(ConfigurationError, match="edge_index is not sorted by target"):
        NeighborSampler(graph, [3], *options)


def test_sampler_backward_takes_edges_that_are_sorted_by_source():
    graph = random_graph()
    graph.edge_index = graph.edge_index[:, graph.edge_index[0].argsort(stable=True)]
    sampler = NeighborSampler(graph, [3], seed=1, is_sorted=True, sample_direction="backward")
    for batch in batches(graph, sampler):
        assert_edges_are_those_of(graph, batch)


@pytest.mark.parametrize("disjoint", [False, True])
def test_sampler_any_order_of_the_types_samples_the_same(disjoint):
    """A graph store lists its types in an order that depends on PYTHONHASHSEED."""
    graph, other = typed_graph(), HeteroData()
    for node_type in reversed(graph.node_types):
        other[node_type].x = graph[node_type].x
    for edge_type in reversed(graph.edge_types):
        other[edge_type].edge_index = graph[edge_type].edge_index
    drawn = [
        NodeLoader(data, NeighborSampler(data, [4, 4], seed=1, disjoint=disjoint), input_nodes="user", batch_size=10)
        for data in (graph, other)
    ]
    for first, second in zip(*drawn, strict=True):
        for node_type in graph.node_types:
            assert torch.equal(first[node_type].n_id, second[node_type].n_id)


def test_sampler_graph_store_samples_as_the_graph_itself():
    graph = typed_graph()
    stored = NeighborSampler((graph, graph), [4, 4], seed=1)
    assert list(stored._matrices()) == sorted(graph.edge_types) and list(stored._sizes()) == ["item", "user"]
    loaders = [
        NodeLoader(data, sampler, input_nodes=("user", torch.arange(30)), batch_size=10)
        for data, sampler in ((graph, NeighborSampler(graph, [4, 4], seed=1)), ((graph, graph), stored))
    ]
    for first, second in zip(*loaders, strict=True):
        assert torch.equal(first["item"].n_id, second["item"].n_id)


def test_sampler_shared_memory_holds_the_edges_once():
    graph = random_graph()
    sampler = NeighborSampler(graph, [3], seed=1, share_memory=True)
    (matrix,) = sampler._matrices().values()
    assert sampler.row.is_shared() and sampler.row.dtype == torch.int32
    assert matrix.indices.ctypes.data == sampler.row.data_ptr()
    received = pickle.loads(pickle.dumps(sampler))
    (matrix,) = received._matrices().values()
    assert matrix.indices.ctypes.data == received.row.data_ptr()


def test_sampler_constructor_that_fails_leaves_the_flags_of_pytorch_geometric():
    before = dict(vars(torch_geometric.typing))
    with pytest.raises(ConfigurationError, match="is not a valid SubgraphType"):
        NeighborSampler(random_graph(), [3], subgraph_type="subtree")
    assert vars(torch_geometric.typing) == before


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


def test_sampler_seeds_of_uint8_are_node_ids_as_for_pytorch_geometric():
    graph = random_graph()
    batch = batches(graph, NeighborSampler(graph, [3]), input_nodes=torch.tensor([1, 0, 1], dtype=torch.uint8))[0]
    assert batch.n_id[:3].tolist() == [1, 0, 1]


def test_sampler_times_of_nodes_are_kept_once_for_each_node():
    graph = random_graph()
    (matrix,) = NeighborSampler(graph, [3], seed=1, time_attr="time")._matrices().values()
    assert matrix.times is None and matrix.node_times.ctypes.data == graph.time.data_ptr()


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_sampler_times_of_nodes_draw_as_the_same_times_of_edges(strategy):
    graph = random_graph()
    options = {"seed": 1, "temporal_strategy": strategy}
    expected = batches(graph, NeighborSampler(graph, [3, 3], time_attr="time", **options))
    times, graph.when = graph.time, graph.time[graph.edge_index[0]]
    del graph.time
    found = batches(graph, NeighborSampler(graph, [3, 3], time_attr="when", **options), input_time=times)
    assert same(expected, found)


def test_sampler_in_another_process_does_not_check_the_graph_again(monkeypatch):
    graph = random_graph()
    sampler = NeighborSampler(graph, [3], seed=1, time_attr="time")
    expected = batches(graph, sampler)
    received = pickle.loads(pickle.dumps(sampler))
    for check in ("check_csc", "check_times"):
        monkeypatch.delattr(checks, check)
    assert same(expected, batches(graph, received))


@pytest.mark.parametrize("attribute", ["weight", "time"])
@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.bfloat16, torch.nn.Parameter])
def test_sampler_weights_and_times_of_any_float_draw_as_in_32_bits(attribute, change):
    graph = random_graph()
    options = {"seed": 1, f"{attribute}_attr": attribute}
    graph[attribute] = graph[attribute].bfloat16().half().float()
    expected = batches(graph, NeighborSampler(graph, [3, 3], **options))
    graph[attribute] = change(graph[attribute])
    assert same(expected, batches(graph, NeighborSampler(graph, [3, 3], **options)))
