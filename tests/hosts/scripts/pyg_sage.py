"""GraphSAGE with the NeighborLoader of PyTorch Geometric, written as its own examples are."""

import sys

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

torch.manual_seed(0)
NODES, CLASSES = 4_000, 4
label = torch.randint(CLASSES, (NODES,))
near = torch.randint(NODES, (2, 40_000))
same = label[near[0]] == label[near[1]]
edge_index = near[:, same | (torch.rand(40_000) < 0.2)]
data = Data(x=torch.randn(NODES, 32) + label.unsqueeze(1), y=label, edge_index=edge_index)


class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = SAGEConv(32, 64)
        self.conv2 = SAGEConv(64, CLASSES)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        return self.conv2(x, edge_index)


train_loader = NeighborLoader(data, [10, 5], input_nodes=torch.arange(3_000), batch_size=100, shuffle=True)
val_loader = NeighborLoader(data, [10, 5], input_nodes=torch.arange(3_000, NODES), batch_size=500)
model = SAGE()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(int(sys.argv[1])):
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in val_loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            correct += int((out.argmax(1) == batch.y[: batch.batch_size]).sum())
    print(f"epoch {epoch} val_acc {correct / 1_000:.4f}", flush=True)
