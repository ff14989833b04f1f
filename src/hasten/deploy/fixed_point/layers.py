"""The layers of an integer model, and its arithmetic (Jacob et al. 2018, "Quantization and Training of Neural Nets").

A real value is ``scale * (integer - zero_point)``. Activations are int8 with a range of their own; weights are int8
with zero point 0 and one scale a tensor or an output channel; sums and biases are int32. A sum becomes an activation by
``clamp(zero_point + (sum * multiplier + 2 ** (shift - 1)) >> shift)`` with a 31-bit multiplier: no division, no float.
"""

import math
from dataclasses import dataclass

import numpy

from hasten.core.errors import ConfigurationError

INT8_MIN, INT8_MAX = -128, 127
WEIGHT_MAX = 127  # symmetric
MAX_SUM = 2**31 - 1
MAX_BIAS = 2**30
LARGEST_DIFFERENCE = INT8_MAX - INT8_MIN  # of an activation and its zero point


@dataclass(frozen=True)
class Activation:
    """An int8 tensor of ``shape`` (C, H, W) or (C,), without the batch; it means ``scale * (integer - zero_point)``."""

    name: str
    shape: tuple[int, ...]
    scale: float
    zero_point: int

    @property
    def size(self) -> int:
        """Number of values of one sample."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Requantization:
    """Int32 sums to int8: ``sum * multiplier >> shift``, one pair or one per output channel, clamped to [low, high]."""

    multipliers: tuple[int, ...]
    shifts: tuple[int, ...]
    low: int
    high: int


@dataclass(frozen=True)
class Layer:
    """A layer: the names of the activations that it reads and the one that it writes."""

    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class Linear(Layer):
    """A fully connected layer. ``weight``: int8 (outputs, inputs); ``bias``: int32 (outputs,)."""

    weight: numpy.ndarray
    bias: numpy.ndarray
    requantization: Requantization

    @property
    def bytes(self) -> int:
        """Bytes of weights, biases, multipliers and shifts."""
        return self.weight.nbytes + self.bias.nbytes + 5 * len(self.requantization.multipliers)


@dataclass(frozen=True)
class Convolution(Linear):
    """``weight``: int8 (outputs, inputs / groups, y, x); ``strides``: y, x; ``pads``: top, left, bottom, right."""

    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    groups: int


@dataclass(frozen=True)
class Pooling(Layer):
    """Maximum or mean of windows of ``kernel`` (y, x); the integers keep their scale. A mean has no padding."""

    is_mean: bool
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]


@dataclass(frozen=True)
class Addition(Layer):
    """Sum of two activations of one shape, each scaled by its multiplier / 2 ** shift; clamped to [low, high]."""

    multipliers: tuple[int, int]
    shift: int
    low: int
    high: int


@dataclass(frozen=True)
class IntegerModel:
    """An int8 model; the output of its last layer holds the scores.

    Attributes:
        activations: Every activation by name.
        layers: The layers in the order of computation.
        views: Name of a reshaped activation -> name of the one, written by a layer or the input, with its integers.
    """

    activations: dict[str, Activation]
    layers: tuple[Layer, ...]
    views: dict[str, str]

    def storage(self, name: str) -> str:
        """The name of the activation that holds the integers of activation ``name``; itself unless that is a view."""
        return self.views.get(name, name)

    @property
    def bytes(self) -> int:
        """Bytes of weights, biases, multipliers and shifts of all layers; 0 if no layer has weights."""
        return sum(layer.bytes for layer in self.layers if isinstance(layer, Linear))

    @property
    def input(self) -> Activation:
        """The activation that the caller fills."""
        return self.activations[self.storage(self.layers[0].inputs[0])]

    @property
    def output(self) -> Activation:
        """The scores."""
        return self.activations[self.layers[-1].output]

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """The shape of the scores of one sample: that of ``output``, or of the last reshape of it."""
        views = [name for name, source in self.views.items() if source == self.output.name]
        return self.activations[views[-1] if views else self.output.name].shape


def activation_of(name: str, shape: tuple[int, ...], low: float, high: float) -> Activation:
    """An activation whose integers cover the range from ``low`` to ``high``, and 0 exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / LARGEST_DIFFERENCE or 1.0
    zero_point = round(INT8_MIN - low / scale)
    return Activation(name, shape, scale, min(max(zero_point, INT8_MIN), INT8_MAX))


def quantize_weight(
    weight: numpy.ndarray, bias: numpy.ndarray, input_scale: float, per_channel: bool
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(int8 weight, float64 scales: one per output channel, the first dimension, or a single one).

    The scale of a channel whose weights are almost 0 follows from its bias, which must not exceed ``MAX_BIAS``.
    """
    largest = numpy.abs(weight.reshape(len(weight), -1)).max(axis=1)
    least = numpy.maximum(largest / WEIGHT_MAX, numpy.abs(bias) / (input_scale * MAX_BIAS)).astype(numpy.float64)
    scales = numpy.where(least > 0, least, 1.0) if per_channel else numpy.array([least.max() or 1.0])
    shape = (-1,) + (1,) * (weight.ndim - 1)
    integers = numpy.rint(weight / scales.reshape(shape))
    return numpy.clip(integers, -WEIGHT_MAX, WEIGHT_MAX).astype(numpy.int8), scales


def quantize_bias(bias: numpy.ndarray, scales: numpy.ndarray, weight: numpy.ndarray, layer: str) -> numpy.ndarray:
    """The int32 bias in units of ``scales``; ConfigurationError, naming ``layer``, if its sums could exceed 32 bits."""
    integers = numpy.rint(bias / scales)
    reach = numpy.abs(weight.astype(numpy.int64)).reshape(len(weight), -1).sum(axis=1) * LARGEST_DIFFERENCE
    if (reach + numpy.abs(integers)).max() > MAX_SUM:
        raise ConfigurationError(f"sums of the layer {layer} can exceed 32 bits; it cannot be computed in int32")
    return integers.astype(numpy.int32)


def fixed_point(ratio: float) -> tuple[int, int]:
    """(31-bit multiplier, shift), ``ratio`` = multiplier / 2 ** shift; ConfigurationError unless 0 < ratio < 2**30."""
    mantissa, exponent = math.frexp(ratio)  # ratio = mantissa * 2 ** exponent, mantissa in [0.5, 1)
    multiplier, shift = round(mantissa * 2**31), 31 - exponent
    if multiplier == 2**31:
        multiplier, shift = 2**30, shift - 1
    if shift > 62:  # the ratio is so small that it rounds every sum to 0
        multiplier, shift = multiplier >> min(shift - 62, 31), 62
    if not shift >= 1 or not ratio > 0.0:
        raise ConfigurationError(f"a scale ratio of {ratio:.3g} cannot be a 31-bit multiplier; check the ranges")
    return multiplier, shift
