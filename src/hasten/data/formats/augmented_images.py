"""Small pictures that lie in memory, augmented as they are gathered.

``arrays(...).batch(...).map(crop(4, mirror=True)).map(normalise(...))`` goes over every picture five times. Here the pictures are kept
twice, as they are and mirrored, one after the other in one row of values; so a mirrored, moved picture is that many values from
another beginning, and gathering it is the copy that has to be made anyway. The batches are the same, bit for bit.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.batch_builder import Map
from hasten.data.buffer_pool import alloc_huge, thread_scratch
from hasten.data.formats.arrays import Arrays
from hasten.data.pipeline import Pipeline
from hasten.data.rng import SampleRng
from hasten.data.source import Source
from hasten.data.transforms import SEAM, choices, inside, moments, places, random_crop, scaled, seams
from hasten.data.unpacking import (
    FOOTER_BYTES,
    can_unpack,
    page_faults,
    plane_footers,
    retain_freed_memory,
    unpack_planes,
)

TRIES, REST = (
    3,
    256,
)  # batches: in fresh memory before they are made in two passes, and in two passes before one is tried again
MOST_FRESH = 0.1  # of a batch


def augmented_images(
    images,
    labels=None,
    *,
    padding: int = 4,
    mirror: bool = True,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
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
    random_crop(padding, mirror)  # refuses what cannot be
    gather = Gather(source.images, padding, mirror, *moments(mean, std))
    return Stored(source, batch_maps=(Map(gather, stage=0),))


class Stored(Pipeline):
    """A pipeline whose pictures come into being with the batch."""

    def map(self, function: Callable) -> Pipeline:
        if self.batch_size is None:
            raise ConfigurationError(
                "augmented_images() makes its pictures a batch at a time; put .map() after .batch()"
            )
        return super().map(function)


class Numbered(Source):
    """Row numbers in the pictures' place, and the labels."""

    def __init__(self, arrays: Arrays):
        self.arrays = arrays
        labelled = isinstance(arrays.columns, tuple)
        self.images = arrays.columns[0] if labelled else arrays.columns
        self.labels = Arrays(arrays.columns[1:]) if labelled else None
        if not isinstance(self.images, torch.Tensor) or self.images.ndim < 3:
            raise ConfigurationError(
                "augmented_images() wants pictures as one array of the shape (rows, ..., height, width)"
            )

    def __len__(self) -> int:
        return len(self.arrays)

    def read(self, rows: numpy.ndarray):
        numbers = torch.from_numpy(rows)
        return numbers if self.labels is None else (numbers, *self.labels.read(rows))

    def fingerprint(self) -> dict:
        return {"numbered": self.arrays.fingerprint()}


class Gather:
    """``(row numbers) -> pictures``, drawing the same numbers as ``crop``. What a choice means is looked up.

    Rows of zeros lie below every plane, so a window that begins higher or lower gets them from there. One that begins further left or
    right gets the ends of other rows of pixels, which are blanked: at the *seams* alone where these are words of a plane.

    Where one pass can make floats of uint8 (``unpacking.py``), every gathered plane gets a footer.
    """

    def __init__(
        self, images: torch.Tensor, padding: int, mirror: bool, means: tuple[float, ...], stds: tuple[float, ...]
    ):
        self.shape, self.choices, self.means, self.stds = images.shape[1:], choices(padding), means, stds
        *planes, height, width = self.shape
        self.planes, self.plane = math.prod(planes), height * width
        self.footers = (
            plane_footers(means, stds, self.planes).numpy() if _can_have_footers(images, means, stds) else None
        )
        self.pitch = self.plane if self.footers is None else self.plane + FOOTER_BYTES
        stored = self.plane + padding * width
        self.size = self.planes * stored
        first = padding * (width + 1)  # room for what a window at the very beginning, or end, reaches over
        copy = len(images) * self.size
        self.values = alloc_huge((1 + mirror) * copy + 2 * first, images.dtype)
        self.values[:first] = self.values[-first:] = 0
        for number, each in enumerate([images, images.flip(-1)] if mirror else [images]):
            begin = first + number * copy
            there = self.values[begin : begin + copy].view(-1, stored)
            there[:, : self.plane] = each.reshape(-1, self.plane)
            there[:, self.plane :] = 0
        top, left, mirrored = places(torch.arange(self.choices), padding)
        if mirror:
            left = torch.where(mirrored, 2 * padding - left, left)  # crop moves first, and mirrors then
            first += mirrored * copy
        begins = first + (top - padding) * width + left - padding
        self.begins = begins[:, None] + torch.arange(self.planes) * stored  # of each plane
        self.seams = self.inside = None
        if self.footers is not None and width % SEAM == 0 and 2 * padding <= SEAM:
            self.seams = seams(left, padding)
        else:
            self.inside = inside(top, left, padding, height, width, images.dtype.itemsize)
        self.tries = TRIES
        if self.footers is not None:
            retain_freed_memory()

    def __call__(self, batch, rng: SampleRng):
        labelled = isinstance(batch, tuple)
        numbers = batch[0] if labelled else batch
        chosen, count = rng.integers(0, self.choices), len(numbers)
        planes = self._gathered(chosen, numbers)
        if self.footers is not None and self.tries > 0:
            ends = planes.numpy()[:, self.plane :].view(
                numpy.int64
            )  # NumPy writes whole numbers anywhere, torch does not
            ends.reshape(count, self.planes)[:] = self.footers
            made = self._unpacked(planes).view(count, *self.shape)
        else:
            self.tries = self.tries - 1 if self.tries > -REST else TRIES
            made = scaled(planes[:, : self.plane].view(count, *self.shape), self.means, self.stds)
        return (made, *batch[1:]) if labelled else made

    def _gathered(self, chosen: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The planes of all pictures, (planes, values and perhaps a footer), in memory that the next call overwrites."""
        begins = self.begins.index_select(0, chosen).add_(numbers.unsqueeze(1), alpha=self.size).view(-1)
        used = len(begins) * self.pitch * self.values.dtype.itemsize
        memory = thread_scratch("planes", (SEAM + used,), torch.uint8)
        before = 0 if self.seams is None else SEAM // 2  # bytes, so that seams are whole words of the memory
        planes = memory[before : before + used].view(self.values.dtype).view(-1, self.pitch)
        windows = self.values.as_strided((len(self.values) - self.plane + 1, self.plane), (1, 1))
        torch.index_select(windows, 0, begins, out=planes[:, : self.plane])
        if self.seams is None:
            kept = torch.index_select(
                self.inside,
                0,
                chosen,
                out=thread_scratch("kept", (len(chosen), self.inside.shape[1]), self.inside.dtype),
            )
            planes[:, : self.plane].view(len(chosen), self.planes, self.plane).view(kept.dtype).bitwise_and_(
                kept[:, None]
            )
        else:
            pitch, width = self.pitch // SEAM, self.shape[-1] // SEAM
            words = memory.view(torch.int64).as_strided(
                (len(chosen), self.planes, self.shape[-2] + 1), (self.planes * pitch, pitch, width)
            )
            words.bitwise_and_(self.seams.index_select(0, chosen).view(-1, 1, 1))
        return planes

    def _unpacked(self, planes: torch.Tensor) -> torch.Tensor:
        """The floats, in memory of torch's own; a try less when it has to come from the system, as a second pass is cheaper."""
        before = page_faults()
        made = unpack_planes(planes)
        fresh = (page_faults() - before) * mmap.PAGESIZE / made.nbytes
        self.tries = self.tries - 1 if fresh > MOST_FRESH else min(self.tries + 1, TRIES)
        return made


def _can_have_footers(images: torch.Tensor, means: tuple[float, ...], stds: tuple[float, ...]) -> bool:
    *planes, height, width = images.shape[1:]
    fits = height * width % FOOTER_BYTES == 0 and (len(means) == 1 or planes[:1] == [len(means)])
    return images.dtype == torch.uint8 and fits and can_unpack(means, stds)
