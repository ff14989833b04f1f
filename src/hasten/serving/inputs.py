"""From the body of a request to the input arrays of the model; what does not fit is refused with the reason."""

import importlib
import io
import json
import math
from typing import Any

import numpy
import orjson

from hasten.deploy.signature import ImageSpec, Signature, TensorSpec

MAX_SAMPLES = 1024  # of a request
MAX_EXACT = 2**53 - 1  # a larger whole number may have been rounded when it became a float64
MAX_PIXELS = 16_000_000  # of an image file, before it is resized
IMAGE_TYPES = {"image/png": "PNG", "image/jpeg": "JPEG"}
SEND_LESS = "send fewer or smaller samples, or serve the model with larger sizes in its signature.json"


class RequestError(Exception):
    """A request that is refused: the HTTP status code, the reason, and headers of the answer."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None):
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


def parse_json(body: bytes | bytearray, signature: Signature) -> tuple[numpy.ndarray, ...]:
    """The input arrays in ``{"inputs": [...]}`` or, by name, ``{"inputs": {"a": [...], ...}}``, in the order and dtypes
    of the signature; RequestError if they do not fit it.
    """
    try:
        content = orjson.loads(body)
    except ValueError:
        content = _python_json(body)
    if not isinstance(content, dict) or "inputs" not in content:
        raise RequestError(422, 'the body must be an object with the key "inputs"')
    given = content["inputs"]
    names = [spec.name for spec in signature.inputs]
    if isinstance(given, dict):
        if set(given) != set(names):
            raise RequestError(422, f"the inputs are {', '.join(names)}, not {', '.join(map(str, given))[:100]}")
        values = [given[name] for name in names]
    elif len(names) > 1:
        raise RequestError(422, f'"inputs" must be an object with {", ".join(names)}')
    else:
        values = [given]
    arrays = tuple(_array(value, spec) for value, spec in zip(values, signature.inputs, strict=True))
    _check_together(arrays, signature)
    elements, limit = sum(array.size // len(array) for array in arrays), signature.max_elements
    if limit is not None and elements > limit:
        raise RequestError(413, f"a sample has {elements} values; at most {limit} are computed; {SEND_LESS}")
    return arrays


def parse_image(body: bytes | bytearray, content_type: str, signature: Signature) -> tuple[numpy.ndarray, ...]:
    """The only input, from an image file, resized and normalized as the signature states.

    RequestError 415 if the model takes no images, 413 for too many pixels, 400 for a damaged file.
    """
    spec = signature.image
    if spec is None:
        raise RequestError(415, "this model takes no images; send application/json")
    image: Any = importlib.import_module("PIL.Image")
    try:
        with image.open(io.BytesIO(body), formats=[IMAGE_TYPES[content_type]]) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise RequestError(413, f"the image has {opened.width} x {opened.height} pixels, too many")
            pixels = opened.convert("L" if spec.channels == 1 else "RGB").resize((spec.width, spec.height))
            values = numpy.asarray(pixels, dtype=numpy.float32)
    except RequestError:
        raise
    except image.DecompressionBombError:  # of Pillow's own limit
        raise RequestError(413, "the image has too many pixels") from None
    except Exception as error:  # Pillow raises many classes for a damaged file
        raise RequestError(400, f"the body is no {content_type}: {str(error)[:100]}") from None
    return (normalize(values, spec, signature.inputs[0]),)


def zero_inputs(signature: Signature, samples: int = 1, free: int = 4) -> tuple[numpy.ndarray, ...]:
    """Inputs of zeros, ``samples`` of them; free dimensions have the size of the signature, or without one ``free``."""
    sizes = signature.sizes
    shapes = (
        [samples, *(size if isinstance(size, int) else sizes.get(size, free) for size in spec.shape[1:])]
        for spec in signature.inputs
    )
    return tuple(numpy.zeros(shape, spec.dtype) for shape, spec in zip(shapes, signature.inputs, strict=True))


def normalize(pixels: numpy.ndarray, spec: ImageSpec, tensor: TensorSpec) -> numpy.ndarray:
    """An input of one sample from the pixels, float32 (height, width[, channels]) from 0 to 255."""
    channels_last = pixels.reshape(spec.height, spec.width, spec.channels) / numpy.float32(255)
    mean, std = (numpy.asarray(value, dtype=numpy.float32) for value in (spec.mean, spec.std))
    channels_first = ((channels_last - mean) / std).transpose(2, 0, 1)
    shape = [size for size in tensor.shape[1:] if isinstance(size, int)]
    return numpy.ascontiguousarray(channels_first.reshape(1, *shape), dtype=numpy.float32)


def _python_json(body: bytes | bytearray) -> Any:
    """The body as Python's ``json`` reads it: also NaN, which ``_array`` refuses; RequestError 400 if it is no JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON: {str(error)[:100]}") from None


def _array(value: Any, spec: TensorSpec) -> numpy.ndarray:
    try:
        array = numpy.asarray(value, dtype=numpy.float64)  # never an array of texts, which one long text makes huge
    except (ValueError, TypeError, OverflowError) as error:
        what = "has rows of different lengths" if "inhomogeneous" in str(error) else "must be numbers"
        raise RequestError(422, f"{spec.name} {what}") from None
    fits = array.ndim == len(spec.shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(array.shape, spec.shape, strict=True)
    )
    if not fits:
        expected = "[" + ", ".join(map(str, spec.shape)) + "]"
        raise RequestError(422, f"{spec.name} has the shape {list(array.shape)}; it must be {expected}")
    if not array.size:
        raise RequestError(422, f"{spec.name} is empty")
    if len(array) > MAX_SAMPLES:
        raise RequestError(413, f"a request may have {MAX_SAMPLES} samples, not {len(array)}")
    low, high = numpy.minimum.reduce(array, axis=None), numpy.maximum.reduce(array, axis=None)  # NaN, if there is one
    if not math.isfinite(low) or not math.isfinite(high):
        raise RequestError(422, f"{spec.name} contains NaN, infinity or null")
    dtype = numpy.dtype(spec.dtype)
    if dtype.kind in "iu" and (array != numpy.rint(array)).any():
        raise RequestError(422, f"{spec.name} must be whole numbers")
    if dtype.kind == "b" and not ((array == 0) | (array == 1)).all():
        raise RequestError(422, f"{spec.name} must be true or false")
    limits: Any = numpy.iinfo(dtype) if dtype.kind in "iu" else numpy.finfo(dtype) if dtype.kind == "f" else None
    if limits is not None and (low < limits.min or high > limits.max):
        raise RequestError(422, f"{spec.name} has numbers outside of {spec.dtype}")
    if dtype.kind == "i" and max(-low, high) > MAX_EXACT:
        raise RequestError(422, f"{spec.name} has whole numbers beyond {MAX_EXACT}, which are not read exactly")
    return array.astype(dtype)


def _check_together(arrays: tuple[numpy.ndarray, ...], signature: Signature) -> None:
    """RequestError 422 unless dimensions of one name, such as the batch, have one size in all inputs."""
    sizes: dict[str, int] = {}
    for array, spec in zip(arrays, signature.inputs, strict=True):
        for size, name in zip(array.shape, spec.shape, strict=True):
            if isinstance(name, str) and sizes.setdefault(name, size) != size:
                raise RequestError(422, f"the inputs differ in the size of {name}: {sizes[name]} and {size}")
