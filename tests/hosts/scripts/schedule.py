"""A linear regression whose learning rate is too small, so that it needs all of its epochs; it decays over them."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--data", default="made")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(3000, 8, generator=generator)
targets = inputs.sum(1, keepdim=True) + torch.randn(3000, 1, generator=generator)
data = torch.utils.data.TensorDataset(inputs[:2000], targets[:2000])
loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
for epoch in range(args.epochs):
    model.train()
    for batch, labels in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), labels).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs[2000:]), targets[2000:]).item()
    print(f"epoch {epoch}: val loss {loss:.4f}", flush=True)
