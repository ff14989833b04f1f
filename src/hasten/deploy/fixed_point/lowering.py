"""From a float ONNX model to an integer model: weights, ranges from calibration, and fused clamps."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy

from hasten.core.errors import ConfigurationError
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
    activation_of,
    fixed_point,
    quantize_bias,
    quantize_weight,
)
from hasten.deploy.onnx_model import require

ADDITION_BITS = 20  # fractional bits of the two scale ratios of an addition
SUPPORTED = "Linear, Conv2d, pooling, ReLU, ReLU6, addition and flattening"

Ranges = Mapping[str, tuple[float, float]]  # activation -> (lowest, highest value)


def measure_ranges(model: Path, batches: Iterable[Mapping[str, numpy.ndarray]], fraction: float = 1.0) -> Ranges:
    """The range of each activation over calibration batches.

    Args:
        model: The float ONNX model.
        batches: Inputs by name.
        fraction: Of the values that a range covers in each batch, between symmetric quantiles.

    Returns:
        Name of a float32 input or activation -> (lowest, highest value) over all batches.
    """
    onnx, runtime = require("onnx"), require("onnxruntime")
    proto = onnx.load(model)
    known = {entry.name for entry in proto.graph.output}
    names = [name for node in proto.graph.node for name in node.output]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ranges: dict[str, tuple[float, float]] = {}
    outputs = [entry.name for entry in session.get_outputs()]
    for batch in batches:
        values = {**batch, **dict(zip(outputs, session.run(outputs, dict(batch)), strict=True))}
        for name, array in values.items():
            if array.dtype == numpy.float32 and array.size:
                edges = (1 - fraction) / 2, (1 + fraction) / 2
                low, high = numpy.quantile(array, edges) if fraction < 1.0 else (array.min(), array.max())
                before = ranges.get(name, (low, high))
                ranges[name] = float(min(low, before[0])), float(max(high, before[1]))
    return ranges


def lower(model: Path, ranges: Ranges, per_channel: bool) -> IntegerModel:
    """The integer model of a float ONNX model.

    Args:
        model: The model, with batch normalization folded, as ``candidates.prepare`` writes it.
        ranges: The range of every activation, from ``measure_ranges``.
        per_channel: Whether each output channel of a weight has a scale of its own.

    Raises:
        ConfigurationError: The model has a layer that integer code cannot express, which the message names, or its
            input is not one float tensor of shape (batch, C) or (batch, C, H, W) with fixed C, H and W.
    """
    return _Lowering(require("onnx"), model, ranges, per_channel).run()


class _Lowering:
    """The state of one ``lower``: activations and layers so far, and names that stand for earlier activations."""

    def __init__(self, onnx: Any, model: Path, ranges: Ranges, per_channel: bool):
        proto = onnx.load(model)
        self.onnx, self.graph, self.ranges, self.per_channel = onnx, proto.graph, ranges, per_channel
        self.constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in self.graph.initializer}
        self.consumers = Counter(name for node in self.graph.node for name in node.input)
        self.activations: dict[str, Activation] = {}
        self.layers: list[Layer] = []
        self.same_as: dict[str, str] = {}  # output of a clamp -> the activation that it is fused into
        self.views: dict[str, str] = {}  # output of a reshape -> the activation that holds the integers
        self.by_op: dict[str, Callable[[Any, dict[str, Any]], None]] = {
            "Gemm": self._linear,
            "MatMul": self._linear,
            "Conv": self._convolution,
            "MaxPool": self._pooling,
            "AveragePool": self._pooling,
            "GlobalAveragePool": self._global_mean,
            "ReduceMean": self._global_mean,
            "Add": self._addition,
            "Flatten": self._flatten,
            "Reshape": self._flatten,
        }

    def run(self) -> IntegerModel:
        inputs = [entry for entry in self.graph.input if entry.name not in self.constants]
        if len(inputs) != 1 or inputs[0].type.tensor_type.elem_type != self.onnx.TensorProto.FLOAT:
            raise ConfigurationError(f"integer code needs one input of float numbers; the model has {len(inputs)}")
        shape = tuple(dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim)[1:]
        if len(shape) not in (1, 3) or not all(shape):
            raise ConfigurationError(f"integer code needs samples of a fixed shape, (C,) or (C, H, W), not {shape}")
        self._add_activation(inputs[0].name, shape, inputs[0].name)
        nodes = list(self.graph.node)
        clamps = {node.input[0]: node for node in nodes if node.op_type in ("Relu", "Clip")}
        for node in nodes:
            if node.op_type == "Constant":
                value = self.onnx.helper.get_attribute_value(node.attribute[0])
                self.constants[node.output[0]] = self.onnx.numpy_helper.to_array(value)
            elif node.op_type in ("Relu", "Clip") and node.output[0] in self.same_as:
                continue  # fused into the layer before it
            elif node.op_type in self.by_op:
                clamp = clamps.get(node.output[0])
                is_fused = clamp is not None and self.consumers[node.output[0]] == 1
                self.clamp = clamp if is_fused else None
                attributes = {a.name: self.onnx.helper.get_attribute_value(a) for a in node.attribute}
                self.by_op[node.op_type](node, attributes)
            else:
                raise ConfigurationError(f"integer code has no {node.op_type} ({node.name}); it has {SUPPORTED}")
        return IntegerModel(self.activations, tuple(self.layers), self.views)

    # ── layers ───────────────────────────────────────────────────────────────────────────────────

    def _linear(self, node: Any, attributes: dict[str, Any]) -> None:
        source = self._activation(node, 0)
        weight = self._constant(node, 1)
        is_gemm = node.op_type == "Gemm"
        if not (is_gemm and attributes.get("transB")):
            weight = weight.T
        if weight.ndim != 2 or source.size != weight.shape[1] or attributes.get("transA"):
            raise ConfigurationError(f"integer code has no {node.op_type} of such shapes ({node.name})")
        bias = numpy.zeros(len(weight))
        if is_gemm:
            weight = weight * attributes.get("alpha", 1.0)
            if len(node.input) > 2:
                bias = self._constant(node, 2).reshape(-1) * attributes.get("beta", 1.0)
        self.layers.append(Linear(*self._weighted(node, source, (len(weight),), weight, bias)))

    def _convolution(self, node: Any, attributes: dict[str, Any]) -> None:
        source, weight = self._activation(node, 0), self._constant(node, 1)
        if weight.ndim != 4 or not _is_plain(attributes):
            raise ConfigurationError(f"integer code has 2-d convolutions without dilation only ({node.name})")
        bias = self._constant(node, 2) if len(node.input) > 2 else numpy.zeros(len(weight))
        strides, pads = tuple(attributes.get("strides", (1, 1))), tuple(attributes.get("pads", (0, 0, 0, 0)))
        shape = (len(weight), *_sizes(source.shape[1:], weight.shape[2:], strides, pads))
        weighted = self._weighted(node, source, shape, weight, bias)
        self.layers.append(Convolution(*weighted, strides, pads, attributes.get("group", 1)))

    def _weighted(
        self, node: Any, source: Activation, shape: tuple[int, ...], weight: numpy.ndarray, bias: numpy.ndarray
    ) -> tuple[tuple[str], str, numpy.ndarray, numpy.ndarray, Requantization]:
        """The fields of a ``Linear``, with the clamp after it fused: inputs, output, weight, bias, requantization."""
        output, clamp = self._output(node, shape)
        weight, bias = weight.astype(numpy.float64), bias.astype(numpy.float64)
        integers, scales = quantize_weight(weight, bias, source.scale, self.per_channel)
        integer_bias = quantize_bias(bias, scales * source.scale, integers, node.name)
        parts = [fixed_point(float(scale) * source.scale / output.scale) for scale in scales]
        multipliers, shifts = zip(*parts, strict=True)
        return (source.name,), output.name, integers, integer_bias, Requantization(multipliers, shifts, *clamp)

    def _pooling(self, node: Any, attributes: dict[str, Any]) -> None:
        source, is_mean = self._activation(node, 0), node.op_type == "AveragePool"
        kernel, pads = tuple(attributes["kernel_shape"]), tuple(attributes.get("pads", (0, 0, 0, 0)))
        strides = tuple(attributes.get("strides", (1, 1)))
        is_plain = len(kernel) == 2 and not attributes.get("ceil_mode") and _is_plain(attributes)
        if not is_plain or (is_mean and any(pads)):
            raise ConfigurationError(f"integer code has no {node.op_type} of this form ({node.name})")
        shape = (source.shape[0], *_sizes(source.shape[1:], kernel, strides, pads))
        self._add_pooling(node, source, shape, (is_mean, kernel, strides, pads))

    def _global_mean(self, node: Any, attributes: dict[str, Any]) -> None:
        source = self._activation(node, 0)
        axes = attributes.get("axes") or (self._constant(node, 1) if len(node.input) > 1 else (2, 3))
        if (node.op_type == "ReduceMean" and {int(axis) % 4 for axis in axes} != {2, 3}) or len(source.shape) != 3:
            raise ConfigurationError(f"integer code has means over height and width only ({node.name})")
        kernel = source.shape[1], source.shape[2]
        shape = (source.shape[0], 1, 1) if attributes.get("keepdims", 1) else (source.shape[0],)
        self._add_pooling(node, source, shape, (True, kernel, kernel, (0, 0, 0, 0)))

    def _add_pooling(self, node: Any, source: Activation, shape: tuple[int, ...], window: tuple[Any, ...]) -> None:
        """Adds a pooling, whose output has the scale of its input; ``window`` has the fields of ``Pooling``."""
        self._add_unscaled(node, source, shape, "pooling")
        self.layers.append(Pooling((source.name,), node.output[0], *window))

    def _add_unscaled(self, node: Any, source: Activation, shape: tuple[int, ...], kind: str) -> None:
        """Adds an activation whose integers are those of ``source``, so that no clamp can be fused."""
        if self.clamp is not None:
            raise ConfigurationError(f"integer code has no {self.clamp.op_type} after {kind} ({self.clamp.name})")
        name = node.output[0]
        self.activations[name] = Activation(name, shape, source.scale, source.zero_point)

    def _addition(self, node: Any, attributes: dict[str, Any]) -> None:
        if any(name in self.constants for name in node.input):
            raise ConfigurationError(f"integer code adds constants only as the bias of a layer ({node.name})")
        first, second = self._activation(node, 0), self._activation(node, 1)
        if first.shape != second.shape:
            raise ConfigurationError(f"integer code adds activations of one shape only ({node.name})")
        output, clamp = self._output(node, first.shape)
        ratios = [source.scale / output.scale for source in (first, second)]
        multipliers = [round(ratio * 2**ADDITION_BITS) for ratio in ratios]
        if max(multipliers) >= 2**31:
            raise ConfigurationError(f"the ranges of the sum {node.name} differ too much for integer code")
        names = (first.name, second.name)
        self.layers.append(Addition(names, output.name, (multipliers[0], multipliers[1]), ADDITION_BITS, *clamp))

    def _flatten(self, node: Any, attributes: dict[str, Any]) -> None:
        """Another shape of the same integers: a view, no layer."""
        source = self._activation(node, 0)
        sizes = (0, -1) if node.op_type == "Flatten" else tuple(int(size) for size in self._constant(node, 1))
        if len(sizes) < 2 or attributes.get("axis", 1) != 1 or 0 in sizes[1:]:
            raise ConfigurationError(f"integer code reshapes within a sample only ({node.name})")
        shape = numpy.empty(source.shape, dtype=bool).reshape(sizes[1:]).shape
        self._add_unscaled(node, source, shape, "a reshape")
        self.views[node.output[0]] = self.views.get(source.name, source.name)

    # ── activations ──────────────────────────────────────────────────────────────────────────────

    def _output(self, node: Any, shape: tuple[int, ...]) -> tuple[Activation, tuple[int, int]]:
        """The activation that a node writes, with the clamp after it fused, and (lowest, highest) integer of it."""
        name = node.output[0]
        if self.clamp is None:
            return self._add_activation(name, shape, name), (INT8_MIN, INT8_MAX)
        fused = self.clamp.output[0]
        self.same_as[fused] = name
        activation = self._add_activation(name, shape, fused)
        low, high = activation.zero_point, INT8_MAX
        if self.clamp.op_type == "Clip":
            bounds = [self.constants.get(bound) for bound in self.clamp.input[1:]]
            if len(bounds) != 2 or bounds[0] is None or bounds[1] is None or float(bounds[0]) != 0.0:
                raise ConfigurationError(f"integer code clips from 0 to a constant only ({self.clamp.name})")
            high = min(high, activation.zero_point + round(float(bounds[1]) / activation.scale))
        return activation, (low, high)

    def _add_activation(self, name: str, shape: tuple[int, ...], measured: str) -> Activation:
        activation = activation_of(name, shape, *self.ranges[measured])
        self.activations[name] = activation
        return activation

    def _activation(self, node: Any, index: int) -> Activation:
        name = node.input[index]
        while name in self.same_as:
            name = self.same_as[name]
        if name not in self.activations:
            raise ConfigurationError(f"integer code has no {node.op_type} of a constant ({node.name})")
        return self.activations[name]

    def _constant(self, node: Any, index: int) -> numpy.ndarray:
        try:
            return self.constants[node.input[index]]
        except KeyError:
            raise ConfigurationError(f"integer code has no {node.op_type} of two activations ({node.name})") from None


def _is_plain(attributes: dict[str, Any]) -> bool:
    """Whether a convolution or pooling has no dilation, and explicit pads (``auto_pad`` NOTSET or VALID)."""
    has_auto_pad = attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")
    return not has_auto_pad and all(d == 1 for d in attributes.get("dilations", ()))


def _sizes(
    size: tuple[int, ...], kernel: tuple[int, ...], strides: tuple[int, ...], pads: tuple[int, ...]
) -> tuple[int, int]:
    """(height, width) of the output of a window that moves over (height, width)."""
    height, width = ((size[dim] + pads[dim] + pads[dim + 2] - kernel[dim]) // strides[dim] + 1 for dim in range(2))
    return height, width
