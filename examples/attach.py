"""A training loop of your own, over batches that no DataLoader reads, attached to hasten in three lines.

Also runs without a command of hasten; about 5 seconds on a CPU::

    python examples/attach.py
    hasten tune -- python examples/attach.py
"""

import torch
from torch import nn

import hasten

PERIOD, LENGTH = 16, 64


def noisy_waves(batches, generator):
    """Ready batches (window of a wave, what follows), each computed when it is read."""
    for _ in range(batches):
        phase = torch.rand(32, 1, generator=generator) * PERIOD
        wave = torch.sin((torch.arange(LENGTH + 8) + phase) * 2 * torch.pi / PERIOD)
        yield (wave + 0.1 * torch.randn(wave.shape, generator=generator)).split([LENGTH, 8], dim=1)


class Waves:
    def __init__(self, batches, seed):
        self.batches, self.generator = batches, torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.batches

    def __iter__(self):
        return noisy_waves(self.batches, self.generator)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(LENGTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)
held_out = list(Waves(8, seed=1))

run = hasten.attach(model, optimizer, Waves(60, seed=0))
for epoch in range(5):
    model.train()
    for window, following in run.batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(window), following).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(window), following) for window, following in held_out]
    loss = torch.stack(losses).mean()
    run.metric("val_loss", loss)
    print(f"epoch {epoch + 1}: validation loss {loss:.4f}")
