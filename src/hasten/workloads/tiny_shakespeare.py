"""Tiny Shakespeare (Karpathy 2015): a million characters of plays, and a small GPT that guesses the next one.

The first nine tenths of the text are to learn from; the metric is the loss per character (nats) on the first
64 thousand characters of the rest.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import Task
from hasten.workloads._data import File, fetched

TEXT = File(
    "tinyshakespeare/input.txt",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
CONTEXT = 64  # characters that the model sees at a time


def tiny_shakespeare() -> Task:
    """A GPT of three blocks, 96 wide, four heads, without dropout."""
    text = fetched(TEXT).read_text(encoding="ascii")
    alphabet = sorted(set(text))
    code = {character: number for number, character in enumerate(alphabet)}
    codes = torch.tensor([code[character] for character in text])
    train, rest = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]
    return Task(
        model=lambda: GPT(len(alphabet)),
        train_data=Windows(train),
        validation_data=Windows(rest[: 1000 * CONTEXT + 1]),
        loss=loss_per_character,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        metric="loss",
        target=1.85,
        batch_size=32,
        epochs=3,
        evaluate_every=3200,
    )


class Windows(Dataset):
    """Sample: (``CONTEXT`` characters as whole numbers; the same moved on by one)."""

    def __init__(self, codes: torch.Tensor):
        self.codes = codes

    def __len__(self):
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index):
        window = self.codes[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


def loss_per_character(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class GPT(nn.Module):
    """Characters (batch, context) to logits (batch, context, alphabet)."""

    def __init__(self, alphabet: int, width: int = 96, blocks: int = 3, heads: int = 4):
        super().__init__()
        self.characters = nn.Embedding(alphabet, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet)

    def forward(self, text):
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.characters(text) + self.places(places))))


class Block(nn.Module):
    """Attention to what came before, then two layers for every character on its own."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.first_norm(x))
        return x + self.layers(self.second_norm(x))

    def attention(self, x):
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix(seen.transpose(1, 2).reshape(batch, length, width))
