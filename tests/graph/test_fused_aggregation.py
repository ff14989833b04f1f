"""Aggregation of dense features by one kernel, against dense products and PyTorch Geometric, in float64."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch.nn.utils import parametrizations, prune
from torch_geometric import EdgeIndex
from torch_geometric.nn import GAT, GCN, GCNConv, GINConv, GraphSAGE, MaxAggregation, SAGEConv

from hasten import ConfigurationError
from hasten.graph import Adjacency, aggregate, apply_maxk, fuse_aggregation
from hasten.graph.aggregation import fused_layers
from hasten.graph.aggregation.fused_layers import FUSED
from helpers.thread_counts import with_threads

SOURCES, TARGETS, EDGES = 50, 40, 600


def edges(targets: int = TARGETS) -> torch.Tensor:
    """Random edges with repetitions; the last three targets are isolated."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randint(bound, (EDGES,), generator=generator) for bound in (SOURCES, targets - 3)])


def gin(inputs: int, outputs: int) -> GINConv:
    return GINConv(torch.nn.Sequential(torch.nn.Linear(inputs, outputs), torch.nn.ReLU()), train_eps=True)


LAYERS = {
    "sage_mean": SAGEConv,
    "sage_sum": lambda inputs, outputs: SAGEConv(inputs, outputs, aggr="sum", normalize=True),
    "sage_without_root_and_bias": lambda inputs, outputs: SAGEConv(inputs, outputs, root_weight=False, bias=False),
    "gcn": GCNConv,
    "gcn_improved": lambda inputs, outputs: GCNConv(inputs, outputs, improved=True),
    "gcn_without_self_loops": lambda inputs, outputs: GCNConv(inputs, outputs, add_self_loops=False),
    "gcn_unnormalized": lambda inputs, outputs: GCNConv(inputs, outputs, normalize=False, bias=False),
    "gin": gin,
}


def assert_same(model, reference, x, *args, **kwargs):
    """The same output and the same gradients to the features and to the weights."""
    results = []
    for module in (model, reference):
        leaf = x.detach().clone().requires_grad_()
        out = module(leaf, *args, **kwargs)
        out.square().sum().backward()
        results.append([out, leaf.grad, *(parameter.grad for parameter in module.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 7, 128])
def test_aggregation_equals_the_dense_product(width, weighted, reduce):
    generator, edge_index = torch.Generator().manual_seed(2), edges()
    weights = torch.rand(EDGES, generator=generator, dtype=torch.float64) if weighted else None
    adjacency = Adjacency.from_edge_index(edge_index, SOURCES, TARGETS, weights)
    matrix = torch.zeros(TARGETS, SOURCES, dtype=torch.float64)
    values = torch.ones(EDGES, dtype=torch.float64) if weights is None else weights
    matrix.index_put_((edge_index[1], edge_index[0]), values, accumulate=True)
    if reduce == "mean":
        matrix /= torch.bincount(edge_index[1], minlength=TARGETS).clamp(min=1)[:, None]
    x = torch.randn(SOURCES, width, generator=generator, dtype=torch.float64, requires_grad=True)
    out = aggregate(adjacency, x, reduce)
    gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(gradient)
    torch.testing.assert_close(out, matrix @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, matrix.T @ gradient, rtol=1e-12, atol=1e-12)
    assert not out[-3:].any()


def test_aggregation_has_the_same_bits_for_any_number_of_threads():
    nodes, generator = 3000, torch.Generator().manual_seed(3)
    adjacency = Adjacency.from_edge_index(torch.randint(nodes, (2, 150_000), generator=generator), nodes, nodes)
    x, gradient = torch.randn(2, nodes, 64, generator=generator)

    def compute() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = aggregate(adjacency, leaf, "mean")
        out.backward(gradient)
        return [out.detach(), leaf.grad]

    results = with_threads(compute)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("degree", [1, 30, 100])
def test_edges_in_the_order_of_their_targets_give_the_same_matrix(degree):
    """Short rows are sorted each by itself; the positions that the edges had show in their weights."""
    targets = torch.arange(TARGETS).repeat_interleave(degree)[: -(degree // 2) or None]
    generator = torch.Generator().manual_seed(4)
    sorted_edges = torch.stack([torch.randint(SOURCES, targets.shape, generator=generator), targets])
    weights, mixed = torch.rand(len(targets), generator=generator), torch.randperm(len(targets), generator=generator)
    one = Adjacency.from_edge_index(sorted_edges, SOURCES, TARGETS, weights)
    other = Adjacency.from_edge_index(sorted_edges[:, mixed], SOURCES, TARGETS, weights[mixed])
    assert torch.equal(one.indptr, other.indptr) and torch.equal(one.indices, other.indices)
    Adjacency(one.indptr, one.indices, SOURCES, one.weights)  # passes the check of its invariants
    matrices = [torch.zeros(TARGETS, SOURCES), torch.zeros(TARGETS, SOURCES)]
    for matrix, adjacency in zip(matrices, (one, other), strict=True):
        rows = torch.arange(TARGETS).repeat_interleave(adjacency.indptr.diff())
        matrix.index_put_((rows, adjacency.indices.long()), adjacency.weights, accumulate=True)
    torch.testing.assert_close(*matrices)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_aggregation_can_be_differentiated_twice(reduce):
    weights = torch.rand(80, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    adjacency = Adjacency.from_edge_index(edges()[:, :80], SOURCES, TARGETS, weights)
    x = torch.randn(SOURCES, 3, dtype=torch.float64, requires_grad=True)
    function = lambda x: aggregate(adjacency, x, reduce).square()  # noqa: E731
    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)


def test_mean_of_equal_values_is_that_value():
    adjacency = Adjacency.from_edge_index(torch.tensor([[0] * 49, [0] * 49]), 1, 1)
    assert aggregate(adjacency, torch.ones(1, 3), "mean").tolist() == [[1.0] * 3]


@pytest.mark.parametrize("shape", [(SOURCES - 1, 9), (SOURCES,), (SOURCES, 3, 3)])
def test_features_of_another_shape_are_refused(shape):
    adjacency = Adjacency.from_edge_index(edges(), SOURCES, TARGETS)
    with pytest.raises(ConfigurationError, match=r"features of shape \(.*\) for 50 sources; expected a row for each"):
        aggregate(adjacency, torch.zeros(shape))
    with pytest.raises(ConfigurationError, match=r"cannot aggregate values of type torch\.int64"):
        aggregate(adjacency, torch.zeros(SOURCES, 2, dtype=torch.int64))


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("outputs", [6, 40], ids=["narrowing", "widening"])
def test_fused_layer_equals_the_layer(make, outputs):
    torch.manual_seed(0)
    reference = LAYERS[make](20, outputs).double()
    layer, calls = copy.deepcopy(reference), Counter()
    assert fuse_aggregation(layer, calls) == [""]
    x = torch.randn(SOURCES, 20, dtype=torch.float64)
    assert_same(layer, reference, x, edges(SOURCES))
    torch.testing.assert_close(layer(x, edges(SOURCES)), reference(x, edges(SOURCES)), rtol=1e-10, atol=1e-10)
    assert calls == {FUSED: 2}
    assert layer.state_dict().keys() == reference.state_dict().keys()


@pytest.mark.parametrize(
    ("normalize", "weights"),
    [
        (True, torch.rand(EDGES, dtype=torch.float64)),
        (False, torch.rand(EDGES, 1, dtype=torch.float64)),
        (False, torch.arange(EDGES) % 3),
    ],
)
def test_fused_gcn_uses_edge_weights(normalize, weights):
    torch.manual_seed(0)
    reference = GCNConv(20, 6, normalize=normalize).double()
    layer, calls = copy.deepcopy(reference), Counter()
    fuse_aggregation(layer, calls)
    assert_same(layer, reference, torch.randn(SOURCES, 20, dtype=torch.float64), edges(SOURCES), edge_weight=weights)
    assert calls == {FUSED: 1}


def test_fused_layer_aggregates_a_bipartite_block():
    torch.manual_seed(0)
    reference = SAGEConv((20, 8), 5).double()
    layer = copy.deepcopy(reference)
    fuse_aggregation(layer)
    x, target = (torch.randn(*shape, dtype=torch.float64) for shape in ((SOURCES, 20), (TARGETS, 8)))
    torch.testing.assert_close(layer((x, target), edges()), reference((x, target), edges()), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        layer((x, None), edges(), size=(SOURCES, TARGETS)),
        reference((x, None), edges(), size=(SOURCES, TARGETS)),
        rtol=1e-10,
        atol=1e-10,
    )


def test_fused_layer_takes_the_number_of_its_inputs_from_the_first_batch():
    layer, calls = SAGEConv(-1, 5), Counter()
    fuse_aggregation(layer, calls)
    assert layer(torch.randn(SOURCES, 20), edges(SOURCES)).shape == (SOURCES, 5)
    assert layer.lin_l.weight.shape == (5, 20) and calls == {FUSED: 1}


@pytest.mark.parametrize(
    ("make", "dtype", "sparse", "why"),
    [
        (lambda: SAGEConv(20, 5, aggr="max"), torch.float32, False, "the aggregation is max, neither a sum nor a mean"),
        (lambda: SAGEConv(20, 5, project=True), torch.float32, False, "project=True"),
        (lambda: SAGEConv(20, 5).bfloat16(), torch.bfloat16, False, "the features are bfloat16"),
        (lambda: SAGEConv(20, 5), torch.float32, True, "the graph is not a tensor of shape (2, edges)"),
    ],
)
def test_layer_without_a_kernel_computes_as_before(make, dtype, sparse, why):
    reference = make()
    layer, calls = copy.deepcopy(reference), Counter()
    fuse_aggregation(layer, calls)
    x = torch.randn(SOURCES, 20, dtype=dtype)
    graph = EdgeIndex(edges(SOURCES), sparse_size=(SOURCES, SOURCES)) if sparse else edges(SOURCES)
    assert torch.equal(layer(x, graph), reference(x, graph))
    ((reason, count),) = calls.items()
    assert why in reason and count == 1


@pytest.mark.parametrize("layer", [SAGEConv, GCNConv])
def test_features_are_multiplied_first_where_that_makes_them_narrower(layer, monkeypatch):
    widths, original = [], fused_layers.aggregate

    def noted(adjacency, x, reduce):
        widths.append(x.shape[1])
        return original(adjacency, x, reduce)

    monkeypatch.setattr(fused_layers, "aggregate", noted)
    x = torch.randn(SOURCES, 20)
    for outputs, needs_gradient in ((6, False), (12, False), (12, True), (40, True)):
        fused = layer(20, outputs)
        fuse_aggregation(fused)
        fused(x.clone().requires_grad_(needs_gradient), edges(SOURCES))
    assert widths == [6, 20, 12, 20]


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, prune.identity])
def test_linear_map_with_hooks_or_parametrizations_is_called(norm):
    layer, reference = SAGEConv(20, 6).double(), SAGEConv(20, 6).double()
    layer.load_state_dict(reference.state_dict())
    for each in (layer, reference):
        norm(each.lin_l, "weight")
    fuse_aggregation(layer)
    for _ in range(2):  # weights that were computed from a graph of autograd that is gone would raise here
        assert_same(layer, reference, torch.randn(SOURCES, 20, dtype=torch.float64), edges(SOURCES))


def test_hooks_on_messages_leave_a_layer_to_pytorch_geometric():
    reference = SAGEConv(20, 6)
    reference.register_message_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    reference.fuse = False  # else PyTorch Geometric itself computes no messages for sparse matrices
    layer, calls = copy.deepcopy(reference), Counter()
    fuse_aggregation(layer, calls)
    x = torch.randn(SOURCES, 20)
    assert torch.equal(layer(x, edges(SOURCES)), reference(x, edges(SOURCES)))
    assert list(calls) == ["the layer has hooks on its messages"]


def test_cached_gcn_uses_the_graph_of_its_first_call():
    torch.manual_seed(0)
    reference = GCNConv(20, 6, cached=True).double()
    layer = copy.deepcopy(reference)
    fuse_aggregation(layer)
    x = torch.randn(SOURCES, 20, dtype=torch.float64)
    for graph in (edges(SOURCES), edges(SOURCES)[:, :50], edges(SOURCES)[:, 50:]):
        torch.testing.assert_close(layer(x, graph), reference(x, graph), rtol=1e-10, atol=1e-10)


def test_edge_weights_wider_than_the_features_leave_the_layer_to_pytorch_geometric():
    reference = GCNConv(20, 6)
    layer, calls = copy.deepcopy(reference), Counter()
    fuse_aggregation(layer, calls)
    x, weights = torch.randn(SOURCES, 20), torch.rand(EDGES, dtype=torch.float64)
    out, expected = layer(x, edges(SOURCES), weights), reference(x, edges(SOURCES), weights)
    assert out.dtype == expected.dtype and torch.equal(out, expected)
    assert list(calls) == ["the edge weights are float64"]


def test_size_that_contradicts_the_features_is_refused_as_without():
    layer = SAGEConv(20, 6)
    fuse_aggregation(layer)
    with pytest.raises(ValueError, match="size"):
        layer(torch.randn(SOURCES, 20), edges(SOURCES), size=(SOURCES + 1, SOURCES + 1))


def test_graph_without_edges_and_inference_mode_compute_as_before():
    torch.manual_seed(0)
    reference = GraphSAGE(20, 8, num_layers=2, out_channels=5)
    model = copy.deepcopy(reference)
    fuse_aggregation(model)
    x = torch.randn(SOURCES, 20)
    for graph in (torch.empty(2, 0, dtype=torch.long), edges(SOURCES)):
        with torch.inference_mode():
            torch.testing.assert_close(model(x, graph), reference(x, graph))


def test_changed_aggregation_module_is_used():
    torch.manual_seed(0)
    reference = SAGEConv(20, 6)
    layer, calls = copy.deepcopy(reference), Counter()
    fuse_aggregation(layer, calls)
    reference.aggr_module, layer.aggr_module = MaxAggregation(), MaxAggregation()
    x = torch.randn(SOURCES, 20)
    assert torch.equal(layer(x, edges(SOURCES)), reference(x, edges(SOURCES)))
    assert list(calls) == ["the aggregation is MaxAggregation, neither a sum nor a mean"]


@pytest.mark.parametrize("make", [SAGEConv, GCNConv])
def test_graph_that_numpy_writes_is_sorted_again(make):
    torch.manual_seed(0)
    reference = make(20, 6).double()
    layer, x = copy.deepcopy(reference), torch.randn(SOURCES, 20, dtype=torch.float64)
    fuse_aggregation(layer)
    graph = edges(SOURCES)
    for _ in range(3):
        torch.testing.assert_close(layer(x, graph), reference(x, graph), rtol=1e-10, atol=1e-10)
        graph.numpy()[0, :40] = (graph.numpy()[0, :40] + 1) % SOURCES
        graph.data[1, 50:60] = 3


@pytest.mark.parametrize("make", [SAGEConv, GCNConv, gin])
def test_function_transforms_leave_a_layer_to_pytorch_geometric(make):
    torch.manual_seed(0)
    reference = make(20, 6)
    layer, x = copy.deepcopy(reference), torch.randn(SOURCES, 20)
    fuse_aggregation(layer)
    gradients = [torch.func.grad(lambda x, m=m: m(x, edges(SOURCES)).square().sum())(x) for m in (layer, reference)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("alter", [fuse_aggregation, lambda model: apply_maxk(model, 4)])
@pytest.mark.parametrize("model", [None, [SAGEConv(4, 4)], SAGEConv])
def test_anything_but_a_module_is_refused(alter, model):
    with pytest.raises(ConfigurationError, match=r"the layers of a model can be altered; got (a|the class) "):
        alter(model)


def test_edges_and_features_of_other_types_are_refused():
    with pytest.raises(ConfigurationError, match="edge_index is a list; expected a tensor"):
        Adjacency.from_edge_index([[0, 1], [1, 0]], 2, 2)
    adjacency = Adjacency.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2, 2)
    with pytest.raises(ConfigurationError, match="aggregate expects dense features"):
        aggregate(adjacency, torch.eye(2).to_sparse())


def test_trained_edge_weights_get_their_gradient():
    torch.manual_seed(0)
    reference = GCNConv(20, 6, normalize=False)
    layer, calls = copy.deepcopy(reference), Counter()
    fuse_aggregation(layer, calls)
    weights = torch.rand(EDGES, requires_grad=True)
    layer(torch.randn(SOURCES, 20), edges(SOURCES), weights).sum().backward()
    assert weights.grad is not None and list(calls) == ["the edge weights are trained"]


def test_fused_gcn_refuses_a_pair_as_without():
    layer = GCNConv(20, 5)
    fuse_aggregation(layer)
    x = torch.randn(SOURCES, 20)
    with pytest.raises(ValueError, match="received a tuple of node features"):
        layer((x, x), edges(SOURCES))


def test_layers_of_other_classes_stay_as_they_are():
    class OwnSage(SAGEConv):
        pass

    assert fuse_aggregation(torch.nn.ModuleList([GAT(20, 8, 2), OwnSage(20, 8)])) == []


@pytest.mark.parametrize("maxk_first", [True, False])
def test_layers_with_maxk_aggregate_their_largest_values(maxk_first):
    torch.manual_seed(0)
    reference = GraphSAGE(20, 24, num_layers=2, out_channels=5).double()
    model = copy.deepcopy(reference)
    apply_maxk(reference, 4)
    calls = Counter()
    for alter in (lambda: apply_maxk(model, 4), lambda: fuse_aggregation(model, calls))[:: 1 if maxk_first else -1]:
        alter()
    assert_same(model, reference, torch.randn(SOURCES, 20, dtype=torch.float64), edges(SOURCES))
    assert calls == {FUSED: 1}


def test_second_call_replaces_the_first():
    model, first, second = GCN(20, 8, num_layers=2, out_channels=5), Counter(), Counter()
    assert fuse_aggregation(model, first) == fuse_aggregation(model, second) == ["convs.0", "convs.1"]
    model(torch.randn(SOURCES, 20), edges(SOURCES))
    assert not first and second == {FUSED: 2}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_fused_model_can_be_copied(duplicate):
    model = GraphSAGE(20, 8, num_layers=2, out_channels=5)
    fuse_aggregation(model)
    x = torch.randn(SOURCES, 20)
    expected = model(x, edges(SOURCES))
    copied = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(x, edges(SOURCES)), expected)
