"""Fashion-MNIST (Xiao et al. 2017): 70,000 grayscale images of clothing, 28x28 pixels, ten classes.

The four official files: 60,000 images for training, 10,000 for validation.
"""

import gzip

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import Task
from hasten.workloads._data import File, download

ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FILES = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
MEAN, STD = 0.2860, 0.3530  # of the training pixels, from 0 to 1
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def fashion_mnist() -> Task:
    """A network of two convolutions on Fashion-MNIST."""
    return Task(
        model=TwoConvolutions,
        train_data=Clothes("train"),
        validation_data=Clothes("t10k"),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        metric="accuracy",
        target=0.88,
        batch_size=64,
        epochs=8,
        evaluate_every=20_000,
    )


class Clothes(Dataset):
    """Sample: (normalized float32 image of shape (1, 28, 28); class, 0 to 9). Split: "train" or "t10k"."""

    classes = CLASSES  # this and the next line are what an exported model says of its output and input
    image = {"height": 28, "width": 28, "channels": 1, "mean": (MEAN,), "std": (STD,)}

    def __init__(self, split: str):
        self.images = _read_idx(f"{split}-images-idx3-ubyte.gz", header=16).reshape(-1, 28, 28)
        self.labels = _read_idx(f"{split}-labels-idx1-ubyte.gz", header=8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.tensor(self.images[index], dtype=torch.float32).unsqueeze(0) / 255
        return (image - MEAN) / STD, int(self.labels[index])


class TwoConvolutions(nn.Sequential):
    """Two convolutions with max pooling and two linear layers, on images of shape (1, 28, 28)."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def _read_idx(name: str, header: int) -> numpy.ndarray:
    """The uint8 values of a gzipped IDX file after its header of ``header`` bytes, 1-d; downloads it if missing."""
    path = download(File(f"fashion-mnist/{name}", ADDRESS + name, FILES[name]))
    return numpy.frombuffer(gzip.decompress(path.read_bytes()), numpy.uint8, offset=header)
