"""Small pictures that lie in memory, augmented as they are gathered.

``arrays(...).batch(...).map(crop(4, mirror=True)).map(normalise(...))`` goes over every picture five times. Here the pictures are kept
twice, as they are and mirrored, one after the other in one row of values; so a mirrored, moved picture is that many values from
another beginning, and gathering it is the copy that has to be made anyway. The batches are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
import torch

from hasten.contract.errors import Refusal
from hasten.data.chance import Chance
from hasten.data.formats.in_memory import Arrays
from hasten.data.making import Map
from hasten.data.memory import taken
from hasten.data.pipeline import Pipeline
from hasten.data.source import Source
from hasten.data.transforms import blank, choices, crop, inside, normalise, places


def augmented(
    images, labels=None, *, padding: int = 4, mirror: bool = True, mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0
) -> Pipeline:
    """Pictures in memory, cropped, mirrored and normalised: what ``crop`` and ``normalise`` do to ``arrays``, about twice as fast.

    A batch is float32, shape (rows, ..., height, width), or with labels the tuple (pictures, labels).

    Args:
        images: a tensor, a NumPy array or the path of an ``.npy`` file, shape (n, ..., height, width); held in memory twice, as they
            are and mirrored.
        labels: one a picture; as for ``arrays``.
        padding, mirror: as in ``crop``.
        mean, std: as in ``normalise``.

    Raises:
        Refusal: as those, and for a map before ``batch``: there are no pictures yet.
    """
    source = Numbered(Arrays(images if labels is None else (images, labels)))
    crop(padding, mirror)  # refuses what cannot be
    gather = Gather(source.images, padding, mirror, normalise(mean, std))
    return Stored(source, batch_maps=(Map(gather, stage=0),))


class Stored(Pipeline):
    """A pipeline whose pictures come into being with the batch."""

    def map(self, function: Callable) -> Pipeline:
        if self.batch_size is None:
            raise Refusal("augmented() makes its pictures a batch at a time; put .map() after .batch()")
        return super().map(function)


class Numbered(Source):
    """Row numbers in the pictures' place, and the labels."""

    def __init__(self, arrays: Arrays):
        self.arrays = arrays
        labelled = isinstance(arrays.columns, tuple)
        self.images = arrays.columns[0] if labelled else arrays.columns
        self.labels = Arrays(arrays.columns[1:]) if labelled else None
        if not isinstance(self.images, torch.Tensor) or self.images.ndim < 3:
            raise Refusal("augmented() wants pictures as one array of the shape (rows, ..., height, width)")

    def __len__(self) -> int:
        return len(self.arrays)

    def read(self, rows: numpy.ndarray):
        numbers = torch.from_numpy(rows)
        return numbers if self.labels is None else (numbers, *self.labels.read(rows))

    def identity(self) -> dict:
        return {"numbered": self.arrays.identity()}


class Gather:
    """``(row numbers) -> pictures``, drawing the same numbers as ``crop``. What a choice means is looked up."""

    def __init__(self, images: torch.Tensor, padding: int, mirror: bool, finish: Callable):
        self.shape, self.size, self.choices, self.finish = images.shape[1:], images[0].numel(), choices(padding), finish
        height, width = self.shape[-2:]
        first = padding * (width + 1)  # room for what a window at the very beginning, or end, reaches over
        self.values = torch.zeros((1 + mirror) * images.numel() + 2 * first, dtype=images.dtype)
        for number, each in enumerate([images, images.flip(-1)] if mirror else [images]):
            begin = first + number * images.numel()
            self.values[begin : begin + images.numel()] = each.flatten()
        top, left, mirrored = places(torch.arange(self.choices), padding)
        if mirror:
            left = torch.where(mirrored, 2 * padding - left, left)  # crop moves first, and mirrors then
            first += mirrored * images.numel()
        self.begins = first + (top - padding) * width + left - padding
        self.inside = inside(top, left, padding, height, width, images.dtype.itemsize)

    def __call__(self, batch, chance: Chance):
        labelled = isinstance(batch, tuple)
        numbers = batch[0] if labelled else batch
        chosen = chance.integers(0, self.choices)
        begins = self.begins.index_select(0, chosen).add_(numbers, alpha=self.size)
        windows = self.values.as_strided((len(self.values) - self.size + 1, self.size), (1, 1))
        pictures = taken((len(numbers), *self.shape), self.values.dtype)
        torch.index_select(windows, 0, begins, out=pictures.view(-1, self.size))
        made = self.finish(blank(pictures, self.inside.index_select(0, chosen)))
        return (made, *batch[1:]) if labelled else made
