"""The ways to quantize an ONNX model that are tried, and how ONNX Runtime carries each of them out.

==========  ====================================================================================================
dynamic     int8 weights; activations are quantized while the model runs, by the range of each tensor
static      int8 weights and activations, by ranges from calibration batches (QuantizeLinear, DequantizeLinear)
weights     int8 weights that are converted to float when the model is loaded: smaller, not faster
integer     integers alone, by ranges from calibration batches; ``fixed_point`` makes these, not ONNX Runtime
==========  ====================================================================================================

The scale is that of a whole tensor or of each output channel. On x86 processors without VNNI the product of a uint8 and
an int8 vector saturates at 16 bits; weights then have 7 bits (ONNX Runtime's ``reduce_range``). A static model that is
made elsewhere is not served there; the weights of a dynamic one are uint8, whose product does not saturate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

from hasten.core.errors import RunError
from hasten.deploy.onnx_model import quiet, require, strip

QUANTIZED_OPS = ("Conv", "Gemm", "MatMul")
WEIGHT_INPUT = {**dict.fromkeys(QUANTIZED_OPS, 1), "Gather": 0}  # index of the weight among the inputs
Arrays = dict[str, numpy.ndarray]  # input name -> values of a batch


@dataclass(frozen=True)
class QuantizationCandidate:
    """One way to quantize a model.

    Attributes:
        kind: "dynamic", "static", "weights" or "integer".
        per_channel: Whether each output channel of a weight has a scale of its own.
        calibration: How a range follows from the calibration batches: "minmax", "entropy" or "percentile"; for
            "integer" one of ``FRACTIONS``.
        in_float: Names of the nodes that are not quantized.
    """

    kind: str
    per_channel: bool
    calibration: str = ""
    in_float: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name in results, such as ``static per channel, percentile``."""
        scale = "per channel" if self.per_channel else "per tensor"
        ranges = f", {self.calibration}" if self.calibration else ""
        layers = f", {len(self.in_float)} layers in float" if self.in_float else ""
        return f"{self.kind} {scale}{ranges}{layers}"

    @property
    def max_batch(self) -> int | None:
        """Samples that may be computed together: 1 if the ranges follow from the whole batch; None: any number."""
        return 1 if self.kind == "dynamic" else None

    def keeping(self, nodes: Sequence[str]) -> "QuantizationCandidate":
        """The candidate that also leaves ``nodes`` in float."""
        return replace(self, in_float=(*self.in_float, *nodes))


BOTH_SCALES = (True, False)
FRACTIONS = {"minmax": 1.0, "99.99 %": 0.9999, "99.9 %": 0.999}  # of the values that a range covers
CANDIDATES = (
    *(QuantizationCandidate("static", s, way) for s in BOTH_SCALES for way in ("minmax", "percentile", "entropy")),
    QuantizationCandidate("dynamic", True),
    QuantizationCandidate("dynamic", False),
    QuantizationCandidate("weights", True),
)
INTEGER_CANDIDATES = tuple(QuantizationCandidate("integer", s, way) for s in BOTH_SCALES for way in FRACTIONS)


def prepare(model: Path, out: Path) -> None:
    """Writes ``model`` to ``out`` in the form that is quantized: optimized by ONNX Runtime, with inferred shapes."""
    module = require("onnxruntime.quantization.shape_inference")
    with quiet("", "onnxruntime"):
        module.quant_pre_process(str(model), str(out), skip_symbolic_shape=True)
    strip(out)


def quantizable_nodes(model: Path) -> list[str]:
    """Names of the Conv, Gemm and MatMul nodes whose second input is a weight, in the order of the model."""
    graph = require("onnx").load(model).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type in QUANTIZED_OPS and weights & set(node.input[1:2])]


def quantize_model(model: Path, out: Path, candidate: QuantizationCandidate, batches: Sequence[Arrays]) -> None:
    """Writes the quantized model.

    Args:
        model: The model from ``prepare``.
        out: The file to write.
        candidate: How to quantize.
        batches: Calibration batches, for the kind "static".

    Raises:
        RunError: ONNX Runtime cannot quantize the model so, or for the kind "weights" there is none to quantize.
    """
    if candidate.kind == "weights":
        return quantize_weights(model, out, candidate.in_float)
    module = require("onnxruntime.quantization")
    options: dict[str, Any] = {
        "per_channel": candidate.per_channel,
        "reduce_range": not has_vnni(),
        "nodes_to_exclude": list(candidate.in_float),
    }
    int8, uint8, methods = module.QuantType.QInt8, module.QuantType.QUInt8, module.CalibrationMethod
    ways = {"minmax": methods.MinMax, "entropy": methods.Entropy, "percentile": methods.Percentile}
    try:
        with quiet("", "onnxruntime"):
            if candidate.kind == "dynamic":
                # QUInt8: the only type of ConvInteger
                module.quantize_dynamic(str(model), str(out), weight_type=uint8, **options)
            else:
                types = {"weight_type": int8, "activation_type": uint8, "quant_format": module.QuantFormat.QDQ}
                if candidate.calibration != "minmax":
                    batches = _of_one_shape(batches)
                reader = SimpleNamespace(get_next=partial(next, iter(batches), None))
                method = ways[candidate.calibration]
                module.quantize_static(str(model), str(out), reader, calibrate_method=method, **types, **options)
    except Exception as error:  # of many classes, for models that it does not know
        raise RunError(f"ONNX Runtime cannot quantize it so: {type(error).__name__}: {error!s:.150}") from None


def quantize_weights(model: Path, out: Path, in_float: Sequence[str] = ()) -> None:
    """Writes ``model`` to ``out`` with int8 weights, one scale per output channel, that become float32 at loading;
    those of the nodes named in ``in_float`` stay float. RunError if there is no other weight to quantize.
    """
    onnx = require("onnx")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    proto = onnx.load(model)
    graph = proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    conversions: dict[str, tuple[Any, Any]] = {}
    for node in graph.node:
        name = node.input[WEIGHT_INPUT[node.op_type]] if node.op_type in WEIGHT_INPUT else ""
        if name not in weights or name in conversions or node.name in in_float:
            continue
        values = numpy_helper.to_array(weights[name])
        if values.dtype != numpy.float32 or values.ndim < 2:
            continue
        axis = _channel_axis(node, onnx)
        others = tuple(dim for dim in range(values.ndim) if dim != axis)
        largest = numpy.abs(values).max(axis=others, keepdims=True)
        scale = numpy.maximum(largest, numpy.finfo(numpy.float32).tiny) / 127
        integers = numpy.clip(numpy.rint(values / scale), -127, 127).astype(numpy.int8)
        graph.initializer.remove(weights[name])
        graph.initializer.append(numpy_helper.from_array(integers, f"{name}_int8"))
        graph.initializer.append(numpy_helper.from_array(scale.astype(numpy.float32), f"{name}_scale"))
        # not DequantizeLinear, which ONNX Runtime would compute in every call; these two are folded at loading
        cast = helper.make_node(
            "Cast", [f"{name}_int8"], [f"{name}_float"], name=f"{name}_cast", to=onnx.TensorProto.FLOAT
        )
        scaled = helper.make_node("Mul", [f"{name}_float", f"{name}_scale"], [name], name=f"{name}_scaled")
        conversions[name] = (cast, scaled)
    if not conversions:
        raise RunError("the model has no layer with weights that can be quantized")
    for node in reversed([node for pair in conversions.values() for node in pair]):
        graph.node.insert(0, node)
    onnx.save(proto, out)


def _of_one_shape(batches: Sequence[Arrays]) -> list[Arrays]:
    """The batches of the shapes that most of them have: ONNX Runtime stacks them for its histograms."""
    shapes = [[array.shape for array in batch.values()] for batch in batches]
    usual = max(shapes, key=shapes.count)
    return [batch for batch, own in zip(batches, shapes, strict=True) if own == usual]


def _channel_axis(node: Any, onnx: Any) -> int:
    """The dimension of a node's weight that is the output channel; 0, the rows, for an embedding (Gather)."""
    if node.op_type == "Gemm":
        transposed = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}.get("transB", 0)
        return 0 if transposed else 1
    return 1 if node.op_type == "MatMul" else 0  # of a convolution; the rows of an embedding


def has_vnni() -> bool:
    """Whether the processor multiplies int8 vectors into 32-bit sums; True where /proc/cpuinfo does not show it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    return "vnni" in text or "flags" not in text  # of ARM processors the features have another name
