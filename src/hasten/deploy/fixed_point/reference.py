"""The integer model in NumPy: the definition that the C program equals bit by bit.

Sums are computed in float64, where they are exact: 32-bit sums have fewer than 53 bits.
"""

import numpy
from numpy.lib.stride_tricks import sliding_window_view

from hasten.deploy.fixed_point.layers import (
    INT8_MAX,
    INT8_MIN,
    Activation,
    Addition,
    Convolution,
    IntegerModel,
    Layer,
    Linear,
    Pooling,
    Requantization,
)


def quantize_input(activation: Activation, values: numpy.ndarray) -> numpy.ndarray:
    """Float inputs as the int8 integers of ``activation``; values outside its range are clipped."""
    integers = numpy.rint(values.astype(numpy.float64) / activation.scale) + activation.zero_point
    return numpy.clip(integers, INT8_MIN, INT8_MAX).astype(numpy.int8)


def dequantize(activation: Activation, integers: numpy.ndarray) -> numpy.ndarray:
    """The real values, float32, that integers of ``activation`` stand for."""
    return ((integers.astype(numpy.float64) - activation.zero_point) * activation.scale).astype(numpy.float32)


def run(model: IntegerModel, inputs: numpy.ndarray) -> numpy.ndarray:
    """The scores, int8 (N, *scores_shape), of int8 inputs (N, *shape)."""
    values = {model.input.name: inputs}
    for layer in model.layers:
        read = [model.activations[name] for name in layer.inputs]
        sources = [values[model.storage(one.name)].reshape(len(inputs), *one.shape) for one in read]
        output = model.activations[layer.output]
        computed = _compute(layer, sources, [one.zero_point for one in read], output.zero_point)
        values[layer.output] = computed.reshape(len(inputs), *output.shape)
    return values[model.output.name].reshape(len(inputs), *model.scores_shape)


def _compute(layer: Layer, sources: list[numpy.ndarray], points: list[int], zero_point: int) -> numpy.ndarray:
    if isinstance(layer, Linear):
        centered = sources[0].astype(numpy.float64) - points[0]
        if isinstance(layer, Convolution):
            sums = _convolve(layer, centered)
        else:
            sums = centered.reshape(len(centered), -1) @ layer.weight.T.astype(numpy.float64) + layer.bias
        return _requantize(sums.astype(numpy.int64), layer.requantization, zero_point)
    if isinstance(layer, Pooling):
        return _pool(layer, sources[0])
    assert isinstance(layer, Addition)
    total = sum(
        (source.astype(numpy.int64) - point) * multiplier
        for source, point, multiplier in zip(sources, points, layer.multipliers, strict=True)
    )
    rounded = (total + (1 << (layer.shift - 1))) >> layer.shift
    return numpy.clip(rounded + zero_point, layer.low, layer.high).astype(numpy.int8)


def _requantize(sums: numpy.ndarray, by: Requantization, zero_point: int) -> numpy.ndarray:
    """The sums (N, outputs, ...) as int8 activations."""
    shape = [-1 if dim == 1 else 1 for dim in range(sums.ndim)]
    multipliers, shifts = (numpy.array(part, numpy.int64).reshape(shape) for part in (by.multipliers, by.shifts))
    rounded = (sums * multipliers + (numpy.int64(1) << (shifts - 1))) >> shifts
    return numpy.clip(rounded + zero_point, by.low, by.high).astype(numpy.int8)


def _convolve(layer: Convolution, centered: numpy.ndarray) -> numpy.ndarray:
    """Sums (N, outputs, height, width) of activations whose zero point is 0, so that padding is 0."""
    top, left, bottom, right = layer.pads
    padded = numpy.pad(centered, ((0, 0), (0, 0), (top, bottom), (left, right)))
    outputs, inputs, height, width = layer.weight.shape
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))[:, :, :: layer.strides[0], :: layer.strides[1]]
    weight = layer.weight.astype(numpy.float64).reshape(layer.groups, outputs // layer.groups, inputs, height, width)
    parts = [
        numpy.tensordot(windows[:, group * inputs : (group + 1) * inputs], weight[group], ((1, 4, 5), (1, 2, 3)))
        for group in range(layer.groups)
    ]
    sums = numpy.concatenate(parts, axis=3).transpose(0, 3, 1, 2)
    return sums + layer.bias.reshape(1, -1, 1, 1)


def _pool(layer: Pooling, source: numpy.ndarray) -> numpy.ndarray:
    top, left, bottom, right = layer.pads
    padded = numpy.pad(source, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=INT8_MIN)
    windows = sliding_window_view(padded, layer.kernel, axis=(2, 3))[:, :, :: layer.strides[0], :: layer.strides[1]]
    if not layer.is_mean:
        return windows.max(axis=(4, 5))
    count = layer.kernel[0] * layer.kernel[1]
    total = windows.astype(numpy.int64).sum(axis=(4, 5))
    return ((2 * total + count) // (2 * count)).astype(numpy.int8)
