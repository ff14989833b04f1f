"""The model of a run directory with its task: what is exported, quantized and compared."""

import inspect
import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError, RunError, format_error
from hasten.core.task import Task
from hasten.core.types import Batch
from hasten.deploy.onnx_model import OnnxModel
from hasten.engine.bad_rows import with_bad_row_limit
from hasten.engine.error_messages import explain_error
from hasten.engine.metrics import MetricAccumulator, higher_is_better, logits_of, name_of
from hasten.engine.plan import Program, build
from hasten.engine.tasks import TaskRef, workload_names
from hasten.utils.batch import TARGET_NAMES, batch_size, is_graph, target_of

WEIGHTS = "model.safetensors"
OUTPUT_SHAPES = 16  # shapes of inputs for which the shape of the output is computed

Predict = Callable[[list[torch.Tensor]], torch.Tensor]  # input tensors of a batch -> logits


def predictor_of(model: OnnxModel) -> Predict:
    """A function that calls a model of ONNX Runtime with CPU tensors and returns its first output as a tensor."""
    return lambda inputs: torch.from_numpy(model.run([tensor.numpy() for tensor in inputs]))


class InferenceModel(nn.Module):
    """A model as it is deployed: input tensors in the order of ``names`` in, logits out.

    Args:
        model: The trained model.
        names: Names of the inputs in a batch.
        by_name: Whether the model takes them by name, as models for dict batches do.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], by_name: bool):
        super().__init__()
        self.model, self.names, self.by_name = model, tuple(names), by_name

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return logits_of(self.output(*inputs))

    def output(self, *inputs: torch.Tensor) -> Any:
        """What the trained model returns: the logits, or an output that holds them."""
        if self.by_name:
            return self.model(**dict(zip(self.names, inputs, strict=True)))
        return self.model(*inputs)


class LogitsOutput(dict[str, torch.Tensor]):
    """In place of an output that holds logits beside other tensors: ``output["logits"]`` and ``output.logits``."""

    @property
    def logits(self) -> torch.Tensor:
        return self["logits"]


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, in evaluation mode on the CPU, and the data of its task.

    Attributes:
        directory: The run directory.
        task: The task, with loaded data.
        model: The model, which takes the inputs as tensors and returns logits.
        program: The task as the engine builds it without methods; only its data sources are used.
        has_fields: Whether the model of the task returns an output that holds the logits, not the logits themselves.
    """

    directory: Path
    task: Task
    model: InferenceModel
    program: Program
    has_fields: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value of the task's metric is better."""
        return higher_is_better(self.task)

    def validation(self) -> BatchSource:
        """The validation data; ConfigurationError if the task has none."""
        if self.program.validation is None:
            raise ConfigurationError(f"{self.task.name} has no validation data, with which the result would be checked")
        return self.program.validation

    def first_batch(self) -> Batch:
        """The first validation batch; ConfigurationError if there is none."""
        batch = next(iter(self.validation().epoch(0, 0)), None)
        if batch is None:
            raise ConfigurationError(f"the validation data of {self.task.name} are empty")
        return batch

    def first_inputs(self) -> list[torch.Tensor]:
        """The inputs of the first validation batch."""
        return self.inputs_of(self.first_batch())

    def inputs_of(self, batch: Batch) -> list[torch.Tensor]:
        """The input tensors of a batch, in the order of ``model.names``; RunError if an input is no tensor."""
        inputs = _named_inputs(batch)
        values = [inputs[name] for name in self.model.names] if self.model.by_name else list(inputs.values())
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise RunError(f"the inputs {', '.join(self.model.names)} are not all tensors, so they cannot be exported")
        return values

    def evaluate(self, predict: Predict, batches: int | None = None) -> float:
        """The task's metric of a predictor over the validation data, or over its first ``batches``; RunError, with the
        line, if metric or ``evaluate`` of the task fails, such as one that needs more than the logits.
        """
        source = islice(self.validation().epoch(0, 0), batches)
        with torch.inference_mode():
            if self.task.evaluate is not None:
                with self._explained("metric"):
                    return float(self.task.evaluate(_Predictor(self, predict), source))
            metric = MetricAccumulator(self.task)
            is_needed = isinstance(self.task.metric, str) and not metric.needs_target  # the metric is one of the loss
            for batch in source:
                # the target is the last item, or the field with the name of a target
                output = self.as_output(predict(self.inputs_of(batch)))
                target = batch[-1] if isinstance(batch, (tuple, list)) else target_of(batch)
                loss = self._loss(output, target, is_needed)
                with self._explained("metric"):
                    metric.update(output, target, loss, batch_size(batch))
            return metric.result().metric

    def _loss(self, output: Any, target: Any, is_needed: bool) -> torch.Tensor:
        """The task's loss; NaN if the model computes its own, or if it fails, such as one that needs more than the
        logits; RunError if the metric needs it.
        """
        if self.task.loss is None:
            if is_needed:
                what = f"the metric {name_of(self.task)} of {self.task.name} is a loss that the model computes itself"
                raise RunError(f"{what}; an exported model returns logits alone: give Task(loss=) or another metric")
            return torch.tensor(math.nan)
        try:
            with self._explained("loss"):
                return self.task.loss(output, target)
        except RunError:
            if is_needed:
                raise
            return torch.tensor(math.nan)

    @contextmanager
    def _explained(self, what: str) -> Generator[None]:
        """Context manager: an error of loss or metric, ``what``, becomes a RunError with the line."""
        try:
            yield
        except Exception as error:
            where = f"computing the {what} of {self.task.name} from logits alone, as an exported model returns them,"
            raise explain_error(error, where, 0) from error

    def as_output(self, logits: torch.Tensor) -> Any:
        """Logits as loss and metric of the task read them: in an output if the model returns one."""
        return LogitsOutput(logits=logits) if self.has_fields else logits

    def validation_samples(self) -> int:
        """Number of validation samples; reads all of them."""
        return sum(batch_size(batch) for batch in self.validation().epoch(0, 0))

    @cached_property
    def sample_shapes(self) -> list[tuple[torch.Size, ...]]:
        """The different shapes of the inputs without the batch among the validation batches; reads all of them."""
        batches = self.validation().epoch(0, 0)
        return list(dict.fromkeys(tuple(tensor.shape[1:] for tensor in self.inputs_of(batch)) for batch in batches))

    def varying_dimensions(self) -> list[set[int]]:
        """For each input, its dimensions that differ between validation batches, and always 0."""
        return [_varying(of_input) for of_input in zip(*self.sample_shapes, strict=True)]

    def varying_output_dimensions(self) -> set[int]:
        """The dimensions of the output that differ between inputs of OUTPUT_SHAPES different shapes, and always 0."""
        shapes: dict[tuple[torch.Size, ...], torch.Size] = {}
        with torch.inference_mode():
            for batch in self.validation().epoch(0, 0):
                inputs = self.inputs_of(batch)
                if (key := tuple(tensor.shape[1:] for tensor in inputs)) not in shapes:
                    shapes[key] = self.model(*inputs).shape[1:]
                if len(shapes) == min(OUTPUT_SHAPES, len(self.sample_shapes)):
                    break
        return _varying(list(shapes.values()))


def _varying(shapes: Sequence[torch.Size]) -> set[int]:
    """Dimensions, counted with the batch, that differ among shapes without it, and 0."""
    return {0} | {dim for dim, sizes in enumerate(zip(*shapes, strict=True), 1) if len(set(sizes)) > 1}


class _Predictor(nn.Module):
    """A predictor in the place of the model, for a task with an evaluation of its own; it has the model's parameters,
    by which an evaluation finds the device.
    """

    def __init__(self, trained: TrainedModel, predict: Predict):
        super().__init__()
        self.model, self.trained, self.predict = trained.model.model, trained, predict
        self.training = False

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        inputs = [*args, *(kwargs[name] for name in self.trained.model.names if name in kwargs)]
        return self.trained.as_output(self.predict(inputs))

    def train(self, mode: bool = True) -> "_Predictor":
        """Changes nothing: the model stays in evaluation mode."""
        return self


def load_trained_model(run: str | Path, task: Any = None) -> TrainedModel:
    """Loads the model of a run, on the CPU and in evaluation mode.

    Args:
        run: The run directory of ``hasten train``, with ``model.safetensors``.
        task: The task that was trained. None: that of the run, if it is a workload; the code of another file is not
            executed because a run directory names it.

    Raises:
        ConfigurationError: there is no trained model, the task is unknown or has no validation data, or the weights
            are not those of its model.
        RunError: the batches of the task cannot be divided into inputs and target, or the model cannot be called with
            the inputs alone or returns no logits.
    """
    directory = Path(run)
    weights = directory / WEIGHTS
    if not weights.is_file():
        what = f"{directory} has no {WEIGHTS}" if directory.is_dir() else f"there is no run directory {directory}"
        raise ConfigurationError(f"{what}; train one with: hasten train TASK --out {directory}")
    loaded = TaskRef.of(task if task is not None else _workload_of(directory)).load()
    facts = _environment_of(directory)  # the data may be drawn with the seed of the run
    seed, limit = (facts.get(name) for name in ("seed", "max_bad_rows"))
    loaded = with_bad_row_limit(loaded, limit) if type(limit) is int else loaded
    program = build(loaded, trains=False, seed=seed if type(seed) is int else 0)
    module = program.export().eval()
    _load_weights(module, weights, loaded.name)
    trained = TrainedModel(directory, program.task, InferenceModel(module, (), False), program)
    names = _input_names(module, trained.first_batch(), loaded)
    trained = replace(trained, model=InferenceModel(module, *names).eval())
    return replace(trained, has_fields=not isinstance(_first_output(trained), torch.Tensor))


def _workload_of(directory: Path) -> str:
    """The workload that a run trained, by its ``environment.json``; ConfigurationError if that names none."""
    name = _environment_of(directory).get("task")
    if name not in workload_names():
        hint = f", such as {name} if you trust that code" if isinstance(name, str) and ":" in name else ""
        raise ConfigurationError(f"the run in {directory} does not name an installed workload; add --task TASK{hint}")
    return str(name)


def _environment_of(directory: Path) -> dict[str, Any]:
    """What ``environment.json`` of a run states; empty if it cannot be read."""
    try:
        facts = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _first_output(trained: TrainedModel) -> Any:
    """The output for the first validation batch: a tensor, or what holds one as ``logits``; RunError for others."""
    name, inputs = trained.task.name, trained.first_inputs()
    try:
        with torch.inference_mode():
            output = trained.model.output(*inputs)
    except Exception as error:  # whatever a model raises that needs its target
        problem = f"the model of {name} cannot be called with the inputs of a batch alone, without the target"
        raise RunError(f"{problem}: {format_error(error)}; give the target a default of None") from None
    if not isinstance(logits_of(output), torch.Tensor):
        problem = f"the model of {name} returns a {type(output).__name__}, which cannot be exported"
        raise RunError(f"{problem}; let it return the scores as a tensor, or a dict with logits")
    return output


def _load_weights(module: nn.Module, path: Path, task: str) -> None:
    try:
        load_model(module, path)
    except SafetensorError as error:
        raise ConfigurationError(f"{path} is no complete safetensors file: {error}") from None
    except RuntimeError as error:  # of load_state_dict
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path} does not fit the model of {task}: {reason:.200}") from None


def _named_inputs(batch: Batch) -> dict[str, Any]:
    """Input name -> value, without the target; items of a tuple are named "0", "1", ... RunError for other batches."""
    if isinstance(batch, (tuple, list)):
        return {str(index): value for index, value in enumerate(batch[:-1])}
    if is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if not isinstance(batch, Mapping):
        raise RunError(f"cannot tell input from target in a batch of type {type(batch).__name__}")
    target = next(filter(batch.__contains__, TARGET_NAMES), None)
    return {name: value for name, value in batch.items() if name != target}


def _input_names(module: nn.Module, batch: Batch, task: Task) -> tuple[list[str], bool]:
    """(input names, whether the model takes them by name); RunError if it takes the target from a tuple batch, too,
    or gets a graph.
    """
    if is_graph(batch):
        raise RunError(f"{task.name} trains on graphs, and a model of graphs cannot be exported")
    inputs = _named_inputs(batch)
    if not isinstance(batch, (tuple, list)):
        return list(inputs), True
    if task.loss is None and task.step is None:
        raise RunError(
            f"the model of {task.name} gets inputs and target in one tuple; only dict batches can be exported"
        )
    known = [name for name, parameter in inspect.signature(module.forward).parameters.items()
             if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]  # fmt: skip
    return [*known[: len(inputs)], *(f"input_{index}" for index in range(len(known), len(inputs)))], False
