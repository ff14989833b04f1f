"""Trains GraphSAGE on Facebook's page-page graph: 22,470 nodes, four classes, sampled neighborhoods.

Everything but ``Task`` and the sampler is PyTorch Geometric as in its own examples. hasten's ``NeighborSampler`` needs
neither pyg-lib nor torch-sparse, and returns the same sample for the same seed, epoch and batch. Requires
``pip install 'hasten[graph]'``. Downloads the graph, unless the directory that the environment variable HASTEN_DATA
names has it. One to two minutes on two slow CPU cores::

    python examples/graph_sage.py
"""

import torch
from torch import nn
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv

import hasten
from hasten import Task
from hasten.graph import NeighborSampler
from hasten.graph.full_graph import FullGraph
from hasten.workloads.facebook_large import page_graph


class GraphSAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = SAGEConv(128, 64)
        self.conv2 = SAGEConv(64, 4)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        x = nn.functional.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def task() -> Task:
    data, train_nodes, validation_nodes = page_graph()  # x, edge_index and y; numbers of nodes
    sampler = NeighborSampler(data, num_neighbors=[10, 5], seed=0)
    return Task(
        model=GraphSAGE,
        train_data=NodeLoader(data, sampler, train_nodes, batch_size=512, shuffle=True),
        validation_data=FullGraph(data, validation_nodes),  # all neighbors, in one batch
        loss=nn.functional.cross_entropy,  # of the seed nodes
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        metric="accuracy",
        epochs=5,
    )


if __name__ == "__main__":
    try:
        result = hasten.train(task)
    except hasten.RunError as error:  # such as a failed download
        raise SystemExit(str(error)) from None
    print(f"accuracy {result['best_metric']:.3f} after {result['steps']} steps in {result['seconds']:.1f} s")
