"""Images in memory, augmented while they are gathered into a batch.

``arrays(...).batch(...).map(random_crop(4, mirror=True)).map(normalize(...))`` passes over every image five times. Here
the images are stored twice, original and mirrored, each as one contiguous row of values. A mirrored, shifted image is
then the same number of values from another start, and gathering it is the copy that a batch needs anyway. The batches
are identical to the bit.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data import transforms
from hasten.data.array_source import Arrays
from hasten.data.batch_builder import Map
from hasten.data.buffer_pool import alloc_huge, thread_scratch
from hasten.data.pipeline import Pipeline
from hasten.data.rng import SampleRng
from hasten.data.source import Source
from hasten.data.transforms import SEAM
from hasten.data.unpacking import (
    FOOTER_BYTES,
    can_unpack,
    page_faults,
    plane_footers,
    retain_freed_memory,
    unpack_planes,
)

FRESH_TRIES = 3  # batches in fresh memory before the kernel of unpacking.py gives way to two passes
TWO_PASS_BATCHES = 256  # batches in two passes before the kernel is tried again
MAX_FRESH_FRACTION = 0.1  # of a batch's memory


def augmented_images(
    images: Any,
    labels: Any = None,
    *,
    padding: int = 4,
    mirror: bool = True,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
) -> Pipeline:
    """Images in memory, randomly cropped, flipped and normalized: ``random_crop`` and ``normalize``, twice as fast.

    A batch is float32, shape (rows, ..., height, width), or with labels the tuple (images, labels).

    Args:
        images: Tensor, NumPy array or path of a ``.npy`` file, shape (n, ..., height, width). With ``mirror`` two
            copies are held in memory.
        labels: One per image, as for ``arrays``.
        padding: As in ``random_crop``.
        mirror: As in ``random_crop``.
        mean: As in ``normalize``.
        std: As in ``normalize``.

    Raises:
        ConfigurationError: As for these functions; also for a map before ``batch``, where no images exist yet.
    """
    source = RowNumbers(Arrays(images if labels is None else (images, labels)))
    transforms.random_crop(padding, mirror)  # checks the arguments
    gather = Gather(source.images, padding, mirror, *transforms.moments(mean, std))
    return AugmentedPipeline(source, batch_maps=(Map(gather, stage=0),))


class AugmentedPipeline(Pipeline):
    """A pipeline that creates its images a batch at a time, so that ``map`` is allowed after ``batch`` only."""

    def map(self, function: Callable) -> Pipeline:
        if self.batch_size is None:
            raise ConfigurationError("augmented_images() makes images a batch at a time; call .map() after .batch()")
        return super().map(function)


class RowNumbers(Source):
    """A source that returns row indices in place of images, which ``Gather`` replaces; and the labels."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        labeled = isinstance(arrays.columns, tuple)
        self.images: torch.Tensor = arrays.columns[0] if labeled else arrays.columns
        self.labels = Arrays(arrays.columns[1:]) if labeled else None
        if not isinstance(self.images, torch.Tensor) or self.images.ndim < 3:
            raise ConfigurationError("augmented_images() expects one array of shape (rows, ..., height, width)")

    def __len__(self) -> int:
        return len(self.arrays)

    def read(self, rows: numpy.ndarray) -> Any:
        indices = torch.from_numpy(rows)
        return indices if self.labels is None else (indices, *self.labels.read(rows))

    def fingerprint(self) -> dict:
        return {"numbered": self.arrays.fingerprint()}


class Gather:
    """Maps row indices to augmented images, drawing the same random numbers as ``random_crop``.

    What each random choice means is looked up in tables. Rows of zeros after every plane provide the values of windows
    that begin above or below the image. Windows that begin further left or right contain the ends of other rows of
    pixels, which are set to zero: only at the *seams* between rows if these are aligned integers of a plane.

    Where a kernel converts uint8 to floats in one pass (``unpacking.py``), every gathered plane has a footer.
    """

    def __init__(
        self, images: torch.Tensor, padding: int, mirror: bool, means: tuple[float, ...], stds: tuple[float, ...]
    ) -> None:
        self.shape, self.means, self.stds = images.shape[1:], means, stds
        self.num_choices = transforms.num_choices(padding)
        *planes, height, width = self.shape
        self.planes, self.plane = math.prod(planes), height * width
        self.footers: numpy.ndarray | None = None
        if _can_have_footers(images, means, stds):
            self.footers = plane_footers(means, stds, self.planes).numpy()
        self.pitch = self.plane if self.footers is None else self.plane + FOOTER_BYTES
        stored = self.plane + padding * width
        self.size = self.planes * stored
        first = padding * (width + 1)  # space before the first image and after the last, for windows that exceed them
        copy = len(images) * self.size
        self.values = alloc_huge((1 + mirror) * copy + 2 * first, images.dtype)
        self.values[:first] = self.values[-first:] = 0
        for index, version in enumerate([images, images.flip(-1)] if mirror else [images]):
            begin = first + index * copy
            rows = self.values[begin : begin + copy].view(-1, stored)
            rows[:, : self.plane] = version.reshape(-1, self.plane)
            rows[:, self.plane :] = 0
        top, left, mirrored = transforms.decode_choices(torch.arange(self.num_choices), padding)
        first_of_choice: Any = first
        if mirror:
            left = torch.where(mirrored, 2 * padding - left, left)  # random_crop shifts first and flips then
            first_of_choice = first + mirrored * copy
        begins = first_of_choice + (top - padding) * width + left - padding
        self.begins = begins[:, None] + torch.arange(self.planes) * stored  # of each plane
        self.seams: torch.Tensor | None = None
        self.inside: torch.Tensor | None = None
        if self.footers is not None and width % SEAM == 0 and 2 * padding <= SEAM:
            self.seams = transforms.seam_masks(left, padding)
        else:
            self.inside = transforms.inside_masks(top, left, padding, height, width, images.dtype.itemsize)
        self.tries = FRESH_TRIES
        if self.footers is not None:
            retain_freed_memory()

    def __call__(self, batch: Any, rng: SampleRng) -> Any:
        labeled = isinstance(batch, tuple)
        rows = batch[0] if labeled else batch
        choices = rng.integers(0, self.num_choices)
        planes = self._gather(choices, rows)
        if self.footers is not None and self.tries > 0:
            footers = planes.numpy()[:, self.plane :].view(numpy.int64)  # NumPy allows unaligned integers, torch not
            footers.reshape(len(rows), self.planes)[:] = self.footers
            images = self._unpack(planes).view(len(rows), *self.shape)
        else:
            self.tries = self.tries - 1 if self.tries > -TWO_PASS_BATCHES else FRESH_TRIES
            images = transforms.scaled(planes[:, : self.plane].view(len(rows), *self.shape), self.means, self.stds)
        return (images, *batch[1:]) if labeled else images

    def _gather(self, choices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the shifted planes of ``rows``, shape (planes, values + footer); the next call reuses the memory."""
        count, plane = len(rows), self.plane
        begins = self.begins.index_select(0, choices).add_(rows.unsqueeze(1), alpha=self.size).view(-1)
        used = len(begins) * self.pitch * self.values.dtype.itemsize
        memory = thread_scratch("planes", (SEAM + used,), torch.uint8)
        before = 0 if self.seams is None else SEAM // 2  # bytes, so that seams are aligned integers of the memory
        planes = memory[before : before + used].view(self.values.dtype).view(-1, self.pitch)
        windows = self.values.as_strided((len(self.values) - plane + 1, plane), (1, 1))
        torch.index_select(windows, 0, begins, out=planes[:, :plane])
        if self.seams is not None:
            pitch, width = self.pitch // SEAM, self.shape[-1] // SEAM
            size, strides = (count, self.planes, self.shape[-2] + 1), (self.planes * pitch, pitch, width)
            integers = memory.view(torch.int64).as_strided(size, strides)
            integers.bitwise_and_(self.seams.index_select(0, choices).view(-1, 1, 1))
        elif self.inside is not None:
            masks = thread_scratch("masks", (count, self.inside.shape[1]), self.inside.dtype)
            torch.index_select(self.inside, 0, choices, out=masks)
            planes[:, :plane].view(count, self.planes, plane).view(masks.dtype).bitwise_and_(masks[:, None])
        return planes

    def _unpack(self, planes: torch.Tensor) -> torch.Tensor:
        """Converts planes with footers to normalized float32, in new memory from torch. Where that memory causes page
        faults, the two-pass way is faster, so fewer batches will use this one.
        """
        before = page_faults()
        floats = unpack_planes(planes)
        fresh = (page_faults() - before) * mmap.PAGESIZE / floats.nbytes
        self.tries = self.tries - 1 if fresh > MAX_FRESH_FRACTION else min(self.tries + 1, FRESH_TRIES)
        return floats


def _can_have_footers(images: torch.Tensor, means: tuple[float, ...], stds: tuple[float, ...]) -> bool:
    *planes, height, width = images.shape[1:]
    fits = height * width % FOOTER_BYTES == 0 and (len(means) == 1 or planes[:1] == [len(means)])
    return images.dtype == torch.uint8 and fits and can_unpack(means, stds)
