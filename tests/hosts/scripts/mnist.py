"""A small convolutional network: argparse, DataLoader with a transform, test loop, StepLR, a checkpoint."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(count, 1, 12, 12, generator=generator)
        self.labels = (self.images[:, 0, :6].mean((1, 2)) > self.images[:, 0, 6:].mean((1, 2))).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return (self.images[index] - 0.1307) / 0.3081, int(self.labels[index])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(256, 2)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def train(args, model, loader, optimizer, epoch):
    model.train()
    for batch, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch * len(data)}/{len(loader.dataset)}]\tLoss: {loss.item():.6f}")


def test(model, loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    count = len(loader.dataset)
    accuracy = f"Accuracy: {correct}/{count} ({100.0 * correct / count:.0f}%)"
    print(f"\nTest set: Average loss: {loss / count:.4f}, {accuracy}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--count", type=int, default=640)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    torch.manual_seed(1)
    train_loader = DataLoader(Digits(args.count, 1), batch_size=64, shuffle=True)
    test_loader = DataLoader(Digits(128, 2), batch_size=128)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
