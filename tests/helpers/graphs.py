"""Small random graphs for tests, and what is true of every sample."""

import torch
from torch_geometric.data import Data, HeteroData


def random_graph(nodes: int = 500, edges: int = 8_000, seed: int = 0) -> Data:
    """A directed graph with features, weights and times; the last ten nodes are isolated."""
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.arange(nodes, dtype=torch.float32).unsqueeze(1),
        edge_index=torch.randint(nodes - 10, (2, edges), generator=generator),
        weight=torch.rand(edges, generator=generator),
        time=torch.randint(100, (nodes,), generator=generator),
    )


def typed_graph() -> HeteroData:
    """Users and items, with edges both ways."""
    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    graph["user"].x = torch.arange(100.0).unsqueeze(1)
    graph["item"].x = torch.arange(50.0).unsqueeze(1)
    bought = torch.stack([torch.randint(size, (600,), generator=generator) for size in (100, 50)])
    graph["user", "bought", "item"].edge_index = bought
    graph["item", "bought_by", "user"].edge_index = bought.flip(0)
    return graph


def assert_edges_are_those_of(graph: Data, batch: Data) -> None:
    """Each sampled edge is an edge of the graph, drawn once, between the nodes that it has there."""
    assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
    assert torch.equal(batch.x, graph.x[batch.n_id])
