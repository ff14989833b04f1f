"""A linear regression that is configured as nanoGPT: ``--lr=0.01 epochs=3``, without argparse."""

import sys

import torch
from torch import nn

epochs, lr, batch_size = 6, 0.01, 50
for argument in sys.argv[1:]:
    name, _, value = argument.lstrip("-").partition("=")
    globals()[name] = type(globals()[name])(value)

torch.manual_seed(0)
inputs = torch.randn(1200, 8)
targets = inputs.sum(1, keepdim=True) + torch.randn(1200, 1)
data = torch.utils.data.TensorDataset(inputs[:1000], targets[:1000])
loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for epoch in range(epochs):
    model.train()
    for batch, labels in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs[1000:]), targets[1000:]).item()
    print(f"epoch {epoch}: val loss {loss:.4f}", flush=True)
