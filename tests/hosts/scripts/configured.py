"""A linear regression that is configured as nanoGPT: ``--lr=0.01 epochs=3``, without argparse."""

import sys

import torch
from torch import nn

epochs, lr, batch_size = 6, 0.01, 500
for argument in sys.argv[1:]:
    name, _, value = argument.lstrip("-").partition("=")
    globals()[name] = type(globals()[name])(value)

torch.manual_seed(0)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(12000, 8, generator=generator)
targets = inputs.sum(1, keepdim=True) + torch.randn(12000, 1, generator=generator)
model = nn.Linear(8, 1)
for epoch in range(epochs):
    model.train()
    for rows in torch.randperm(10000).split(batch_size):
        model.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-lr)
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs[10000:]), targets[10000:]).item()
    print(f"epoch {epoch}: val loss {loss:.4f}", flush=True)
