"""A training whose own code is slow: batches made by a Python loop, and the loss read in every step."""

import torch
from torch import nn

torch.manual_seed(0)
samples = [[float((row * column) % 7) for column in range(64)] for row in range(2000)]


def get_batch(first):
    rows = []
    for row in samples[first : first + 192]:
        rows.append([value / 7 - 0.5 for value in row])
    return torch.tensor(rows)


def main():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total = 0.0
    for step in range(100_000):
        batch = get_batch(step * 64 % 1800)
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 100 == 99:
            model.eval()
            with torch.no_grad():
                error = ((model(get_batch(0)) - get_batch(0)) ** 2).mean().item()
            model.train()
            print(f"step {step}: train loss {total / (step + 1):.4f}, val loss {error:.4f}", flush=True)


main()
