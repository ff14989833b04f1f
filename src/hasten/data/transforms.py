"""What is done to pictures in training, a whole batch at once: ``.batch(512).map(crop(4, mirror=True)).map(normalise(mean, std))``.

Functions for ``Pipeline.map`` after ``batch``; of a tuple they take the first part. Pictures stay in their own type until the
last pass, which writes the floats, and all is done in memory that was used before: fresh memory would cost more than the work.

No border is laid around a picture to crop it. Pictures lie one after the other, so a crop is the same number of values from another
beginning: one copy of a picture, shifted. What came in from its neighbours is then overwritten with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.buffer_pool import acquire
from hasten.data.rng import SampleRng

SEAM = 8  # bytes: half of them at the end of a row of pixels, half at the beginning of the next


def random_horizontal_flip() -> Callable:
    """Mirrors half of the pictures, by chance, left to right: any type, shape (rows, ..., height, width)."""
    return _flipped


def random_crop(padding: int, mirror: bool = False) -> Callable:
    """Moves every picture by chance, by up to ``padding`` pixels up or down and left or right; zeros come in from the border.

    The same as laying a border of zeros around it and cutting out a window of the old size: any type, shape (rows, ..., height, width).

    Args:
        mirror: does what ``flip()`` does on the way, which spares a copy.
    """
    if not isinstance(padding, int) or padding < 1:
        raise ConfigurationError(f"crop(padding) is in pixels, at least 1, not {padding!r}")
    return partial(_cropped, padding=padding, mirror=mirror)


def normalize(mean: float | Sequence[float], std: float | Sequence[float]) -> Callable:
    """``(value - mean) / std`` as float32; whole numbers (uint8) are taken as fractions of 255 first.

    Args:
        mean, std: one number, or one for each channel, which is the dimension after the rows.
    """
    means, stds = moments(mean, std)
    return partial(_normalised, means=means, stds=stds)


def moments(mean: float | Sequence[float], std: float | Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(means, deviations): one of each, or one for each channel.

    Raises:
        Refusal: they are not of the same number, or a deviation is not above 0.
    """
    means, stds = (tuple(numpy.atleast_1d(numpy.asarray(each, dtype=float)).tolist()) for each in (mean, std))
    if len(means) != len(stds):
        raise ConfigurationError(f"normalise() wants as many means as deviations, not {len(means)} and {len(stds)}")
    if min(stds) <= 0:
        raise ConfigurationError(f"normalise() divides by the deviations: they are above 0, not {min(stds):g}")
    return means, stds


# ---- what is done to a batch


def _flipped(batch, rng: SampleRng):
    pictures = _pictures(batch)
    return _replaced(batch, _mirror(_like(pictures).copy_(pictures), rng.bernoulli()))


def _cropped(batch, rng: SampleRng, *, padding: int, mirror: bool):
    pictures = _pictures(batch)
    top, left, mirrored = places(rng.integers(0, choices(padding)), padding)
    moved = _moved(pictures, (top - padding) * pictures.shape[-1] + left - padding)
    blank(moved, inside(top, left, padding, *pictures.shape[-2:], pictures.dtype.itemsize))
    return _replaced(batch, _mirror(moved, mirrored) if mirror else moved)


def _normalised(batch, *, means: tuple[float, ...], stds: tuple[float, ...]):
    return _replaced(batch, scaled(_pictures(batch), means, stds))


# ---- how


def scaled(pictures: torch.Tensor, means: tuple[float, ...], stds: tuple[float, ...]) -> torch.Tensor:
    """What ``normalise`` makes of pictures: converted, then scaled and shifted in place."""
    if len(means) not in (1, pictures.shape[1]):
        raise ConfigurationError(
            f"normalise() has {len(means)} means, and the pictures have {pictures.shape[1]} channels: {list(pictures.shape)}"
        )
    floats = acquire(pictures.shape, torch.float32).copy_(pictures)
    parts = floats.unbind(1) if len(means) > 1 else [floats]
    for part, (scale, shift) in zip(parts, terms(means, stds, pictures.dtype), strict=True):
        torch.add(torch.tensor(shift), part, alpha=scale, out=part)
    return floats


def terms(means: tuple[float, ...], stds: tuple[float, ...], dtype: torch.dtype) -> list[tuple[float, float]]:
    """(scale, shift) for values of a type, one pair for each mean."""
    unit = 1.0 if dtype.is_floating_point else 255.0
    return [(1 / (unit * std), -mean / std) for mean, std in zip(means, stds, strict=True)]


def _moved(pictures: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Every picture, read from so many values further on."""
    moved, size = _like(pictures), pictures[0].numel()
    last = (len(pictures) - 1) * size
    begins = torch.arange(0, last + 1, size) + shifts
    windows = pictures.contiguous().as_strided((last + 1, size), (1, 1))
    torch.index_select(windows, 0, begins.clamp(0, last), out=moved.view(-1, size))
    for row in (
        ((begins < 0) | (begins > last)).nonzero()[:, 0].tolist()
    ):  # at the ends of the batch, where no neighbour is
        moved[row] = pictures[row].roll(-int(shifts[row]))
    return moved


def choices(padding: int) -> int:
    """How many ways there are to place a window over a picture and its border, mirrored or not."""
    return 2 * (2 * padding + 1) ** 2


def places(numbers: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(top, left, whether mirrored) of choices by number; (padding, padding) is the picture where it was."""
    corner, sides = numbers >> 1, 2 * padding + 1
    return corner // sides, corner % sides, (numbers & 1).bool()


def inside(top: torch.Tensor, left: torch.Tensor, padding: int, height: int, width: int, itemsize: int) -> torch.Tensor:
    """Which bytes of a plane belong to the picture in windows that begin there: all ones or zeros, shape (rows, integers of a plane)."""
    down, across = _insides(padding, height, width, itemsize)
    return down.index_select(0, top).bitwise_and_(across.index_select(0, left))


def seams(left: torch.Tensor, padding: int) -> torch.Tensor:
    """Which of the last bytes of a row of pixels, and of the first of the next, belong to the picture in windows of uint8 that begin there.

    All ones or zeros, in one whole number for each window: int64, shape (rows,). For a ``padding`` of half a seam at most.
    """
    columns = torch.arange(-SEAM // 2, SEAM // 2)
    before = columns + (left - padding)[:, None]  # where a window begins further on, from there
    return ((columns < 0) == (before < 0)).to(torch.uint8).neg().view(torch.int64)[:, 0]


def blank(pictures: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The same memory, with zeros where it does not belong to the picture."""
    planes = pictures.view(len(pictures), -1, pictures.shape[-2] * pictures.shape[-1]).view(kept.dtype)
    planes.bitwise_and_(kept[:, None])
    return pictures


@lru_cache(maxsize=8)
def _insides(padding: int, height: int, width: int, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each beginning of a window, which bytes of a plane are inside from top to bottom, and from left to right.

    As the widest integers that a plane is made of, shape (2 * padding + 1, integers of a plane).
    """

    def within(length: int) -> torch.Tensor:
        values = torch.arange(2 * padding + 1)[:, None] - padding + torch.arange(length)
        return (values >= 0) & (values < length)

    down, across = within(height)[:, :, None], within(width).repeat_interleave(itemsize, 1)[:, None]
    planes = [each.expand(-1, height, width * itemsize).flatten(1).to(torch.uint8).neg() for each in (down, across)]
    return tuple(plane.view(torch.int64) if plane.shape[1] % 8 == 0 else plane for plane in planes)


def _mirror(pictures: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The same memory, the chosen pictures turned left to right."""
    rows, flat = chosen.nonzero()[:, 0], pictures.view(len(pictures), -1)
    some = torch.index_select(flat, 0, rows, out=acquire((len(rows), flat.shape[1]), flat.dtype))
    turned = some.view(-1, *pictures.shape[1:]).flip(-1).view(some.shape)
    flat.view(torch.uint8).numpy()[rows.numpy()] = turned.view(
        torch.uint8
    ).numpy()  # twelve times as fast as index_copy_
    return pictures


def _like(pictures: torch.Tensor) -> torch.Tensor:
    return acquire(pictures.shape, pictures.dtype)


def _pictures(batch) -> torch.Tensor:
    """The pictures of a batch."""
    pictures = batch[0] if isinstance(batch, tuple) else batch
    if isinstance(pictures, list):
        raise ConfigurationError("the pictures differ in size; give them one with resize=, or a map before batch()")
    if not isinstance(pictures, torch.Tensor):
        raise ConfigurationError(
            f"a batch is pictures, or a tuple that begins with them, not a {type(pictures).__name__}; name a target="
        )
    if pictures.ndim < 3:
        raise ConfigurationError(f"pictures have the shape (rows, ..., height, width), not {list(pictures.shape)}")
    return pictures


def _replaced(batch, pictures: torch.Tensor):
    return (pictures, *batch[1:]) if isinstance(batch, tuple) else pictures
