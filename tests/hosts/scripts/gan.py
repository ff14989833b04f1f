"""Two networks and two optimizers that are trained against each other."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(999)
loader = DataLoader(TensorDataset(torch.randn(512, 8)), batch_size=32, shuffle=True)
net_g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
net_d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4)
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4)
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000):
    for (real,) in loader:
        net_d.zero_grad()
        label = torch.full((len(real),), 1.0)
        error_real = criterion(net_d(real).view(-1), label)
        error_real.backward()
        fake = net_g(torch.randn(len(real), 4))
        label.fill_(0.0)
        error_fake = criterion(net_d(fake.detach()).view(-1), label)
        error_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        error_g = criterion(net_d(fake).view(-1), label)
        error_g.backward()
        optimizer_g.step()
    print(f"[{epoch}] Loss_D: {(error_real + error_fake).item():.4f} Loss_G: {error_g.item():.4f}", flush=True)
