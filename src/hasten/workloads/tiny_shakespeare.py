"""Tiny Shakespeare (Karpathy 2015): a million characters of plays, and a small GPT that predicts the next character.

The first nine tenths of the text are for training; the metric is the loss per character (nats) on the first 64,000
characters of the rest.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import Task
from hasten.workloads._data import File, download

TEXT = File(
    "tinyshakespeare/input.txt",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
CONTEXT = 64  # characters that the model reads


def tiny_shakespeare() -> Task:
    """Next character of Shakespeare's text, by a GPT of three blocks, width 96, four heads, without dropout."""
    text = download(TEXT).read_text(encoding="ascii")
    alphabet = sorted(set(text))
    code = {character: index for index, character in enumerate(alphabet)}
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
    """Sample: (``CONTEXT`` character codes, int64; the same shifted by one)."""

    def __init__(self, codes: torch.Tensor):
        self.codes = codes

    def __len__(self):
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index):
        window = self.codes[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


def loss_per_character(logits, target):
    """Mean cross-entropy over all positions, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class GPT(nn.Module):
    """Character codes, shape (batch, context), to logits, shape (batch, context, alphabet)."""

    def __init__(self, alphabet: int, width: int = 96, blocks: int = 3, heads: int = 4):
        super().__init__()
        self.token_embedding = nn.Embedding(alphabet, width)
        self.position_embedding = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet)

    def forward(self, text):
        positions = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.token_embedding(text) + self.position_embedding(positions))))


class TransformerBlock(nn.Module):
    """A transformer block: causal self-attention, then an MLP of two layers."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def attention(self, x):
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).reshape(batch, length, width))
