"""A task with layers of PyTorch Geometric, for methods that alter them."""

import torch
from torch import nn
from torch_geometric.nn import SAGEConv

from hasten import Task

NODES, FEATURES, HIDDEN, CLASSES = 40, 10, 24, 3
GRAPH = torch.randint(NODES, (2, 300), generator=torch.Generator().manual_seed(0))


class GraphModel(nn.Module):
    """Two layers with a ReLU between them, on one graph of all samples: a batch is a set of features of all nodes."""

    def __init__(self, layer: type[nn.Module] = SAGEConv, aggr: str = "mean"):
        super().__init__()
        self.first, self.second = layer(FEATURES, HIDDEN, aggr=aggr), layer(HIDDEN, CLASSES, aggr=aggr)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = GRAPH[:, GRAPH.amax(0) < len(x)]
        return self.second(self.first(x, graph).relu(), graph)


def graph_task(model=GraphModel, **changes) -> Task:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * NODES, FEATURES, generator=generator)
    data = torch.utils.data.TensorDataset(x, x[:, :CLASSES].argmax(1))
    return Task(
        model=model,
        train_data=data,
        validation_data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        metric="accuracy",
        **{"batch_size": NODES, "epochs": 2, **changes},
    )
