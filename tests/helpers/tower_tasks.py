"""Tasks whose models tensor parallelism and pipelines can divide: attention layers and pairs of linear layers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from hasten import Task
from helpers.rank_tasks import BATCH, Rows, Uneven, task


class Layer(nn.Module):
    """Attention with four heads, then a gated pair of layers with dropout between."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm, self.norm_too = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value, self.mix = (nn.Linear(width, width) for _ in range(3))
        # without bias: its gradient would be rounding error, which Adam scales up to any other
        self.key = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        inputs = self.norm_too(x)
        return x + self.down(self.dropout(nn.functional.silu(self.gate(inputs)) * self.up(inputs)))

    def attention(self, x):
        batch, length, width = x.shape
        heads = (
            each(x).view(batch, length, 4, width // 4).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.mix(seen.transpose(1, 2).reshape(batch, length, width))


class Tower(nn.Module):
    """Each input is a position of its own; a few equal layers; a buffer that is added."""

    def __init__(self, depth: int = 3, width: int = 8, dropout: float = 0.0):
        super().__init__()
        self.first, self.last = nn.Linear(1, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(depth))
        self.register_buffer("places", torch.randn(6, width))

    def forward(self, inputs):
        x = self.first(inputs.unsqueeze(-1)) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))


def tower(data=None, **changes) -> Task:
    usual = {
        "model": lambda: Tower().double(),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "epochs": 1,
    }
    return task(data, **(usual | changes))


def uneven_tower() -> Task:
    """Batches of ten and of three in turns, the latter with fewer samples than microbatches."""
    return tower(DataLoader(Rows(), batch_sampler=Uneven(RandomSampler(Rows()), BATCH, False)))


def longer_tower() -> Task:
    return tower(epochs=1.5, model=lambda: Tower(depth=2).double())


def dropping_tower() -> Task:
    return tower(model=lambda: Tower(dropout=0.3).double())


def tower_with_a_mask() -> Task:
    """An unused buffer, and an optimizer with a step counter in its state."""

    def model():
        made = Tower().double()
        made.register_buffer("mask", torch.ones(3, dtype=torch.float64))
        return made

    return tower(model=model, optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, lr_decay=0.1))


def in_a_row() -> Task:
    """Two pairs of layers that can be split, one directly after the other."""

    def model():
        pairs = [nn.Sequential(nn.Linear(first, 8), nn.Tanh(), nn.Linear(8, last)) for first, last in ((6, 8), (8, 2))]
        return nn.Sequential(*pairs).double()

    return task(model=model, epochs=1)


class BareAttention(nn.Module):
    """An attention layer without a residual connection."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 2)
        self.attention = Layer(8, 0.0)

    def forward(self, inputs):
        return self.last(self.attention.attention(self.first(inputs.unsqueeze(-1))).mean(1))


def bare_attention() -> Task:
    return task(model=lambda: BareAttention().double())
