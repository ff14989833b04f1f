"""A small network on a TensorDataset, with a DataLoader and a test loop; argument: epochs."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x = torch.randn(4096, 16)
y = (x[:, 0] > 0).long()
train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(x[:512], y[:512]), batch_size=64)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
    model.train()
    for data, target in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test:
            correct += (model(data).argmax(1) == target).sum().item()
    print(f"Epoch {epoch}: test accuracy {correct}/512 ({100 * correct / 512:.0f}%)", flush=True)
