"""Three tasks that train in milliseconds: a perceptron, a convolutional net and a small transformer.

They exist to be trained by the tests of methods. Each is a function that returns a fresh ``Task``;
keyword arguments replace the task's fields, as in ``perceptron(epochs=3, batch_size=8)``.
"""

from __future__ import annotations

import torch
from torch import nn

from hasten.core.task import Task

CLASSES, LETTERS = 4, 16


class Labelled(torch.utils.data.Dataset):
    """Inputs with labels that a hidden linear rule gives them, so that there is something to learn.

    Args:
        shape: of one sample.
        length: how many samples.
        seed: a different one gives other samples under the same rule.
    """

    def __init__(self, shape: tuple[int, ...], length: int = 96, seed: int = 0):
        self.inputs = torch.randn(length, *shape, generator=torch.Generator().manual_seed(seed))
        rule = torch.randn(self.inputs[0].numel(), CLASSES, generator=torch.Generator().manual_seed(99))
        self.labels = (self.inputs.flatten(1) @ rule).argmax(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.inputs[index], self.labels[index]


class Text(torch.utils.data.Dataset):
    """Letters in a noisy alphabetical order; the target is the next letter."""

    def __init__(self, window: int = 8, length: int = 96, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        strides = torch.randint(1, 3, (length + window + 1,), generator=generator)
        self.letters, self.window, self.length = strides.cumsum(0) % LETTERS, window, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        piece = self.letters[index : index + self.window + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """One transformer block on (samples, positions, width)."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.before_attention, self.before_mixing = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.queries_keys_values(self.before_attention(x)).unsqueeze(1).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True).squeeze(1)
        x = x + self.out(attended)
        return x + self.mix(self.before_mixing(x))


class SmallTransformer(nn.Module):
    """Letters (samples, positions) to scores (samples, LETTERS, positions)."""

    def __init__(self, width: int = 16, depth: int = 3, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(letters)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def perceptron(**changes) -> Task:
    """Two layers on vectors of 12 numbers, Adam."""
    return _task(
        changes,
        name="perceptron",
        model=lambda: nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, CLASSES)),
        train_data=Labelled((12,)),
        validation_data=Labelled((12,), length=48, seed=1),
    )


def convolutional(batch_norm: bool = True, **changes) -> Task:
    """Two blocks of convolution, (batch) normalisation and ReLU on images of 1 x 8 x 8, momentum SGD."""
    norm = nn.BatchNorm2d if batch_norm else (lambda channels: nn.GroupNorm(2, channels))

    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), norm(8), nn.ReLU())

    return _task(
        changes,
        name="convolutional",
        model=lambda: nn.Sequential(block(1), block(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)),
        train_data=Labelled((1, 8, 8)),
        validation_data=Labelled((1, 8, 8), length=48, seed=1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )


def transformer(dropout: float = 0.0, **changes) -> Task:
    """Three causal blocks of width 16 on windows of 8 letters, AdamW."""
    return _task(
        changes,
        name="transformer",
        model=lambda: SmallTransformer(dropout=dropout),
        train_data=Text(),
        validation_data=Text(length=48, seed=1),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    )


def _task(changes: dict, **fields) -> Task:
    usual = {
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        "metric": "accuracy",
        "batch_size": 16,
        "epochs": 2,
    }
    return Task(**(usual | fields | changes))
