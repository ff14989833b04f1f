"""``hasten quantize --target dsp``: integer models as trials, and the best one as C99."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hasten.core.errors import RunError
from hasten.deploy.candidates import Arrays
from hasten.deploy.fixed_point import reference
from hasten.deploy.fixed_point.layers import Convolution, IntegerModel, Linear
from hasten.deploy.fixed_point.lowering import lower, measure_ranges
from hasten.deploy.trained_model import Predict


@dataclass(frozen=True)
class IntegerCandidate:
    """One way to choose the scales: per output channel or per tensor; ``fraction`` of the values inside the range."""

    per_channel: bool
    fraction: float
    in_float: tuple[str, ...] = ()  # an integer model has none

    @property
    def computes_in_int8(self) -> bool:
        """Whether it can be faster than the float model."""
        return True

    @property
    def name(self) -> str:
        """Its name in results."""
        scale = "per channel" if self.per_channel else "per tensor"
        return f"integer {scale}, {'minmax' if self.fraction == 1.0 else f'{100 * self.fraction:g} %'}"


INTEGER_CANDIDATES = tuple(
    IntegerCandidate(per_channel, fraction) for per_channel in (True, False) for fraction in (1.0, 0.9999, 0.999)
)


def make_integer_model(prepared: Path, candidate: IntegerCandidate, batches: Sequence[Arrays]) -> IntegerModel:
    """The integer model of a prepared float model, with ranges from calibration batches."""
    return lower(prepared, measure_ranges(prepared, batches, candidate.fraction), candidate.per_channel)


def predictor(model: IntegerModel) -> Predict:
    """Float inputs -> real scores of the integer model."""

    def predict(inputs: list[torch.Tensor]) -> torch.Tensor:
        scores = reference.run(model, reference.quantize_input(model.input, inputs[0].numpy()))
        return torch.from_numpy(reference.dequantize(model.output, scores))

    return predict


def bytes_of(model: IntegerModel) -> int:
    """Bytes of weights, biases, multipliers and shifts."""
    weighted = [layer for layer in model.layers if isinstance(layer, (Linear, Convolution))]
    if not weighted:
        raise RunError("the model has no layer with weights that can be quantized")
    return sum(
        layer.weight.nbytes + layer.bias.nbytes + 5 * len(layer.requantization.multipliers) for layer in weighted
    )
