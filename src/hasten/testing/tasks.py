"""Three tasks that train in milliseconds: a perceptron, a convolutional network and a transformer.

Each is a function that returns a new ``Task``; keyword arguments replace fields of the task, as in
``perceptron(epochs=3, batch_size=8)``.
"""

from typing import Any

import torch
from torch import nn

from hasten.core.task import Task

CLASSES, LETTERS = 4, 16


class Labeled(torch.utils.data.Dataset):
    """Random inputs, with labels that a hidden linear rule assigns, so that there is something to learn.

    Args:
        shape: Shape of a sample, float32.
        length: Number of samples.
        seed: Another seed gives other samples, labeled by the same rule.
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
    """Windows of letters (int64) in a noisy alphabetical order; the target is the next letter at each position."""

    def __init__(self, window: int = 8, length: int = 96, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        strides = torch.randint(1, 3, (length + window + 1,), generator=generator)
        self.letters, self.window, self.length = strides.cumsum(0) % LETTERS, window, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        letters = self.letters[index : index + self.window + 1]
        return letters[:-1], letters[1:]


class Block(nn.Module):
    """A transformer block with one attention head, on shape (samples, positions, width)."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv(self.attention_norm(x)).unsqueeze(1).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True).squeeze(1)
        x = x + self.projection(attended)
        return x + self.mlp(self.mlp_norm(x))


class SmallTransformer(nn.Module):
    """Letters, shape (samples, positions), to logits, shape (samples, LETTERS, positions)."""

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


def perceptron(**changes: Any) -> Task:
    """A task: a perceptron of two layers on vectors of length 12, with Adam."""
    return small_task(
        changes,
        name="perceptron",
        model=lambda: nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, CLASSES)),
        train_data=Labeled((12,)),
        validation_data=Labeled((12,), length=48, seed=1),
    )


def convolutional(batch_norm: bool = True, **changes: Any) -> Task:
    """A task: two blocks (convolution, batch or group norm, ReLU) on images of shape (1, 8, 8); SGD with momentum."""
    norm = nn.BatchNorm2d if batch_norm else (lambda channels: nn.GroupNorm(2, channels))

    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), norm(8), nn.ReLU())

    return small_task(
        changes,
        name="convolutional",
        model=lambda: nn.Sequential(block(1), block(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)),
        train_data=Labeled((1, 8, 8)),
        validation_data=Labeled((1, 8, 8), length=48, seed=1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )


def transformer(dropout: float = 0.0, **changes: Any) -> Task:
    """A task: three causal transformer blocks of width 16 on windows of 8 letters, with AdamW."""
    return small_task(
        changes,
        name="transformer",
        model=lambda: SmallTransformer(dropout=dropout),
        train_data=Text(),
        validation_data=Text(length=48, seed=1),
        optimizer=adamw,
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with a learning rate for small transformers."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def small_task(changes: dict[str, Any], **fields: Any) -> Task:
    """A task of two epochs with these fields, of which ``changes`` replaces some."""
    defaults = {
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        "metric": "accuracy",
        "batch_size": 16,
        "epochs": 2,
    }
    return Task(**(defaults | fields | changes))
