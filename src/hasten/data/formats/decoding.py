"""Decodes and resizes images, directly into the batch.

JPEG is decoded by ``simplejpeg`` (libjpeg-turbo) if it is installed, and otherwise, or if simplejpeg refuses the file,
by Pillow. Decoding and resizing release the GIL, so threads are useful.

Resizing scales the image until its shorter side fits, with an antialiasing triangle filter, and crops the center, as
torchvision's ``Resize`` and ``CenterCrop`` do. A JPEG that is more than four times as large is decoded at 1/8, 1/4 or
1/2 of its size, but never below twice the requested size. EXIF orientation is ignored.
"""

import io
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, format_error
from hasten.data.buffer_pool import acquire, thread_scratch
from hasten.data.source import BadRow
from hasten.data.validation import at_least

PIXELS = 178_956_970 // 4  # default limit: a quarter of what Pillow refuses; 44 million, 134 MB decoded
MIN_SCALE = 2  # a JPEG is decoded at no less than this multiple of the requested size


def size_of(resize: int | tuple[int, int] | None, pixels: int = PIXELS) -> tuple[int, int] | None:
    """Returns ``resize``, in pixels, as (height, width), None as it is; ConfigurationError if it is no size or has more
    than ``pixels`` pixels.
    """
    at_least("pixels=", pixels, 1)
    if resize is None:
        return None
    sides = resize if isinstance(resize, (tuple, list)) else (resize, resize)
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        expected = "the side of a square or (height, width) in pixels"
        raise ConfigurationError(f"resize must be {expected}, not {resize!r:.80}")
    if sides[0] * sides[1] > pixels:
        limit = f"{pixels} are allowed; use a smaller size, or a higher limit: pixels="
        raise ConfigurationError(f"resize={resize!r} makes images of {sides[0] * sides[1]} pixels, and {limit}")
    return sides[0], sides[1]


def decoder_fingerprint(size: tuple[int, int] | None, pixels: int) -> dict:
    """Returns what decoded images depend on, for fingerprints: {"pixels", "resize", "decoders": {name: version}};
    decoders and their versions differ in the last bits.
    """
    decoders = ("simplejpeg", "pillow") if _simplejpeg() else ("pillow",)
    return {"pixels": pixels, "resize": size and list(size), "decoders": {name: _version(name) for name in decoders}}


def decode_images(
    rows: Sequence[int], where: Sequence[str], contents: Iterator[bytes], size: tuple[int, int] | None, pixels: int
) -> torch.Tensor | list[torch.Tensor]:
    """Decodes a batch of images: uint8, shape (rows, 3, *size), or a list of tensors (3, height, width) without a size.

    ``contents`` yields the bytes of the files in order, and raises ValueError for one that cannot be read. ``rows`` and
    ``where`` (row and file of each image) are for the BadRow that is raised if an image cannot be decoded or has more
    than ``pixels`` pixels.
    """
    batch: Any = [None] * len(rows) if size is None else acquire((len(rows), 3, *size), torch.uint8)
    for position, row in enumerate(rows):
        try:
            if size is None:
                image = decode_image(next(contents), pixels).transpose(2, 0, 1)
                batch[position] = torch.from_numpy(numpy.ascontiguousarray(image))
            else:
                _resize(decode_image(next(contents), pixels, size), batch[position], pixels)
        except ValueError as error:
            raise BadRow(row, where[position], str(error)) from None
    return batch


def decode_image(content: bytes, pixels: int = PIXELS, size: tuple[int, int] | None = None) -> numpy.ndarray:
    """Decodes a JPEG or PNG file to RGB: uint8, shape (height, width, 3).

    ValueError if the file is damaged, is no image or has more than ``pixels`` pixels. With ``size``, to which the image
    will be resized, a large JPEG may be decoded smaller, into memory that the next call in the same thread overwrites.
    """
    if content[:2] == b"\xff\xd8" and _simplejpeg():
        try:
            return _decode_simplejpeg(content, pixels, size)
        except _TooLargeError:
            raise
        except ValueError:
            pass  # Pillow decodes more variants, and its errors are clearer
    return _decode_pillow(content, pixels, size)


def _decode_simplejpeg(content: bytes, pixels: int, size: tuple[int, int] | None) -> numpy.ndarray:
    jpeg = _simplejpeg()
    height, width = jpeg.decode_jpeg_header(content)[:2]
    _check_pixels(height, width, pixels)
    if size is None:
        return jpeg.decode_jpeg(content)
    limits = {"min_height": MIN_SCALE * size[0], "min_width": MIN_SCALE * size[1], "min_factor": 2}
    height, width = jpeg.decode_jpeg_header(content, **limits)[:2]
    buffer = thread_scratch("jpeg", (height * width * 3,), torch.uint8).numpy()
    # most files store chroma at half resolution; how it is upsampled is invisible once the image is downscaled
    return jpeg.decode_jpeg(content, fastupsample=True, buffer=buffer, **limits)


def _decode_pillow(content: bytes, pixels: int, size: tuple[int, int] | None) -> numpy.ndarray:
    try:
        from PIL import JpegImagePlugin, PngImagePlugin
    except ImportError:
        raise ConfigurationError("decoding this image requires pillow: pip install 'hasten[images]'") from None

    # instead of Image.open, whose own limit of pixels would come first, without the size in its message
    readers = {b"\xff\xd8\xff": JpegImagePlugin.JpegImageFile, b"\x89PN": PngImagePlugin.PngImageFile}
    reader = readers.get(content[:3])
    if reader is None:
        raise ValueError("the file is not a JPEG or PNG image")
    try:
        with reader(io.BytesIO(content)) as image:
            _check_pixels(image.height, image.width, pixels)
            if image.mode.startswith("I"):
                raise ValueError("the image has 16 bits per channel; convert it to 8")
            if size is not None:
                image.draft(image.mode, (MIN_SCALE * size[1], MIN_SCALE * size[0]))  # only JPEG can
            return numpy.array(image.convert("RGB"))
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # for damaged files Pillow raises nearly any type
        raise ValueError(f"the image cannot be decoded ({format_error(error)})") from None


class _TooLargeError(ValueError):
    """The image has more pixels than the limit ``pixels`` allows."""


def _check_pixels(height: int, width: int, pixels: int, when: str = "") -> None:
    if height * width > pixels:
        allowed = f"more than the {pixels} allowed; pass pixels={height * width} if that is right"
        raise _TooLargeError(f"it has {height} x {width} pixels{when}, {allowed}")


@cache
def _simplejpeg() -> Any:
    """Returns the module simplejpeg, or None if it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None  # installed under another name, or not at all


def _resize(pixels_in: numpy.ndarray, image: torch.Tensor, pixels: int) -> None:
    """Writes ``pixels_in``, (height, width, 3), scaled and cropped into ``image``, (3, new height, new width).
    ValueError if it has more than ``pixels`` pixels when it is scaled.
    """
    (height, width), (new_height, new_width) = pixels_in.shape[:2], image.shape[1:]
    scale = max(new_height / height, new_width / width)
    scaled = max(new_height, int(height * scale)), max(new_width, int(width * scale))
    _check_pixels(*scaled, pixels, " when its shorter side is scaled to fit")  # a narrow image becomes long
    layers = torch.from_numpy(pixels_in).permute(2, 0, 1)[None]
    if scaled != (height, width):
        layers = torch.nn.functional.interpolate(layers, scaled, mode="bilinear", antialias=True)
    top, left = round((scaled[0] - new_height) / 2), round((scaled[1] - new_width) / 2)
    # NumPy copies in this thread; torch would start its own threads for it
    numpy.copyto(image.numpy(), layers[0, :, top : top + new_height, left : left + new_width].numpy())
