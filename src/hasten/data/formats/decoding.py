"""Decoding and resizing of pictures, straight into the batch.

JPEG is decoded by ``simplejpeg`` (libjpeg-turbo) where it is installed and by Pillow otherwise; what the first refuses the
second may still read. Both leave Python's lock while they decode, and so does the resizing: threads help.

How a picture is resized: so that its shorter side fits, with an antialiasing (triangle) filter, then its middle is cut
out; what torchvision's ``Resize`` and ``CenterCrop`` do. A JPEG that is more than four times as big is first decoded at an
eighth, a quarter or half of its size, never to less than twice of what is wanted. Turning by EXIF is not done.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata

import numpy
import torch

from hasten.core.errors import ConfigurationError, format_error
from hasten.data.buffer_pool import acquire, thread_scratch
from hasten.data.source import BadRow
from hasten.data.validation import at_least

PIXELS = 178_956_970 // 4  # a quarter of what Pillow warns of twice: 44 million, 134 MB of colours
SPARE = 2  # a JPEG is decoded at no less than so many times the size that is wanted


def size_of(resize: int | tuple[int, int] | None, pixels: int = PIXELS) -> tuple[int, int] | None:
    """(height, width) of ``resize``, which may not have more pixels than a picture may.

    Raises:
        Refusal: it is no size, or too big; ``pixels`` is no number of pixels.
    """
    at_least("pixels=", pixels, 1)
    if resize is None:
        return None
    sides = resize if isinstance(resize, (tuple, list)) else (resize, resize)
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise ConfigurationError(f"resize is the side of a square or (height, width) in pixels, not {resize!r:.80}")
    if sides[0] * sides[1] > pixels:
        told = f"resize={resize!r} makes pictures of {sides[0] * sides[1]} pixels, and {pixels} are allowed"
        raise ConfigurationError(f"{told}; make them smaller, or allow more: pixels=")
    return tuple(sides)


def manner(size: tuple[int, int] | None, pixels: int) -> dict:
    """How pictures are decoded, for the identity of their source: decoders, and their versions, differ in the last bits."""
    decoders = ("simplejpeg", "pillow") if _simplejpeg() else ("pillow",)
    return {"pixels": pixels, "resize": size and list(size), "decoders": {name: _version(name) for name in decoders}}


def pictures_of(
    rows: Sequence[int],
    where: Sequence[str],
    contents: Iterator[bytes],
    size: tuple[int, int] | None,
    pixels: int,
) -> torch.Tensor | list[torch.Tensor]:
    """A batch of pictures: uint8, shape (rows, 3, *size), or a list of tensors where there is no size.

    Args:
        where: the place of each row, for people.
        contents: the files' bytes, in order; a file that cannot be read raises a ValueError.

    Raises:
        BadRow: a picture that cannot be read.
    """
    batch = [None] * len(rows) if size is None else acquire((len(rows), 3, *size), torch.uint8)
    for place, row in enumerate(rows):
        try:
            if size is None:
                batch[place] = torch.from_numpy(
                    numpy.ascontiguousarray(decoded(next(contents), pixels).transpose(2, 0, 1))
                )
            else:
                _fit(decoded(next(contents), pixels, size), batch[place], pixels)
        except ValueError as error:
            raise BadRow(row, where[place], str(error)) from None
    return batch


def decoded(content: bytes, pixels: int = PIXELS, size: tuple[int, int] | None = None) -> numpy.ndarray:
    """The colours of a JPEG or PNG file: uint8, shape (height, width, 3).

    Args:
        size: that it will be resized to: a big JPEG may be decoded smaller, and into memory that the same thread's next call overwrites.

    Raises:
        ValueError: damaged, too big, or no picture.
    """
    if content[:2] == b"\xff\xd8" and _simplejpeg():
        try:
            return _by_simplejpeg(content, pixels, size)
        except _TooBig:
            raise
        except ValueError:
            pass  # Pillow reads more kinds, and says better what is wrong
    return _by_pillow(content, pixels, size)


def _by_simplejpeg(content: bytes, pixels: int, size: tuple[int, int] | None) -> numpy.ndarray:
    jpeg = _simplejpeg()
    _check(*jpeg.decode_jpeg_header(content)[:2], pixels)
    if size is None:
        return jpeg.decode_jpeg(content)
    least = {"min_height": SPARE * size[0], "min_width": SPARE * size[1], "min_factor": 2}
    height, width = jpeg.decode_jpeg_header(content, **least)[:2]
    # colours have half the detail in most files; how they are enlarged cannot be seen once the picture is made smaller
    return jpeg.decode_jpeg(
        content, fastupsample=True, buffer=thread_scratch("jpeg", (height * width * 3,), torch.uint8).numpy(), **least
    )


def _by_pillow(content: bytes, pixels: int, size: tuple[int, int] | None) -> numpy.ndarray:
    try:
        from PIL import JpegImagePlugin, PngImagePlugin
    except ImportError:
        raise ConfigurationError("decoding this image needs the package pillow; pip install 'hasten[images]'") from None

    # not Image.open, whose own limit would speak first, and not say how big the picture is
    readers = {b"\xff\xd8\xff": JpegImagePlugin.JpegImageFile, b"\x89PN": PngImagePlugin.PngImageFile}
    if (reader := readers.get(content[:3])) is None:
        raise ValueError("it is no JPEG or PNG picture")
    try:
        with reader(io.BytesIO(content)) as image:
            _check(image.height, image.width, pixels)
            if image.mode.startswith("I"):
                raise ValueError("it has 16 bits a pixel; write it with 8")
            if size is not None:
                image.draft(image.mode, (SPARE * size[1], SPARE * size[0]))  # JPEG alone heeds it
            return numpy.array(image.convert("RGB"))
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # its readers of damaged files raise nearly anything
        raise ValueError(f"it cannot be decoded ({format_error(error)})") from None


class _TooBig(ValueError):
    """More pixels than are allowed."""


def _check(height: int, width: int, pixels: int, when: str = "") -> None:
    if height * width > pixels:
        allowed = f"more than the {pixels} that are allowed; say pixels={height * width} if that is right"
        raise _TooBig(f"it has {height} x {width} pixels{when}, {allowed}")


@cache
def _simplejpeg():
    """The module, or None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None  # not installed by its name, or not at all


def _fit(colours: numpy.ndarray, picture: torch.Tensor, pixels: int) -> None:
    """Resizes colours (height, width, 3) into a picture (3, height, width)."""
    (height, width), (new_height, new_width) = colours.shape[:2], picture.shape[1:]
    scale = max(new_height / height, new_width / width)
    whole = max(new_height, int(height * scale)), max(new_width, int(width * scale))
    _check(*whole, pixels, " when its shorter side is made to fit")  # a thin one becomes long
    layers = torch.from_numpy(colours).permute(2, 0, 1)[None]
    if whole != (height, width):
        layers = torch.nn.functional.interpolate(layers, whole, mode="bilinear", antialias=True)
    top, left = round((whole[0] - new_height) / 2), round((whole[1] - new_width) / 2)
    # NumPy copies in this thread alone; torch would wake its own threads for it
    numpy.copyto(picture.numpy(), layers[0, :, top : top + new_height, left : left + new_width].numpy())
