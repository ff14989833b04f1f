"""Full graphs, and sampled ones, as the data of a task: steps, epochs, evaluation, workers, refused arguments."""

import time

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")
pytest.importorskip("numba")

from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import BaseSampler, SamplerOutput

from hasten import ConfigurationError, Recipe, Task, WorkerConfig
from hasten.engine.evaluation import evaluate
from hasten.engine.loaders import from_loader
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.graph.full_graph import FullGraph
from hasten.profiling.input_benchmark import measure_input
from hasten.profiling.probe import facts_of

NODES = 60


def ring() -> Data:
    """Nodes on a ring; the first half of it has another label, and features that tell so."""
    source = torch.arange(NODES)
    labels = (source < NODES // 2).long()
    features = labels[:, None] + 0.1 * torch.randn(NODES, 3, generator=torch.Generator().manual_seed(0))
    return Data(features, torch.stack([source, (source + 1) % NODES]), y=labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(3, 2)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class Predecessor(BaseSampler):
    """Samples the one neighbor of each seed, and notes the epochs that are set."""

    edge_permutation = None

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def sample_from_nodes(self, inputs, **kwargs):
        seeds, count = inputs.node, len(inputs.node)
        node = torch.cat([seeds, (seeds - 1) % NODES])
        row, col = torch.arange(count, 2 * count), torch.arange(count)
        return SamplerOutput(node, row, col, edge=None, metadata=(inputs.input_id, inputs.time))

    def sample_from_edges(self, *args, **kwargs):
        raise NotImplementedError


def task(train_data, **changes) -> Task:
    settings = {
        "model": Net,
        "train_data": train_data,
        "validation_data": FullGraph(ring(), torch.arange(NODES) % 2 == 1),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
        "metric": "accuracy",
        "epochs": 20,
    }
    return Task(**{**settings, **changes})


def sampled(**options) -> tuple[NodeLoader, Predecessor]:
    sampler = Predecessor()
    return NodeLoader(ring(), sampler, torch.arange(0, NODES, 2), batch_size=8, shuffle=True, **options), sampler


def test_full_graph_trains_one_step_an_epoch_on_its_seed_nodes():
    program = build(task(FullGraph(ring(), torch.arange(0, NODES, 2))), seed=0)
    losses = [loss.item() for loss in train_steps(program)]
    assert len(losses) == 20 and losses[-1] < 0.2 < losses[0]
    assert program.run.progress.samples == 20 * NODES // 2
    assert evaluate(program).metric > 0.9


def test_full_graph_loss_sees_seed_nodes_only():
    graph = ring()
    graph.y[1::2] = 1 - graph.y[1::2]  # the labels of the other nodes are wrong
    program = build(task(FullGraph(graph, torch.arange(0, NODES, 2))), seed=0)
    list(train_steps(program))
    assert evaluate(program).metric > 0.9


@pytest.mark.parametrize("per_worker", [False, True])
def test_node_loader_trains_on_its_seed_nodes(per_worker):
    loader, sampler = sampled(filter_per_worker=per_worker)
    program = build(task(loader), seed=0)
    losses = [loss.item() for loss in train_steps(program)]
    assert len(losses) == 20 * 4 and program.run.progress.samples == 20 * NODES // 2
    assert losses[-1] < 0.2 < losses[0] and evaluate(program).metric > 0.9
    assert sampler.epochs == list(range(20))


@pytest.mark.parametrize("per_worker", [False, True])
def test_node_loader_read_by_its_samples_gives_the_same_batches(per_worker):
    loader, _ = sampled(filter_per_worker=per_worker)
    torch.manual_seed(0)
    expected = list(loader)
    source = from_loader(loader, None, 8, seed=0, training=True)
    torch.manual_seed(0)
    batches = list(source.with_spec(num_workers=0).epoch(0, 0))
    assert source.workers == WorkerConfig() and len(batches) == len(expected) == 4
    for batch, other in zip(batches, expected, strict=True):
        assert batch.batch_size == other.batch_size and torch.equal(batch.x, other.x)
        assert torch.equal(batch.edge_index, other.edge_index)


def test_node_loader_accepts_another_batch_size():
    loader, sampler = sampled()
    batches = list(from_loader(loader, None, 16, seed=0, training=True).epoch(3, 0))
    assert [batch.batch_size for batch in batches] == [16, 14] and batches[0].x.shape == (32, 3)
    assert set(sampler.epochs) == {3}


def test_input_benchmark_times_sampling_and_the_fetch_of_features():
    loader, sampler = sampled()
    sample = sampler.sample_from_nodes

    def slow_sample(*args, **kwargs):
        time.sleep(0.005)
        return sample(*args, **kwargs)

    sampler.sample_from_nodes = slow_sample
    stages = measure_input(build(task(loader), seed=0), budget=0.6)["stages"]
    assert {name for name, rate in stages.items() if rate} == {"sampling", "features"}
    assert stages["sampling"] < 8 / 0.005 and stages["sampling"] < stages["features"]


def test_a_loader_of_nodes_has_no_samples_to_keep_in_memory():
    program = build(task(sampled()[0]), make_methods(Recipe({"cache_dataset": {}})), seed=0)
    ((name, why),) = program.run.no_effect
    assert name == "cache_dataset" and "the samples are numbers" in why
    assert "workers" in facts_of(program) and "indexed_samples" not in facts_of(program)


def test_full_graph_keeps_the_graph_that_it_is_given():
    graph = ring()
    assert len(FullGraph(graph, torch.tensor([3])).dataset) == 1 and "seed_nodes" not in graph


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (torch.zeros(NODES, dtype=torch.bool), "must select at least one node"),
        (torch.ones(5, dtype=torch.bool), r"shape \(60,\), not \(5,\)"),
        (torch.tensor([0, 60]), "numbers from 0 to 59; found 60"),
        (torch.tensor([0.5]), "must select at least one node"),
        (torch.ones(NODES, dtype=torch.uint8), r"not uint8; convert a mask with nodes.bool\(\)"),
    ],
)
def test_nodes_that_do_not_exist_are_refused(nodes, message):
    with pytest.raises(ConfigurationError, match=message):
        FullGraph(ring(), nodes)


def test_full_graph_refuses_another_batch_size():
    with pytest.raises(ConfigurationError, match="the batch is a full graph; train on samples of it"):
        FullGraph(ring(), torch.arange(4)).batches(8, seed=0, training=True)
