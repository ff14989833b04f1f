"""Integer models: the C program equals the NumPy reference bit by bit, and both follow the float model."""

import subprocess

import numpy
import pytest
import torch
from torch import nn

from hasten import ConfigurationError

onnxruntime = pytest.importorskip("onnxruntime")

from hasten.deploy.candidates import prepare  # noqa: E402
from hasten.deploy.export import write_onnx  # noqa: E402
from hasten.deploy.fixed_point import layers, reference  # noqa: E402
from hasten.deploy.fixed_point.c_writer import write_c  # noqa: E402
from hasten.deploy.fixed_point.lowering import lower, measure_ranges  # noqa: E402
from hasten.deploy.trained_model import InferenceModel  # noqa: E402

SAMPLES = 1000


class Residual(nn.Module):
    """Adds its input to two convolutions of it."""

    def __init__(self, channels: int):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)
        )

    def forward(self, x):
        return torch.relu(x + self.convolutions(x))


MODELS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 7)), (20,)),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 1),
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        ),
        (3, 16, 12),
    ),
    "pooled at the end": (
        lambda: nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (3, 6, 5),
    ),
    "residual": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, (5, 3)),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            Residual(6),
            nn.Flatten(),
            nn.Linear(6 * 4 * 5, 4),
        ),
        (1, 12, 11),
    ),
}


def export_to(path, model, shape):
    """Exports a model of one input, whose batch is free."""
    write_onnx(InferenceModel(model, ["x"], False), (torch.randn(2, *shape),), ["x"], [{0: "batch"}], path)


@pytest.fixture(scope="module", params=[(name, channels) for name in MODELS for channels in (False, True)], ids=str)
def lowered(request, tmp_path_factory):
    """(float model, integer model, directory) of one architecture with random weights."""
    name, per_channel = request.param
    directory = tmp_path_factory.mktemp(name)
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean), nn.init.uniform_(module.running_var, 0.5, 2.0)
    export_to(directory / "float.onnx", model, shape)
    prepare(directory / "float.onnx", directory / "prepared.onnx")
    inputs = torch.randn(256, *shape).numpy()
    session = onnxruntime.InferenceSession(str(directory / "prepared.onnx"), providers=["CPUExecutionProvider"])
    ranges = measure_ranges(directory / "prepared.onnx", [{session.get_inputs()[0].name: inputs}])
    return model, lower(directory / "prepared.onnx", ranges, per_channel), directory


def test_c_program_equals_the_reference(lowered):
    _, model, directory = lowered
    write_c(model, directory, "random")
    program = directory / "model"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run(["cc", "-O1", *strict, "-DMODEL_MAIN", str(directory / "model.c"), "-o", str(program)], check=True)
    inputs = numpy.random.default_rng(1).integers(-128, 128, (SAMPLES, *model.input.shape), dtype=numpy.int8)
    done = subprocess.run([program], input=inputs.tobytes(), capture_output=True, check=True)
    computed = numpy.frombuffer(done.stdout, numpy.int8).reshape(SAMPLES, model.output.size)
    expected = reference.run(model, inputs)
    assert numpy.array_equal(computed, expected) and len(numpy.unique(expected)) > 50
    source = (directory / "model.c").read_text()
    assert not [word for word in ("float", "double", "malloc") if f"{word} " in source.replace("floating point", "")]


def test_reference_follows_the_float_model(lowered):
    model, integer, _ = lowered
    inputs = torch.randn(200, *integer.input.shape, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model(inputs).numpy()
    scores = reference.run(integer, reference.quantize_input(integer.input, inputs.numpy()))
    found = reference.dequantize(integer.output, scores)
    assert found.shape == expected.shape
    assert numpy.abs(found - expected).mean() < 0.03 * numpy.abs(expected).max()
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.9


@pytest.mark.parametrize("ratio", [1e-12, 3.1e-7, 0.0099, 0.5, 0.75, 1.0, 1.9999999999, 117.3])
def test_fixed_point_is_the_ratio(ratio):
    multiplier, shift = layers.fixed_point(ratio)
    assert 0 <= multiplier < 2**31 and 1 <= shift <= 62
    assert multiplier / 2**shift == pytest.approx(ratio, rel=2**-30 if ratio > 1e-8 else 1e-2)


def test_sum_of_more_than_32_bits_is_refused():
    weight = numpy.full((1, 70_000), 127, dtype=numpy.int8)
    with pytest.raises(ConfigurationError, match="the layer fc can exceed 32 bits"):
        layers.quantize_bias(numpy.zeros(1), numpy.ones(1), weight, "fc")


def test_channel_of_almost_no_weight_keeps_its_bias():
    weight, bias = numpy.array([[1e-9, 0.0], [0.5, -0.25], [0.0, 0.0]]), numpy.array([1.0, 0.1, -3.0])
    for per_channel in (True, False):
        integers, scales = layers.quantize_weight(weight, bias, 0.01, per_channel)
        found = layers.quantize_bias(bias, scales * 0.01, integers, "fc") * scales * 0.01
        assert numpy.allclose(found, bias, rtol=1e-2, atol=1e-4)


def test_names_cannot_end_the_comment_of_the_c_code(lowered):
    _, model, directory = lowered
    write_c(model, directory, "*/ int x; /*", ("**//", "a\nb", "ok"))
    header = (directory / "model.h").read_text()
    assert header.count("*/") == header.count("/*") and "int x;" not in header.split("*/")[1].split("#")[0]


def test_activation_holds_zero_exactly_and_its_whole_range():
    activation = layers.activation_of("a", (1,), 0.3, 5.1)
    assert reference.dequantize(activation, numpy.array([activation.zero_point], numpy.int8))[0] == 0.0
    values = numpy.array([0.0, 5.1], numpy.float32)
    found = reference.dequantize(activation, reference.quantize_input(activation, values))
    assert numpy.abs(found - values).max() <= activation.scale / 2 + 1e-6


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), Sine()), (4,), "integer code has no Sin"),
        (nn.Conv1d(2, 2, 3), (2, 9), "a fixed shape"),
        (nn.Conv2d(2, 2, 3, dilation=2), (2, 9, 9), "without dilation"),
    ],
)
def test_layer_without_integer_code_is_named(model, shape, message, tmp_path):
    export_to(tmp_path / "float.onnx", model.eval(), shape)
    prepare(tmp_path / "float.onnx", tmp_path / "prepared.onnx")
    name = onnxruntime.InferenceSession(str(tmp_path / "prepared.onnx")).get_inputs()[0].name
    ranges = measure_ranges(tmp_path / "prepared.onnx", [{name: torch.randn(2, *shape).numpy()}])
    with pytest.raises(ConfigurationError, match=message):
        lower(tmp_path / "prepared.onnx", ranges, per_channel=True)
