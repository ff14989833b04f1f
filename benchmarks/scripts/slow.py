"""A training with one planted fault: slow.py FAULT [EPOCHS]. hasten reads it as it reads any script.

``samples``: reading a sample takes a Python loop. ``evaluation``: it records gradients. ``optimizer``: 300 small
tensors, updated one by one. ``convolutions``: their memory format is channels first. ``reading``: each step copies all
gradients to look at them. ``threads``: one of two cores computes.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

FAULT, EPOCHS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10


class Waves(Dataset):
    """Samples that a Python loop makes, and a class."""

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        values = [((index * 31 + position * 17) % 101) / 101 for position in range(1024)]
        return torch.tensor(values), index % 4


class Small(nn.Module):
    """300 tensors of 16 values, of which each scales and shifts the one vector."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.full((16,), 0.01) for _ in range(300))
        self.head = nn.Linear(16, 4)

    def forward(self, values):
        return self.head(values[:, :16] * torch.stack(list(self.parts)).sum(0))


def images(count):
    torch.manual_seed(count)
    return TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(4, (count,)))


def vectors(count, width):
    torch.manual_seed(count)
    return TensorDataset(torch.randn(count, width), torch.randint(4, (count,)))


def dense(width, hidden):
    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
    )


class Reader(nn.Module):
    """A recurrent cell in a Python loop."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 32), nn.Linear(32, 4)

    def forward(self, sequences):
        state = sequences.new_zeros(len(sequences), 32)
        for step in sequences.unflatten(1, (-1, 8)).unbind(1):
            state = self.cell(step, state)
        return self.head(state)


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)),
        *(nn.Flatten(), nn.Linear(32 * 16 * 16, 4)),
    )


# fault: training samples, validation samples, model
PARTS = {
    "samples": lambda: (Waves(), vectors(256, 1024), dense(1024, 64)),
    "evaluation": lambda: (vectors(512, 512), vectors(4096, 512), Reader()),
    "optimizer": lambda: (vectors(4096, 16), vectors(256, 16), Small()),
    "convolutions": lambda: (images(512), images(64), convolutions()),
    "reading": lambda: (vectors(4096, 256), vectors(256, 256), dense(256, 512)),
    "threads": lambda: (vectors(4096, 512), vectors(256, 512), dense(512, 2048)),
}


def main():
    if FAULT == "threads":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    training, validation, model = PARTS[FAULT]()
    loader = DataLoader(training, batch_size=32, shuffle=True)
    held_out = DataLoader(validation, batch_size=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        model.train()
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            if FAULT == "reading" and max(float(p.grad.abs().max().item()) for p in model.parameters()) > 1e3:
                print("large gradients")
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.set_grad_enabled(FAULT == "evaluation"):
            for inputs, labels in held_out:
                total += nn.functional.cross_entropy(model(inputs), labels).item()
        print(f"epoch {epoch}: validation loss {total / len(held_out):.5f}", flush=True)


main()
