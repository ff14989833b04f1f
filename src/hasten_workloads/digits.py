"""Handwritten digits, 8x8 grey, 1797 of them. They come with scikit-learn, so this works offline everywhere."""

import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import Task


def digits() -> Task:
    """A perceptron with one hidden layer on scikit-learn's digits: half of them to learn from, half to be judged by."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(images, labels, test_size=0.5, stratify=labels, random_state=0)
    return Task(
        model=Perceptron,
        train_data=Digits(train_images, train_labels),
        validation_data=Digits(test_images, test_labels),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        metric="accuracy",
        target=0.96,
        batch_size=32,
        epochs=80,
    )


class Digits(Dataset):
    """Sample: (float32 image of shape (64,), from 0 to 1; digit)."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.tensor(self.images[index], dtype=torch.float32) / 16, int(self.labels[index])


class Perceptron(nn.Sequential):
    """64 pixels, one hidden layer of 64, 10 digits."""

    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
