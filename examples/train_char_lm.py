"""Trains an LSTM that predicts the next character of a text.

The text is made up from a small grammar, so that nothing is downloaded. This is a training script as people write it,
in plain PyTorch; it knows nothing of hasten. About 30 seconds on a CPU::

    python examples/train_char_lm.py
    hasten tune -- python examples/train_char_lm.py
"""

import argparse
import math
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SUBJECTS = [
    "the old sailor",
    "a young queen",
    "my brother",
    "the gray cat",
    "our neighbor",
    "a quiet stranger",
    "the last train",
]
VERBS = ["remembers", "follows", "paints", "forgets", "carries", "visits", "sings about", "waits for"]
OBJECTS = [
    "the harbor",
    "a broken clock",
    "the winter garden",
    "an empty house",
    "the northern road",
    "a letter",
    "the sea",
]
ENDINGS = [
    "in the morning",
    "without a word",
    "for many years",
    "when it rains",
    "and smiles",
    "before the war",
    "again",
]


def write_text(sentences):
    rng = random.Random(0)
    lines = []
    for _ in range(sentences):
        words = [rng.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ENDINGS)]
        lines.append(" ".join(words).capitalize() + rng.choice([".", ".", "!", "?"]))
    return "\n".join(lines)


class CharModel(nn.Module):
    def __init__(self, characters, hidden):
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, characters)

    def forward(self, tokens):
        states, _ = self.lstm(self.embedding(tokens))
        return self.decoder(states)


def windows(tokens, length):
    """A dataset of (input, target) pairs: windows of the text, and the same one character later."""
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    return TensorDataset(inputs, targets)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--length", type=int, default=32, help="characters in a window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1111)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    text = write_text(4_000)
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    tokens = torch.tensor([index[character] for character in text])
    split = int(0.9 * len(tokens))
    train_loader = DataLoader(windows(tokens[:split], args.length), batch_size=args.batch_size, shuffle=True)
    valid_loader = DataLoader(windows(tokens[split:], args.length), batch_size=args.batch_size)

    model = CharModel(len(characters), args.hidden)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        start = time.time()
        model.train()
        total = 0.0
        for batch, (inputs, targets) in enumerate(train_loader, 1):
            optimizer.zero_grad()
            loss = criterion(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            total += loss.item()
            if batch % 200 == 0:
                print(
                    f"| epoch {epoch:3d} | {batch:4d}/{len(train_loader)} batches | loss {total / 200:5.2f}", flush=True
                )
                total = 0.0

        model.eval()
        losses = [criterion(model(x).flatten(0, 1), y.flatten()).item() for x, y in valid_loader]
        loss = sum(losses) / len(losses)
        elapsed = time.time() - start
        summary = f"valid loss {loss:6.3f} | valid ppl {math.exp(loss):7.3f}"
        print(f"| end of epoch {epoch:3d} | time: {elapsed:5.2f}s | {summary}", flush=True)


if __name__ == "__main__":
    main()
