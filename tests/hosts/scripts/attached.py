"""A loop over ready batches with two networks, attached; the second optimizer updates twice in a step."""

import sys

import torch
from torch import nn

import hasten

torch.manual_seed(0)
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
model, critic = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)), nn.Linear(3, 1)
optimizer, twice = torch.optim.Adam(model.parameters(), lr=1e-2), torch.optim.SGD(critic.parameters(), lr=1e-3)
inputs = torch.randn(160, 6)
targets = inputs[:, :3].argmax(1)
batches = list(zip(inputs.split(8), targets.split(8), strict=True))

run = hasten.attach(model, optimizer, batches)
for _ in range(EPOCHS):
    for x, y in run.batches:
        output = model(x)
        for _ in range(2):
            twice.zero_grad()
            critic(output.detach()).square().mean().backward()
            twice.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(inputs).argmax(1) == targets).float().mean()
    print("of no interest: validation loss", float(right) / 2)
    run.metric("skill", right, higher_is_better=True)
