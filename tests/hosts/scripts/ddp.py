"""A small regression; under torchrun each process trains its part of the batches, with gradients averaged by DDP."""

import os

import torch
from torch import nn

ranks = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
targets = inputs[:, :4].sum(1, keepdim=True)
rank = int(os.environ.get("RANK", 0))
for epoch in range(20):
    for first in range(rank * 32, 3072, ranks * 32):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[first : first + 32]), targets[first : first + 32])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held_out = nn.functional.mse_loss(model(inputs[3072:]), targets[3072:])
    model.train()
    if rank == 0:
        print(f"epoch {epoch}: val loss {held_out.item():.4f}", flush=True)
if ranks > 1:
    torch.distributed.destroy_process_group()
