"""Encodes images as JPEG files, and the columns of a batch as Arrow tables."""

import io
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError

QUALITY = 90  # of JPEG files, from 0 to 100


def jpeg(image: torch.Tensor) -> bytes:
    """Encodes an image, uint8, shape (3, height, width), as a JPEG file; ConfigurationError without Pillow."""
    pixels = numpy.ascontiguousarray(image.permute(1, 2, 0).numpy())
    try:
        from simplejpeg import encode_jpeg

        return encode_jpeg(pixels, quality=QUALITY, colorspace="RGB", colorsubsampling="420")
    except ImportError:
        try:
            from PIL import Image
        except ImportError:
            raise ConfigurationError("writing JPEG files requires Pillow: pip install 'hasten[images]'") from None
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
        return file.getvalue()


def arrow_table(columns: dict) -> Any:
    """Converts {name: tensor or list} to an Arrow table; ConfigurationError for values or a dtype that no format
    stores.
    """
    import pyarrow as pa

    return pa.table({name: _arrow(name, column) for name, column in columns.items()})


def _arrow(name: str, column: Any) -> Any:
    import pyarrow as pa

    if isinstance(column, torch.Tensor):
        array = pa.array(_to_numpy(name, column).reshape(-1))
        for size in reversed(column.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array
    if column and isinstance(column[0], torch.Tensor):
        offsets = pa.array(numpy.cumsum([0, *map(len, column)]), pa.int64())
        return pa.LargeListArray.from_arrays(offsets, pa.array(_to_numpy(name, torch.cat(column))))
    if not all(isinstance(value, (bytes, str)) for value in column):
        raise ConfigurationError(f"column {name!r} holds {type(column[0]).__name__}s, which a table cannot store")
    return pa.array(column, pa.large_binary() if column and isinstance(column[0], bytes) else pa.large_string())


def _to_numpy(name: str, column: torch.Tensor) -> numpy.ndarray:
    try:
        return column.numpy()
    except TypeError:
        problem = f"column {name!r} holds {column.dtype}, which no file format here supports"
        raise ConfigurationError(f"{problem}; store float32 or float16") from None
