"""``hasten export``: a run as ONNX, checked against the trained model on the validation data."""

import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.deploy.onnx_model import MODEL, OnnxModel, publish, quiet, require, strip
from hasten.deploy.signature import SIGNATURE, ImageSpec, MetricSpec, Signature, TensorSpec, write_signature
from hasten.deploy.trained_model import WEIGHTS, TrainedModel, load_trained_model, predictor_of
from hasten.engine.error_messages import writable
from hasten.engine.metrics import name_of

TOLERANCE = 1e-4  # largest difference of an output from the trained model's, as a fraction of its largest output
SEPARATE = 1e-2  # the same of the output for a sample alone: kernels and lower precision round differently
BATCH = "batch"  # name of dimension 0


def export_model(
    run: str | Path, task: Any = None, *, onnx: bool = True, out: str | Path | None = None
) -> dict[str, Any]:
    """Exports the model of a run: weights, signature and, with ``onnx``, a model for ONNX Runtime.

    Args:
        run: The run directory of ``hasten train``.
        task: The task that was trained; None for that of the run, if it is a workload.
        onnx: Whether to write ``model.onnx``, with a batch of any size.
        out: Directory of the files; the run directory by default.

    Returns:
        ``out``, ``files`` (name -> bytes), ``difference`` (largest of an output from the trained model's over the
        validation data, as a fraction of the largest output), ``tolerance``, ``metric`` (name, and the values of the
        trained and the exported model).

    Raises:
        ConfigurationError: There is no trained model, ``out`` holds another one, or an operation cannot be exported,
            which the message names.
        RunError: The exported model computes something else, or the files cannot be written.
    """
    trained = load_trained_model(run, task)
    directory = Path(out) if out is not None else trained.directory
    is_other = directory.resolve() != trained.directory.resolve()
    if is_other:
        _check_out(directory, onnx)
    value = trained.evaluate(lambda inputs: trained.model(*inputs))
    metric: dict[str, Any] = {"name": name_of(trained.task), "trained": value, "exported": None}
    difference = None
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        files = [write_signature(signature_of(trained, value), temporary)]
        if onnx:
            files.append(temporary / MODEL)
            export_onnx(trained, files[-1])
            exported = OnnxModel(files[-1])
            difference = largest_difference(trained, exported)
            metric["exported"] = trained.evaluate(predictor_of(exported))
        if is_other:
            files.insert(0, trained.directory / WEIGHTS)  # older than the model, as in a run that is exported
        with writable(directory):
            directory.mkdir(parents=True, exist_ok=True)
            publish(files, directory)
    written = sorted({file.name for file in files} | {WEIGHTS})
    sizes = {name: (directory / name).stat().st_size for name in written}
    summary = {"out": str(directory), "tolerance": TOLERANCE, "difference": difference, "metric": metric}
    return summary | {"files": sizes}


def _check_out(directory: Path, onnx: bool) -> None:
    """ConfigurationError if weights that no export wrote would be replaced, or an earlier model stay beside new."""
    is_run = (directory / "environment.json").exists()
    if (directory / WEIGHTS).exists() and (is_run or not (directory / SIGNATURE).exists()):
        what = "the weights of another run" if is_run else f"a {WEIGHTS} that `hasten export` did not write"
        raise ConfigurationError(f"{directory} holds {what}, which would be replaced; choose another --out")
    if not onnx and (directory / MODEL).exists():
        problem = f"{directory / MODEL} is of an earlier export and would not belong to the new {SIGNATURE}"
        raise ConfigurationError(f"{problem}; add --onnx, remove it, or choose another --out")


def export_onnx(trained: TrainedModel, path: Path) -> None:
    """Writes the trained model as ONNX to ``path``. Dimensions that differ between validation batches stay free.

    Raises:
        ConfigurationError: An operation of the model cannot be exported.
    """
    inputs = tuple(trained.first_inputs())
    free = [
        {dim: _free_name(name, dim) for dim in dims}
        for name, dims in zip(trained.model.names, trained.varying_dimensions(), strict=True)
    ]
    try:
        write_onnx(trained.model, inputs, trained.model.names, free, path)
    except (ConfigurationError, RunError):  # of a package that is missing
        raise
    except Exception as error:  # of many classes, private ones among them
        raise ConfigurationError(f"{trained.task.name} cannot be exported: {_operation_of(error)}") from None


def write_onnx(
    model: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    names: Sequence[str],
    free: Sequence[Mapping[int, str]],
    path: Path,
) -> None:
    """Writes a model in evaluation mode, whose parameter is ``*inputs``, as ONNX; raises what the exporter raises.

    ``free``: for each input, its free dimensions: index -> name.
    """
    require("onnxscript")
    with quiet("torch.onnx", "onnxscript"):
        program: Any = torch.onnx.export(
            model,
            inputs,
            dynamo=True,
            input_names=list(names),
            output_names=["scores"],
            dynamic_shapes=(tuple(dict(dims) for dims in free),),  # of the one parameter *inputs
            verbose=False,
        )
    program.save(str(path), external_data=False)
    strip(path)


def signature_of(
    trained: TrainedModel, value: float, max_batch: int | None = None, needs_vnni: bool = False
) -> Signature:
    """The signature of a trained model whose metric is ``value``; classes and image are those of its dataset.

    Raises:
        ConfigurationError: A dtype that cannot be served, a metric that is not finite, an image that does not fit, or a
            model whose output for a sample depends on the other samples of the batch.
    """
    inputs = trained.first_inputs()
    with torch.inference_mode():
        output = trained.model(*inputs)
        _check_samples_are_separate(trained, inputs, output)
    classes, image = (_attribute_of_dataset(trained.task.validation_data, name) for name in ("classes", "image"))
    has_order = isinstance(classes, Iterable) and not isinstance(classes, (Set, Mapping))
    names = tuple(map(str, classes)) if has_order else ()
    has_names = output.ndim == 2 and len(names) == output.shape[-1]
    varying, varying_outputs = trained.varying_dimensions(), trained.varying_output_dimensions()
    largest = max(trained.sample_shapes, key=lambda shapes: sum(map(math.prod, shapes)))
    try:
        return Signature(
            task=trained.task.name,
            inputs=tuple(
                TensorSpec(name=name, dtype=_dtype(tensor), shape=_shape(name, tensor, dims))
                for name, tensor, dims in zip(trained.model.names, inputs, varying, strict=True)
            ),
            outputs=(TensorSpec(name="scores", dtype=_dtype(output), shape=_shape("scores", output, varying_outputs)),),
            classes=names if has_names else None,
            image=ImageSpec(**image) if isinstance(image, dict) and len(inputs) == 1 else None,
            metric=MetricSpec(name=name_of(trained.task), value=value, higher_is_better=trained.higher_is_better),
            max_batch=max_batch,
            sizes={
                _free_name(name, dim): shape[dim - 1]
                for name, shape, dims in zip(trained.model.names, largest, varying, strict=True)
                for dim in sorted(dims - {0})
            },
            needs_vnni=needs_vnni,
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its parts"
        raise ConfigurationError(f"{trained.task.name} has no signature: {where}: {first['msg']}") from None


def _check_samples_are_separate(trained: TrainedModel, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
    """ConfigurationError unless the first sample alone gives the output that it has in its batch."""
    problem = "dimension 0 of its inputs and scores must be the batch, of samples that do not influence each other"
    name = trained.task.name
    if any(tensor.ndim == 0 or len(tensor) != len(inputs[0]) for tensor in inputs) or output.shape[:1] != (
        len(inputs[0]),
    ):
        raise ConfigurationError(f"{name} cannot be exported: {problem}")
    advice = "squeeze() removes the dimension of the batch, too: use squeeze(-1) in the model"
    try:
        single = trained.model(*(tensor[:1] for tensor in inputs))
    except Exception as error:  # whatever a model raises that needs several samples
        raise ConfigurationError(f"{name} cannot compute one sample: {format_error(error, 160)}; {advice}") from None
    if single.ndim < output.ndim:
        raise ConfigurationError(f"{name} returns scores of shape {tuple(single.shape)} for one sample; {advice}")
    finite = output[output.isfinite()]
    tolerance = SEPARATE * float(finite.abs().max()) if finite.numel() else 0.0
    if single.shape != output[:1].shape or not torch.allclose(
        single, output[:1], rtol=0, atol=tolerance, equal_nan=True
    ):
        raise ConfigurationError(f"{name} gives a sample other scores if it is alone in the batch: {problem}")


def _attribute_of_dataset(data: Any, name: str) -> Any:
    """The attribute of validation data, or of the dataset that a loader or a part of a dataset wraps; None without."""
    while data is not None:
        if (value := getattr(data, name, None)) is not None:
            return value
        data = getattr(data, "dataset", None)
    return None


def _free_name(name: str, dim: int) -> str:
    return f"{name}_{dim}" if dim else BATCH


def _dtype(tensor: torch.Tensor) -> Any:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(name: str, tensor: torch.Tensor, varying: set[int]) -> tuple[int | str, ...]:
    return tuple(_free_name(name, dim) if dim in varying else size for dim, size in enumerate(tensor.shape))


def largest_difference(trained: TrainedModel, exported: OnnxModel) -> float:
    """Largest absolute difference between outputs of both models over the validation data, as a fraction of the trained
    model's largest absolute output; RunError if it exceeds ``TOLERANCE``, shapes differ or an output is not finite.
    """
    predict, difference, largest = predictor_of(exported), 0.0, 0.0
    with torch.inference_mode():
        for batch in trained.validation().epoch(0, 0):
            inputs = trained.inputs_of(batch)
            expected, found = trained.model(*inputs), predict(inputs)
            if expected.shape != found.shape:
                shapes = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
                raise RunError(f"the exported model returns scores of shape {shapes}")
            if not bool(torch.isfinite(expected).all()) or not bool(torch.isfinite(found).all()):
                problem = "the scores of the model are not all finite numbers, so nothing can be compared"
                raise RunError(f"{problem}; check the weights and the validation data for NaN")
            difference = max(difference, float((expected - found).abs().max()))
            largest = max(largest, float(expected.abs().max()))
    relative = difference / largest if largest else difference
    if relative > TOLERANCE:
        raise RunError(f"the exported model differs from the trained one by {relative:.2g}, more than {TOLERANCE:.0e}")
    return relative


def _operation_of(error: BaseException) -> str:
    """From an error of the exporter: "there is no ONNX for OPERATION", else class and first line of its root cause."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    text = "\n".join(map(str, chain))
    if found := re.search(
        r"(?:aten|torch_library|\w+)[.:]+[\w:.]+(?= is not supported|'? .*no (?:decomposition|ONNX))", text
    ):
        return f"there is no ONNX for {found.group()}"
    if found := re.search(r"No ONNX function found for .*?(aten\S+|\S+)", text):
        return f"there is no ONNX for {found.group(1).rstrip('.,>)')}"
    lines = [line.strip() for line in str(chain[-1]).splitlines() if line.strip()]
    return f"{type(chain[-1]).__name__}: {lines[0] if lines else ''}"[:300]
