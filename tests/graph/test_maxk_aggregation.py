"""MaxK and the aggregation in CBSR form, against the dense formulas in float64."""

import copy
import pickle
from collections import Counter
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch_geometric.nn import GCN, GCNConv, GINConv, GraphSAGE, SAGEConv

from hasten import ConfigurationError
from hasten.graph import CBSR, Adjacency, MaxK, aggregate, compress, maxk
from hasten.graph.aggregation.maxk_layers import INPUTS, SPARSE, apply_maxk
from helpers.thread_counts import with_threads

aggregate_module = import_module("hasten.graph.aggregation.aggregate")  # hasten.graph.aggregate is the function
SOURCES, TARGETS, EDGES = 50, 40, 600


def edges(seed: int = 0) -> torch.Tensor:
    """Random edges with repetitions; the last three targets are isolated."""
    generator = torch.Generator().manual_seed(seed)
    bounds = SOURCES, TARGETS - 3
    return torch.stack([torch.randint(bound, (EDGES,), generator=generator) for bound in bounds])


def dense(edge_index: torch.Tensor, weights: torch.Tensor | None, reduce: str) -> torch.Tensor:
    matrix = torch.zeros(TARGETS, SOURCES, dtype=torch.float64)
    ones = torch.ones(edge_index.shape[1], dtype=torch.float64)
    matrix.index_put_((edge_index[1], edge_index[0]), ones if weights is None else weights, accumulate=True)
    return (
        matrix / torch.bincount(edge_index[1], minlength=TARGETS).clamp(min=1)[:, None] if reduce == "mean" else matrix
    )


def reference_columns(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (7, 3), (256, 32), (300, 299), (300, 300)])
def test_maxk_keeps_the_largest_values(width, k, dtype):
    x = torch.randn(30, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0], x[1], x[2], x[3] = 0, -1, x[2].round(), x[3].abs() * 1e-38
    x[4, 0], x[5, -1], x[6, 0] = float("nan"), float("inf"), -float("inf")
    columns = compress(x, k).columns.long()
    assert torch.equal(columns, reference_columns(x, k))
    expected = torch.zeros_like(x).scatter(1, columns, x.gather(1, columns))
    assert torch.equal(maxk(x, k).nan_to_num(), expected.nan_to_num())


def test_maxk_of_equal_values_keeps_the_first_columns():
    x = torch.tensor([[1.0, 0.0, 0.0, -0.0, 1.0]])
    assert compress(x, 3).columns.tolist() == [[0, 1, 4]]
    assert compress(-x, 2).columns.tolist() == [[1, 2]]


def test_maxk_gradient_passes_to_the_values_that_stay():
    x = torch.randn(8, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: maxk(x, 5), x)
    maxk(x, 5).sum().backward()
    assert x.grad is not None and (x.grad != 0).sum(1).tolist() == [5] * 8


@pytest.mark.parametrize("k", [0, -1, 21, 2.0, True, "a", None])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(ConfigurationError, match="must be an integer from 1 to 20"):
        maxk(torch.zeros(3, 20), k)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "a", None])
@pytest.mark.parametrize("make", [MaxK, lambda k: apply_maxk(GraphSAGE(8, 8, 2), k)])
def test_k_of_a_layer_that_is_no_number_of_values_is_refused(make, k):
    with pytest.raises(ConfigurationError, match=f"k of MaxK must be an integer from 1 up; got {k!r}"):
        make(k)


def test_k_of_numpy_is_an_integer():
    assert maxk(torch.ones(1, 4), numpy.int64(3)).sum() == MaxK(numpy.int64(3))(torch.ones(1, 4)).sum() == 3


@pytest.mark.parametrize("x", [torch.zeros(3, 20, dtype=torch.int64), torch.zeros(3), torch.zeros(3, 0)])
def test_x_that_is_no_matrix_of_floats_is_refused(x):
    with pytest.raises(ConfigurationError, match=r"MaxK expects floats of shape \(n, d\) with d at least 1"):
        maxk(x, 2)


def test_module_passes_narrow_rows_unchanged():
    x = torch.randn(3, 20)
    assert torch.equal(MaxK(20)(x), x) and torch.equal(MaxK(5)(x), maxk(x, 5))
    assert torch.equal(MaxK(5)(torch.stack([x, -x])), torch.stack([maxk(x, 5), maxk(-x, 5)]))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("width", "k"), [(7, 3), (256, 16), (300, 32), (300, 300)])
def test_aggregation_equals_the_dense_product(width, k, weighted, reduce):
    generator = torch.Generator().manual_seed(2)
    edge_index = edges()
    weights = torch.rand(EDGES, generator=generator, dtype=torch.float64) if weighted else None
    adjacency = Adjacency.from_edge_index(edge_index, SOURCES, TARGETS, weights)
    x = torch.randn(SOURCES, width, generator=generator, dtype=torch.float64, requires_grad=True)
    expected_x = x.detach().clone().requires_grad_()
    out = aggregate(adjacency, compress(x, k), reduce)
    expected = dense(edge_index, weights, reduce) @ maxk(expected_x, k)
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    out.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, expected_x.grad, rtol=1e-12, atol=1e-12)
    assert not out[-3:].any()


def test_aggregation_passes_gradcheck():
    adjacency = Adjacency.from_edge_index(edges()[:, :80], SOURCES, TARGETS)
    sparse = compress(torch.randn(SOURCES, 9, dtype=torch.float64), 2)
    values = sparse.values.clone().requires_grad_()
    function = lambda values: aggregate(adjacency, type(sparse)(values, sparse.columns, 9), "mean")  # noqa: E731
    assert torch.autograd.gradcheck(function, values)


def test_aggregation_has_the_same_bits_for_any_number_of_threads():
    nodes, generator = 3000, torch.Generator().manual_seed(3)
    adjacency = Adjacency.from_edge_index(torch.randint(nodes, (2, 150_000), generator=generator), nodes, nodes)
    x, gradient = torch.randn(2, nodes, 64, generator=generator)

    def compute() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = aggregate(adjacency, compress(leaf, 8), "mean")
        out.backward(gradient)
        return [out.detach(), leaf.grad]

    results = with_threads(compute)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_aggregation_of_unfit_parts_is_refused():
    adjacency = Adjacency.from_edge_index(edges(), SOURCES, TARGETS)
    with pytest.raises(ConfigurationError, match=r"features of shape \(3, 2\) for 50 sources"):
        aggregate(adjacency, compress(torch.zeros(3, 9), 2))
    for parts in ((adjacency, [[0.0] * 9] * SOURCES), (edges(), compress(torch.zeros(SOURCES, 9), 2))):
        with pytest.raises(ConfigurationError, match="aggregate expects an Adjacency, and a tensor or a CBSR"):
            aggregate(*parts)
    with pytest.raises(ConfigurationError, match="expected 'sum' or 'mean'"):
        aggregate(adjacency, compress(torch.zeros(SOURCES, 9), 2), "max")
    with pytest.raises(ConfigurationError, match="expected float32 or float64"):
        aggregate(adjacency, compress(torch.zeros(SOURCES, 9, dtype=torch.bfloat16), 2))
    values, columns = (torch.zeros(SOURCES, 2, dtype=dtype, device="meta") for dtype in (torch.float32, torch.uint8))
    with pytest.raises(ConfigurationError, match="values on meta for a graph on cpu; expected one device"):
        aggregate(adjacency, CBSR(values, columns, 9))


def test_gpu_kernel_runs_on_the_device_of_its_values(monkeypatch):
    entered = []
    kernels = SimpleNamespace(product=lambda values, factor: values * factor)
    monkeypatch.setattr(aggregate_module, "import_module", lambda name: kernels)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    assert aggregate_module._on_gpu("product", torch.ones(2), 3).tolist() == [3, 3]
    assert entered == [torch.device("cpu")]


class ByHand(torch.nn.Module):
    """Two layers with a functional ReLU and, for the reference, MaxK before the second."""

    def __init__(self, first, second, k: int = 0):
        super().__init__()
        self.first, self.second, self.k = first, second, k

    def forward(self, x, edge_index, **options):
        hidden = self.first(x, edge_index).relu()
        return self.second(maxk(hidden, self.k) if self.k else hidden, edge_index, **options)


def gin(inputs: int, outputs: int) -> GINConv:
    return GINConv(torch.nn.Sequential(torch.nn.Linear(inputs, outputs), torch.nn.ReLU()), train_eps=True)


LAYERS = {
    "sage_mean": SAGEConv,
    "sage_sum": lambda inputs, outputs: SAGEConv(inputs, outputs, aggr="sum", normalize=True),
    "sage_max": lambda inputs, outputs: SAGEConv(inputs, outputs, aggr="max"),
    "sage_without_root": lambda inputs, outputs: SAGEConv(inputs, outputs, root_weight=False),
    "gcn": GCNConv,
    "gcn_unnormalized": lambda inputs, outputs: GCNConv(inputs, outputs, normalize=False, bias=False),
    "gin": gin,
}


@pytest.mark.parametrize("make", LAYERS)
def test_apply_maxk_equals_maxk_by_hand(make):
    torch.manual_seed(0)
    reference = ByHand(LAYERS[make](10, 24), LAYERS[make](24, 5), k=4).double()
    model, calls = copy.deepcopy(reference), Counter()
    model.k = 0
    assert apply_maxk(model, 4, calls) == ["second"]
    x, edge_index = torch.randn(SOURCES, 10, dtype=torch.float64), edges()
    out, expected = model(x, edge_index), reference(x, edge_index)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-10)
    assert list(calls) == ["the aggregation is max, neither a sum nor a mean" if make == "sage_max" else SPARSE]
    assert model.state_dict().keys() == reference.state_dict().keys()


@pytest.mark.parametrize(
    ("normalize", "weights"),
    [
        (True, torch.rand(EDGES, dtype=torch.float64)),
        (True, torch.rand(EDGES, 1, dtype=torch.float64)),
        (False, torch.rand(EDGES, 1, dtype=torch.float64)),
        (False, torch.arange(EDGES) % 3),
    ],
)
def test_apply_maxk_uses_edge_weights_of_gcn(normalize, weights):
    torch.manual_seed(0)
    reference = ByHand(GCNConv(10, 24), GCNConv(24, 5, normalize=normalize), k=4).double()
    model, calls = copy.deepcopy(reference), Counter()
    model.k = 0
    apply_maxk(model, 4, calls)
    x = torch.randn(SOURCES, 10, dtype=torch.float64)
    out, expected = (each(x, edges(), edge_weight=weights) for each in (model, reference))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert calls == {SPARSE: 1}


def test_apply_maxk_gcn_refuses_a_pair_as_without():
    model = torch.nn.Sequential(torch.nn.Linear(24, 24), GCNConv(24, 5))
    apply_maxk(model, 4)
    x = torch.randn(SOURCES, 24, requires_grad=True)
    with pytest.raises(ValueError, match="received a tuple of node features"):
        model[1]((x, x), edges())


def test_apply_maxk_aggregates_a_bipartite_block():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(24, 24), SAGEConv(24, 5)).double()
    reference = copy.deepcopy(layer[1])
    assert apply_maxk(layer, 4) == ["1"]
    x = torch.randn(SOURCES, 24, dtype=torch.float64, requires_grad=True)
    out = layer[1]((x, x[:TARGETS]), edges())
    torch.testing.assert_close(out, reference((maxk(x, 4), maxk(x[:TARGETS], 4)), edges()), rtol=1e-10, atol=1e-10)


def test_apply_maxk_alters_layers_after_the_first():
    assert apply_maxk(GraphSAGE(10, 24, 3), 8) == ["convs.1", "convs.2"]
    assert apply_maxk(GCN(10, 24, 3), 24) == []
    assert apply_maxk(torch.nn.Sequential(torch.nn.Linear(24, 24), SAGEConv(24, 5)), 8) == ["1"]


def test_apply_maxk_second_call_replaces_the_first():
    torch.manual_seed(0)
    reference = GraphSAGE(10, 24, 3)
    once, twice, undone = (copy.deepcopy(reference) for _ in range(3))
    x = torch.randn(SOURCES, 10)
    apply_maxk(once, 16)
    apply_maxk(twice, 4)
    assert apply_maxk(twice, 16) == ["convs.1", "convs.2"]
    assert torch.equal(twice(x, edges()), once(x, edges())) and not torch.equal(once(x, edges()), reference(x, edges()))
    apply_maxk(undone, 4)
    assert apply_maxk(undone, 24) == [], "no row has more than 24 values"
    assert torch.equal(undone(x, edges()), reference(x, edges()))


class TwoTypes(torch.nn.Module):
    """Two layers with a convolution for each of two types of edges."""

    def __init__(self, beside: bool):
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for inputs, outputs in ((10, 24), (24, 5)):
            convs = {name: SAGEConv((inputs, inputs), outputs) for name in ("rates", "rated_by")}
            self.layers.append(torch.nn.ModuleDict(convs) if beside else torch.nn.ModuleList(convs.values()))

    def forward(self, users, items, edge_index):
        for rates, rated_by in ([*layer.children()] for layer in self.layers):
            items, users = rates((users, items), edge_index), rated_by((items, users), edge_index.flip(0))
        return torch.cat([users, items])


@pytest.mark.parametrize(
    ("beside", "names"),
    [(True, ["layers.1.rates", "layers.1.rated_by"]), (False, ["layers.0.1", "layers.1.0", "layers.1.1"])],
)
def test_apply_maxk_trained_weights_evaluate_the_same_in_another_model(beside, names):
    torch.manual_seed(0)
    (trained, loaded), calls = (TwoTypes(beside) for _ in range(2)), Counter()
    users, items = torch.randn(SOURCES, 10), torch.randn(TARGETS, 10)
    assert apply_maxk(trained, 4, calls) == names
    trained(users, items, edges()).sum().backward()
    assert calls[INPUTS] == (not beside), "another layer than the first reads features of the data"
    apply_maxk(loaded, 4)
    loaded.load_state_dict(trained.state_dict())
    with torch.no_grad():
        assert torch.equal(trained.eval()(users, items, edges()), loaded.eval()(users, items, edges()))


def test_apply_maxk_layer_registered_twice_counts_where_it_is_first():
    first = SAGEConv(24, 24)
    assert apply_maxk(torch.nn.ModuleList([first, first, SAGEConv(24, 5)]), 4) == ["2"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_altered_model_can_be_copied(duplicate):
    model = GraphSAGE(10, 24, 2)
    apply_maxk(model, 4)
    x = torch.randn(SOURCES, 10)
    out = model(x, edges())
    copied = duplicate(model)
    assert torch.equal(copied(x, edges()), out)
    with torch.no_grad():
        copied.convs[1].lin_l.weight.zero_()
    assert torch.equal(model(x, edges()), out) and not torch.equal(copied(x, edges()), out)


def test_changed_graph_is_sorted_again():
    model = GraphSAGE(10, 24, 2)
    apply_maxk(model, 4)
    x, graph = torch.randn(SOURCES, 10), edges()
    before = model(x, graph)
    graph[:] = edges(seed=5)
    after = model(x, graph)
    assert not torch.equal(before, after) and torch.equal(after, model(x, edges(seed=5)))
