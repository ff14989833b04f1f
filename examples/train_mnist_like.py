"""Trains a small network on images in the format of Fashion-MNIST: 28 x 28 gray values, ten classes.

The images are generated, so that nothing is downloaded. This is a training script as people write it, in plain PyTorch;
it knows nothing of hasten. About 20 seconds on a CPU::

    python examples/train_mnist_like.py
    hasten tune -- python examples/train_mnist_like.py
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def generate_images(count, generator):
    """Images (count, 1, 28, 28) uint8 and labels (count,): a smooth pattern for each class, moved, faded and noisy."""
    patterns = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(1))
    patterns = F.interpolate(patterns, size=(36, 36), mode="bicubic", align_corners=False).clamp(0, 1)
    labels = torch.randint(0, 10, (count,), generator=generator)
    top, left = torch.randint(0, 9, (2, count), generator=generator)
    rows = top[:, None] + torch.arange(28)
    columns = left[:, None] + torch.arange(28)
    images = patterns[labels, 0][torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    images = images * (0.2 + 0.8 * torch.rand(count, 1, 1, generator=generator))
    images = images + 0.38 * torch.randn(images.shape, generator=generator)
    return (images.clamp(0, 1) * 255).to(torch.uint8)[:, None], labels


def normalize(images):
    return (images.float() / 255 - 0.3) / 0.3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, 10)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        x = self.dropout(F.relu(self.fc2(x)))
        return self.fc3(x)


def train(model, loader, optimizer):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


def evaluate(model, loader):
    model.eval()
    correct = 0
    for images, labels in loader:
        correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    generator = torch.Generator().manual_seed(2)
    train_images, train_labels = generate_images(30_000, generator)
    val_images, val_labels = generate_images(5_000, generator)
    train_data = TensorDataset(normalize(train_images), train_labels)
    val_data = TensorDataset(normalize(val_images), val_labels)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_data, batch_size=args.batch_size)

    torch.manual_seed(args.seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer)
        scheduler.step()
        print(f"epoch {epoch}: validation accuracy {evaluate(model, val_loader):.3f}", flush=True)


if __name__ == "__main__":
    main()
