"""A linear model with too small a learning rate and too many epochs, both arguments, and a decay over all epochs."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--data", default="made")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(6000, 8, generator=generator)
targets = (inputs[:, 0] + inputs[:, 1] * inputs[:, 2] > 0).long()
data = torch.utils.data.TensorDataset(inputs[:5000], targets[:5000])
loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
for epoch in range(args.epochs):
    model.train()
    for batch, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(inputs[5000:]).argmax(1) == targets[5000:]).float().mean().item()
    print(f"epoch {epoch}: val accuracy {accuracy:.4f}", flush=True)
