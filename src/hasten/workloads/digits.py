"""1,797 handwritten digits, 8x8 pixels, grayscale. They are part of the package (47 kB): no download is needed.

The images are the test set of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, UCI, CC BY 4.0),
as in scikit-learn's ``load_digits``. The split is that of ``train_test_split(test_size=0.5, stratify=labels,
random_state=0)``.
"""

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import ConfigurationError, Task
from hasten.workloads._data import find_file


def digits() -> Task:
    """A perceptron with one hidden layer: 898 digits for training, 899 for validation."""
    path = find_file("digits.npz")
    if path is None:
        raise ConfigurationError(
            "digits.npz is missing; install hasten, or copy its workloads/data/digits.npz to ~/.cache/hasten/digits.npz"
        )
    with numpy.load(path) as file:
        arrays = dict(file)
    return Task(
        model=Perceptron,
        train_data=Digits(arrays["train_images"], arrays["train_labels"]),
        validation_data=Digits(arrays["test_images"], arrays["test_labels"]),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        metric="accuracy",
        target=0.96,
        batch_size=32,
        epochs=80,
    )


class Digits(Dataset):
    """Sample: (float32 image of shape (64,), from 0 to 1; digit). ``images`` are uint8, (n, 64), from 0 to 16."""

    classes = tuple("0123456789")  # this and the next line are what an exported model says of its output and input
    image = {"height": 8, "width": 8, "channels": 1}

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
