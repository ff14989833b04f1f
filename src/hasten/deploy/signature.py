"""The signature of an exported model: what it takes and returns, as JSON beside the model."""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hasten.core.errors import ConfigurationError

SIGNATURE = "signature.json"
FREE_RATIO = 4  # of a sample that is served to the largest validation sample, where a dimension is free

Dtype = Literal["float32", "float64", "int64", "int32", "uint8", "bool"]
Size = Annotated[int, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TensorSpec(_Strict):
    """Name, dtype and shape of an input or output; a dimension that varies has a name, such as "batch"."""

    name: str
    dtype: Dtype
    shape: Annotated[tuple[Size | str, ...], Field(min_length=1)]


class ImageSpec(_Strict):
    """How an image file becomes an input: resized to (height, width), each pixel ``(value / 255 - mean) / std``.

    The pixels are in the order channel, row, column, in the shape of the input without its batch dimension. ``mean``
    and ``std`` have one value, or one a channel.
    """

    height: Annotated[int, Field(gt=0, le=4096)]
    width: Annotated[int, Field(gt=0, le=4096)]
    channels: Literal[1, 3]  # grayscale, RGB
    mean: tuple[float, ...] = (0.0,)
    std: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)

    @model_validator(mode="after")
    def _one_value_a_channel(self) -> "ImageSpec":
        if {len(self.mean), len(self.std)} - {1, self.channels}:
            raise ValueError("mean and std have one value, or one a channel")
        return self


class MetricSpec(_Strict):
    """The task's metric and its value for this model on the validation data."""

    name: str
    value: float
    higher_is_better: bool


class Signature(_Strict):
    """What a deployed model takes and returns.

    Attributes:
        task: Name of the task that it was trained on.
        inputs: The inputs in their order; dimension 0 of each is the batch.
        outputs: The outputs; dimension 0 is the batch.
        classes: Names of the classes in the order of the scores; None for no classifier, or without names.
        image: How an image file becomes the only input; None if the input is no image.
        metric: The quality of the model.
        max_batch: Samples that may be computed together; None: any number. 1 for a model whose int8 ranges follow from
            the whole batch, so that samples would change each other's scores.
        sizes: For each named dimension of an input but the batch, its size in the largest validation sample, from which
            the limit of a request follows; empty in a signature that does not know it.
        needs_vnni: Whether sums of the int8 model saturate on an x86 processor without VNNI.
    """

    format: Literal[1] = 1
    task: str
    inputs: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    outputs: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    classes: tuple[str, ...] | None = None
    image: ImageSpec | None = None
    metric: MetricSpec | None = None
    max_batch: Size | None = None
    sizes: dict[str, Size] = {}
    needs_vnni: bool = False

    @property
    def max_elements(self) -> int | None:
        """Elements that the inputs of one sample may have together, so that a request cannot exhaust the memory:
        FREE_RATIO times those of the largest validation sample if a dimension is free; None if that is not recorded.
        """
        samples = [[self.sizes.get(str(size), size) for size in spec.shape[1:]] for spec in self.inputs]
        sizes = [[size for size in sample if isinstance(size, int)] for sample in samples]
        return (FREE_RATIO if self.sizes else 1) * sum(map(math.prod, sizes)) if sizes == samples else None

    @model_validator(mode="after")
    def _parts_fit(self) -> "Signature":
        if self.image is not None:
            sizes = [size for size in self.inputs[0].shape[1:] if isinstance(size, int)]
            pixels = self.image.height * self.image.width * self.image.channels
            if len(self.inputs) != 1 or self.inputs[0].dtype != "float32" or math.prod(sizes) != pixels:
                raise ValueError("the image does not fit the input")
        if self.classes is not None and (len(self.classes),) != next(iter(self.outputs)).shape[1:]:
            raise ValueError("there are not as many classes as scores")
        return self


def write_signature(signature: Signature, directory: Path) -> Path:
    """Writes ``signature.json`` into a directory; returns its path."""
    path = directory / SIGNATURE
    path.write_text(signature.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return path


def read_signature(directory: Path) -> Signature:
    """Reads ``signature.json`` of a directory; ConfigurationError if it is missing or invalid, naming the field."""
    path = directory / SIGNATURE
    try:
        return Signature.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigurationError(f"{directory} has no {SIGNATURE}; make it with: hasten export RUN --onnx") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(f"{path}: {where}: {first['msg']}; export the model again") from None
