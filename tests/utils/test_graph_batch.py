"""Graphs of PyTorch Geometric as batches: mapped, counted, given to a model, and restricted to the seed nodes."""

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data, HeteroData

from hasten import RunError
from hasten.utils.batch import batch_size, batch_tensors, call_model, chunk_batch, copy_to_device, map_tensors
from hasten.utils.graph_batch import is_graph


def graph(**fields):
    """Four nodes on a line; the label of a node is its number."""
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    return Data(torch.eye(4), edges, y=torch.arange(4), **fields)


class ByName(nn.Module):
    def forward(self, x, edge_index, edge_weight=None, num_sampled_nodes_per_hop=None):
        self.received = (edge_weight, num_sampled_nodes_per_hop)
        return x * 2


class Whole(nn.Module):
    def forward(self, graph):
        return graph.x * 2


def test_map_tensors_copies_a_graph_and_maps_every_field():
    original = graph(seed_nodes=torch.tensor([2]), parts=[torch.ones(1), "text"])
    mapped = map_tensors(lambda tensor: tensor + 1, original)
    assert is_graph(mapped) and mapped.y.tolist() == [1, 2, 3, 4] and mapped.parts == [torch.tensor([2.0]), "text"]
    assert original.y.tolist() == [0, 1, 2, 3] and original.parts[0] == 1
    assert len(batch_tensors(original)) == 5
    assert copy_to_device(original, torch.device("meta")).x.is_meta and not original.x.is_meta


def test_batch_size_is_the_number_of_seed_nodes():
    assert batch_size(graph()) == 4
    assert batch_size(graph(batch_size=2)) == 2 and batch_size(graph(seed_nodes=torch.arange(3))) == 3
    assert batch_size(Batch.from_data_list([graph(), graph()])) == 2
    hetero = HeteroData({"page": {"x": torch.eye(3), "batch_size": 2}})
    assert batch_size(hetero) == 2 and map_tensors(torch.zeros_like, hetero)["page"].x.sum() == 0


@pytest.mark.parametrize("model", [ByName(), Whole(), nn.DataParallel(ByName())])
@pytest.mark.parametrize(
    ("fields", "seeds"),
    [({}, [0, 1, 2, 3]), ({"batch_size": 2}, [0, 1]), ({"seed_nodes": torch.tensor([3, 1])}, [3, 1])],
)
def test_call_model_returns_output_and_labels_of_the_seed_nodes(model, fields, seeds):
    if isinstance(model, nn.DataParallel):  # forward(*inputs, **kwargs): the parameters are those of the model within
        model.device_ids = []
    output, target = call_model(model, graph(**fields), own=False)
    assert target.tolist() == seeds and output.argmax(1).tolist() == seeds and output.max() == 2


def test_call_model_passes_the_fields_that_parameters_name():
    model = ByName()
    batch = graph(edge_weight=torch.ones(3), num_sampled_nodes=[2, 2], batch_size=2, n_id=torch.ones(4))
    call_model(model, batch, own=False)
    assert model.received[0].tolist() == [1, 1, 1] and model.received[1] == [2, 2]


def test_call_model_accepts_an_output_without_the_last_sampled_nodes():
    class Trimmed(nn.Module):
        def forward(self, x, edge_index):
            return x[:3]

    output, target = call_model(Trimmed(), graph(batch_size=2), own=False)
    assert output.shape == (2, 4) and target.tolist() == [0, 1]


def test_model_with_its_own_loss_gets_the_graph():
    output, target = call_model(Whole(), graph(batch_size=1), own=True)
    assert output.shape == (4, 4) and target.tolist() == [0]  # the output is its own: a loss, or an object with one


def test_graph_without_what_the_model_requires_is_refused():
    class Attributes(nn.Module):
        def forward(self, x, edge_attr):
            return x

    with pytest.raises(RunError, match="requires edge_attr, but the graph has only edge_index, x, y"):
        call_model(Attributes(), graph(), own=False)
    unlabeled = Data(torch.eye(4), torch.zeros(2, 0, dtype=torch.int64))
    with pytest.raises(RunError, match="one type of nodes and their labels y"):
        call_model(Whole(), unlabeled, own=False)


def test_graph_is_not_cut_into_microbatches():
    whole = graph(batch_size=4)
    assert len(chunk_batch(whole, 1)) == 1
    with pytest.raises(RunError, match="a graph cannot be cut into microbatches"):
        chunk_batch(whole, 2)
