"""Augmentation of whole batches of images: ``.batch(512).map(random_crop(4, mirror=True)).map(normalize(mean, std))``.

These functions are for ``Pipeline.map`` after ``batch``. They transform the batch, or the first part of a tuple. All
results are written into reused memory, because fresh memory would take longer than the computation. Where the samples
lie on a GPU, they compute there: with the same random numbers, and to the same bits but for the rounding of
``normalize``.

A crop does not pad images. Images lie one after the other in memory, so a crop is the same number of values from
another start: one copy per image. Values that come from a neighboring row or image are then set to zero.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.array_source import gathered, signed
from hasten.data.buffer_pool import acquire
from hasten.data.rng import SampleRng
from hasten.data.validation import at_least
from hasten.utils.batch import copy_to_device


def random_horizontal_flip() -> Callable:
    """Returns a map that flips each image of a batch left to right with probability 1/2: any dtype, shape (rows, ...,
    height, width).
    """
    return _random_flip


def random_crop(padding: int, mirror: bool = False) -> Callable:
    """Returns a map that shifts each image of a batch by up to ``padding`` pixels in both directions, with zeros beyond
    the border.

    Same as padding with zeros and cropping a window of the original size: any dtype, shape (rows, ..., height, width).

    Args:
        padding: Pixels, at least 1.
        mirror: Also applies ``random_horizontal_flip()``, which saves a copy.

    Raises:
        ConfigurationError: ``padding`` is not an integer of at least 1.
    """
    at_least("random_crop(padding), in pixels,", padding, 1)
    return partial(_random_crop, padding=padding, mirror=mirror)


def normalize(mean: float | Sequence[float], std: float | Sequence[float]) -> Callable:
    """Returns a map from images to ``(value - mean) / std`` as float32; integers (uint8) are first divided by 255.

    Args:
        mean: One number, or one for each channel (dimension 1).
        std: The same, above 0.

    Raises:
        ConfigurationError: ``mean`` and ``std`` differ in length, a number is not finite, or a ``std`` is not above 0.
            In the pipeline: the images have another number of channels.
    """
    means, stds = (tuple(numpy.atleast_1d(numpy.asarray(value, dtype=float)).tolist()) for value in (mean, std))
    if len(means) != len(stds):
        numbers = f"{len(means)} and {len(stds)}"
        raise ConfigurationError(f"normalize() requires as many values of mean as of std, not {numbers}")
    if not all(map(math.isfinite, means)):
        raise ConfigurationError(f"normalize() requires finite numbers as mean, not {mean!r:.80}")
    if not all(0 < value < math.inf for value in stds):
        raise ConfigurationError(f"normalize() divides by std, which must be finite and above 0, not {std!r:.80}")
    return partial(_normalize, means=means, stds=stds)


# ---- functions of a batch


def _random_flip(batch: Any, rng: SampleRng) -> Any:
    images, chosen = images_of(batch), rng.bernoulli()
    if not images.is_cpu:
        return _replaced(batch, flip_on_device(images, chosen))
    return _replaced(batch, _flip(acquire(images.shape, images.dtype).copy_(images), chosen))


def _random_crop(batch: Any, rng: SampleRng, *, padding: int, mirror: bool) -> Any:
    images, sides = images_of(batch), 2 * padding + 1
    choices = rng.integers(0, 2 * sides**2)  # each of the crops of a padded image, flipped or not
    top, left, flipped = choices // 2 // sides, choices // 2 % sides, choices % 2 == 1
    if not images.is_cpu:
        moved = crop_on_device(images, top, left, padding)
        return _replaced(batch, flip_on_device(moved, flipped) if mirror else moved)
    moved = _shifted(images, (top - padding) * images.shape[-1] + left - padding)
    _zero_outside(moved, top, left, padding)
    return _replaced(batch, _flip(moved, flipped) if mirror else moved)


def _normalize(batch: Any, *, means: tuple[float, ...], stds: tuple[float, ...]) -> Any:
    images = images_of(batch)
    if len(means) not in (1, images.shape[1]):
        shape = f"{images.shape[1]} channels: shape {list(images.shape)}; pass a mean and std for each, or one for all"
        raise ConfigurationError(f"normalize() has {len(means)} means, and the images have {shape}")
    floats = (
        acquire(images.shape, torch.float32).copy_(images) if images.is_cpu else images.to(torch.float32, copy=True)
    )
    channels = floats.unbind(1) if len(means) > 1 else [floats]
    unit = 1.0 if images.dtype.is_floating_point else 255.0
    for channel, mean, std in zip(channels, means, stds, strict=True):
        torch.add(channel.new_full((), -mean / std), channel, alpha=1 / (unit * std), out=channel)
    return _replaced(batch, floats)


# ---- computation on any device


def runs_on_device(function: Callable) -> bool:
    """Whether a function is one of this module, which computes where the images lie."""
    return getattr(getattr(function, "func", function), "__module__", None) == __name__


def crop_on_device(images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, padding: int) -> torch.Tensor:
    """Returns the windows of the images' own size that begin at (top, left) of the images padded with zeros."""
    padded = torch.nn.functional.pad(signed(images), (padding,) * 4)
    planes = padded.view(len(images), -1, *padded.shape[-2:])
    height, width = images.shape[-2:]
    rows = copy_to_device(top[:, None] + torch.arange(height), images.device)
    columns = copy_to_device(left[:, None] + torch.arange(width), images.device)
    numbers = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(planes.shape[1], device=images.device)[:, None, None]
    windows = planes[numbers, channels, rows[:, None, :, None], columns[:, None, None, :]]
    return windows.view(images.dtype).view(images.shape)


def flip_on_device(images: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns the images, those where ``chosen`` (bool, shape (rows,)) is True flipped left to right."""
    chosen = copy_to_device(chosen, images.device).view(-1, *[1] * (images.ndim - 1))
    return torch.where(chosen, signed(images).flip(-1), signed(images)).view(images.dtype)


# ---- computation on the CPU


def _shifted(images: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Returns images of which each is read ``shifts`` (int64, shape (rows,)) values later in memory than it begins."""
    moved, size = acquire(images.shape, images.dtype), images[0].numel()
    last = (len(images) - 1) * size
    begins = torch.arange(0, last + 1, size) + shifts
    windows = images.contiguous().as_strided((last + 1, size), (1, 1))
    torch.index_select(signed(windows), 0, begins.clamp(0, last), out=signed(moved.view(-1, size)))
    outside = (begins < 0) | (begins > last)  # at the ends of the batch there is no neighboring image
    for row in outside.nonzero()[:, 0].tolist():
        moved[row] = images[row].roll(-int(shifts[row]))
    return moved


def _zero_outside(images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, padding: int) -> None:
    """Sets the values to zero, in place, that windows at (top, left) of padded images read from the padding."""
    rows, columns = _axis_masks(padding, *images.shape[-2:], images.dtype.itemsize)
    masks = rows.index_select(0, top).bitwise_and_(columns.index_select(0, left))
    planes = images.view(len(images), -1, images.shape[-2] * images.shape[-1]).view(masks.dtype)
    planes.bitwise_and_(masks[:, None])


@lru_cache(maxsize=8)
def _axis_masks(padding: int, height: int, width: int, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (vertical, horizontal) masks for every start of a crop: bytes of a plane inside the image are 255. As
    int64 if 8 divides the bytes of a plane, else uint8; shape (2 * padding + 1, integers per plane).
    """

    def inside(length: int) -> torch.Tensor:
        positions = torch.arange(2 * padding + 1)[:, None] - padding + torch.arange(length)
        return (positions >= 0) & (positions < length)

    def plane(mask: torch.Tensor) -> torch.Tensor:
        mask = mask.expand(-1, height, width * itemsize).flatten(1).to(torch.uint8).neg()
        return mask.view(torch.int64) if mask.shape[1] % 8 == 0 else mask

    return plane(inside(height)[:, :, None]), plane(inside(width).repeat_interleave(itemsize, 1)[:, None])


def _flip(images: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Flips the images where ``chosen`` (bool, shape (rows,)) is True left to right, in place."""
    rows, flat = chosen.nonzero()[:, 0], images.view(len(images), -1)
    selected = gathered(flat, rows)
    flipped = signed(selected).view(-1, *images.shape[1:]).flip(-1).view(selected.shape)
    # assignment in NumPy is twelve times as fast as index_copy_
    flat.view(torch.uint8).numpy()[rows.numpy()] = flipped.view(torch.uint8).numpy()
    return images


def images_of(batch: Any) -> torch.Tensor:
    """The images of a batch; ConfigurationError if it has none of one size and shape (rows, ..., height, width)."""
    images = batch[0] if isinstance(batch, tuple) else batch
    if isinstance(images, list):
        raise ConfigurationError("the images differ in size; resize them with resize=, or in a map before batch()")
    if not isinstance(images, torch.Tensor):
        given = f"{type(images).__name__}; pass a target="
        raise ConfigurationError(f"a batch must be images, or a tuple whose first part is images, not a {given}")
    if images.ndim < 3:
        raise ConfigurationError(f"images must have the shape (rows, ..., height, width), not {list(images.shape)}")
    return images


def _replaced(batch: Any, images: torch.Tensor) -> Any:
    return (images, *batch[1:]) if isinstance(batch, tuple) else images
