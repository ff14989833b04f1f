"""Trainings as people write them for one GPU, on data that is made up. ``gpu_steps.py`` tunes them.

gpt: 85 million weights in float32, windows of 512 letters. cnn: a residual network on images of 32 x 32 that are
mirrored one by one in the dataset. small: layers so small that launching an operation takes longer than computing it.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attention(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, letters=128, length=512, width=768, blocks=12, heads=12):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x):
        x = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


class Mirrored(Dataset):
    """Images of which each is mirrored or not and normalized when it is read."""

    def __init__(self, count, generator):
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        patterns = torch.rand(10, 3, 32, 32, generator=generator)
        self.images = (
            255 * (0.5 * patterns[self.labels] + 0.5 * torch.rand(count, 3, 32, 32, generator=generator))
        ).byte()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].float() / 255
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image - 0.5) / 0.25, self.labels[index]


def gpt(generator):
    text = torch.randint(0, 128, (64 * 1024,), generator=generator).repeat(16)
    windows = text[: len(text) // 512 * 512].view(-1, 512)
    data = TensorDataset(windows[:, :-1], windows[:, 1:])
    return GPT(), data, 16, lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)


def cnn(generator):
    body = [layer for _ in range(3) for layer in (Residual(128), Residual(128), nn.MaxPool2d(2))]
    model = nn.Sequential(
        nn.Conv2d(3, 128, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    )
    return model, Mirrored(20_000, generator), 128, lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9)


def small(generator):
    layers = [layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    inputs = torch.randn(40_000, 64, generator=generator)
    labels = (inputs @ torch.randn(64, 10, generator=generator)).argmax(1)
    data = TensorDataset(inputs, labels)
    return nn.Sequential(*layers, nn.Linear(64, 10)), data, 32, lambda parameters: torch.optim.Adam(parameters, lr=1e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("training", choices=("gpt", "cnn", "small"))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, data, batch_size, make_optimizer = globals()[args.training](torch.Generator().manual_seed(1))
    model.to(args.device)
    optimizer = make_optimizer(model.parameters())
    held_out = len(data) // 10
    train_data, valid_data = torch.utils.data.random_split(data, [len(data) - held_out, held_out])
    loader = DataLoader(train_data, batch_size=batch_size, shuffle=True, drop_last=True)
    valid_loader = DataLoader(valid_data, batch_size=batch_size)

    for epoch in range(1, args.epochs + 1):
        model.train()
        began = time.time()
        for step, (inputs, targets) in enumerate(loader, 1):
            inputs, targets = inputs.to(args.device), targets.to(args.device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"epoch {epoch} step {step}/{len(loader)} loss {loss.item():.4f}", flush=True)
        model.eval()
        total = count = 0
        with torch.no_grad():
            for inputs, targets in valid_loader:
                outputs = model(inputs.to(args.device))
                total += F.cross_entropy(outputs, targets.to(args.device)).item() * len(inputs)
                count += len(inputs)
        print(f"epoch {epoch}: valid loss {total / count:.4f}, {time.time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
