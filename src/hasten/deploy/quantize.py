"""``hasten quantize``: int8 models as trials, judged by the metric of the task.

    float model -> candidates -> metric gate -> latency in turns -> layers kept in float -> the fastest that passes

The metric is that of the validation data; the ranges of activations come from training data.
"""

import json
import math
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from hasten.benchmarking.ratio import Ratio
from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.deploy.candidates import (
    CANDIDATES,
    FRACTIONS,
    INTEGER_CANDIDATES,
    Arrays,
    QuantizationCandidate,
    has_vnni,
    prepare,
    quantizable_nodes,
    quantize_model,
)
from hasten.deploy.export import export_onnx, largest_difference, signature_of
from hasten.deploy.fixed_point import reference
from hasten.deploy.fixed_point.c_writer import write_c
from hasten.deploy.fixed_point.layers import IntegerModel
from hasten.deploy.fixed_point.lowering import lower, measure_ranges
from hasten.deploy.latency import compare_latency, peak_memory
from hasten.deploy.onnx_model import MODEL, OnnxModel, publish
from hasten.deploy.signature import SIGNATURE, write_signature
from hasten.deploy.trained_model import TrainedModel, load_trained_model, predictor_of
from hasten.engine.environment import machine_and_versions
from hasten.engine.error_messages import writable
from hasten.engine.metrics import name_of
from hasten.utils.durations import parse_budget

CALIBRATION_SAMPLES = 512
LATENCY_BATCHES = (1, 64)  # samples that wait; the second is the default largest batch of the server
LATENCY_SHARE = 0.15  # of the budget, for the final comparison of latencies
SEARCH_SHARE = 0.6  # of the budget, after which no further layer is tried in float
SUBSET_BATCHES = 16  # validation batches by which layers are compared
MAX_IN_FLOAT = 0.5  # fraction of the layers that may stay in float
SESSION_SPREAD = 0.06  # seen for int8 weights that are float once loaded: 1.01 to 1.06, once 1.12, on five workloads
NEARLY_SMALLEST = 1.2  # ratio of two sizes up to which speed and loss decide
THREADS = 1
RESULT = "result.json"
OUTPUTS = (MODEL, SIGNATURE, "model.h", "model.c")
TARGETS = {"cpu": CANDIDATES, "dsp": INTEGER_CANDIDATES}


@dataclass
class QuantizationTrial:
    """A quantized model: its candidate, itself, its metric ``value`` on the validation data, ``bytes`` of its weights
    (``IntegerModel``) or its file, and by batch size its speedup over the float model and the seconds of a call.
    """

    candidate: QuantizationCandidate
    model: OnnxModel | IntegerModel
    value: float
    loss: float  # of the metric, as a fraction of the float model's
    bytes: int
    speedup: dict[int, Ratio] = field(default_factory=dict[int, Ratio])  # by batch size, over the float model
    seconds: dict[int, float] = field(default_factory=dict[int, float])

    def to_json(self, max_loss: float) -> dict[str, Any]:
        """The trial as JSON data; it has passed if ``loss <= max_loss``. A number that is not finite is None."""
        return {
            "name": self.candidate.name,
            "passed": self.loss <= max_loss,
            "metric": self.value if math.isfinite(self.value) else None,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "bytes": self.bytes,
            "in_float": list(self.candidate.in_float),
            "speedup": {str(size): ratio.to_json() for size, ratio in self.speedup.items()},
            "seconds": {str(size): seconds for size, seconds in self.seconds.items()},
        }


def quantize(
    run: str | Path,
    task: Any = None,
    *,
    budget: float | str = "10m",
    target: str = "cpu",
    max_loss: float = 0.01,
    out: str | Path | None = None,
    on_progress: ProgressCallback = no_progress,
) -> dict[str, Any]:
    """Finds the fastest int8 model whose metric is at most ``max_loss`` worse than that of the float model.

    Args:
        run: The run directory of ``hasten train``.
        task: The task that was trained; None for that of the run, if it is a workload.
        budget: Seconds, or a text such as "10m". The candidates that are left at its end are not tried.
        target: "cpu": a model for ONNX Runtime; "dsp": C99 code in integers, ``model.h`` and ``model.c``.
        max_loss: Largest loss of the metric, as a fraction of the float model's value.
        out: Directory of the result; ``RUN/int8`` or ``RUN/int8-dsp`` by default.
        on_progress: Receives the progress.

    Returns:
        ``verdict`` ("faster", "smaller" or "no improvement"), ``chosen`` (a trial, or None), ``float`` (metric, bytes,
        seconds by batch size), ``trials``, ``layers`` (node -> loss if it alone is int8), ``not_tried``,
        ``peak_memory_bytes``, ``out``.

    Raises:
        ConfigurationError: An argument is out of range, the run or its data is missing, the model cannot be exported,
            or no candidate can be made.
        RunError: The exported model differs from the trained one, or its metric is not finite.
    """
    if not 0.0 <= max_loss < 1.0:
        raise ConfigurationError(f"max_loss is a fraction of the metric from 0 up to 1, such as 0.01, not {max_loss}")
    if target not in TARGETS:
        raise ConfigurationError(f"target is one of {', '.join(TARGETS)}, not {target!r:.40}")
    directory = Path(out) if out is not None else Path(run, "int8" if target == "cpu" else f"int8-{target}")
    _check_out(directory, Path(run))
    search = _Search(load_trained_model(run, task), parse_budget(budget), target, max_loss, on_progress)
    is_new = not directory.exists()
    with writable(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as undo:
        if is_new:
            undo.callback(_remove_if_empty, directory)  # by an error or Ctrl-C
        search.prepare(Path(temporary))
        search.try_candidates()
        if target == "cpu":
            search.keep_layers_in_float()
            search.compare()
        chosen, verdict = search.choose()
        result = search.result() | {"verdict": verdict, "out": str(directory), "peak_memory_bytes": None}
        result["chosen"] = chosen.to_json(max_loss) if chosen else None
        files = []
        if chosen:
            files = search.write(chosen)
            result["peak_memory_bytes"] = search.peak_memory(chosen)
        text = json.dumps(result, indent=1, allow_nan=False)
        Path(temporary, RESULT).write_text(text + "\n", encoding="utf-8")
        with writable(directory):
            publish([Path(temporary, RESULT), *files], directory)  # it shows that the other files are of `quantize`
            for name in set(OUTPUTS) - {file.name for file in files}:  # of an earlier call
                (directory / name).unlink(missing_ok=True)
    return result


def _check_out(directory: Path, run: Path) -> None:
    """Raises ConfigurationError if the result would replace files that an earlier call did not write."""
    if directory.resolve() == run.resolve():
        raise ConfigurationError(f"{directory} is the run itself, whose files would be replaced; choose another --out")
    found = [name for name in (*OUTPUTS, RESULT) if (directory / name).exists()]
    try:
        kind = json.loads((directory / RESULT).read_bytes())["kind"] if found else None
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    if found and kind != "quantize":
        problem = f"{directory} holds {', '.join(found)}, which `hasten quantize` did not write and would replace"
        raise ConfigurationError(f"{problem}; choose another --out")


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


class _Search:
    """The trials of one call of ``quantize``."""

    def __init__(
        self, trained: TrainedModel, budget: float, target: str, max_loss: float, on_progress: ProgressCallback
    ):
        self.trained, self.budget, self.target, self.max_loss = trained, budget, target, max_loss
        self.on_progress = on_progress
        self.began = time.monotonic()
        self.trials: list[QuantizationTrial] = []
        self.failed: list[dict[str, str]] = []
        self.layers: dict[str, float] = {}
        self.speed_of_torch: dict[int, Ratio] = {}
        self.float_seconds: dict[int, float] = {}
        self.subset_value: float | None = None  # metric of the float model over SUBSET_BATCHES

    def prepare(self, directory: Path) -> None:
        """Exports the float model into ``directory``, checks it, takes its metric and reads the calibration batches."""
        self.directory = directory
        self.on_progress("exporting the model", 0.0, self.budget)
        exported, self.prepared = directory / "float.onnx", directory / "prepared.onnx"
        export_onnx(self.trained, exported)
        prepare(exported, self.prepared)
        self.float_model = OnnxModel(self.prepared, THREADS)
        self.float_bytes = exported.stat().st_size
        largest_difference(self.trained, self.float_model)
        self.value = self.trained.evaluate(predictor_of(self.float_model))
        samples = self.trained.validation_samples()
        if name_of(self.trained.task) in ("accuracy", "error") and self.max_loss * samples < 1.0:
            text = f"one of the {samples} validation samples is more than max_loss={self.max_loss:.1%}; add samples"
            warnings.warn(text, HastenWarning, stacklevel=4)
        if not math.isfinite(self.value):
            raise RunError(f"the metric of the float model is {self.value}, so that no loss can be compared with it")
        signature_of(self.trained, self.value)  # what can have no signature is refused now, not after the search
        self.batches = list(self._calibration())
        if not self.batches:
            raise ConfigurationError(f"{self.trained.task.name} has no training data to calibrate with")

    def _calibration(self) -> Iterator[Arrays]:
        samples = 0
        for batch in self.trained.program.source.epoch(0, 0):
            inputs = self.trained.inputs_of(batch)
            yield {name: tensor.numpy() for name, tensor in zip(self.float_model.inputs, inputs, strict=True)}
            samples += len(inputs[0])
            if samples >= CALIBRATION_SAMPLES:
                return

    def _left(self, share: float = 1.0) -> float:
        return share * self.budget - (time.monotonic() - self.began)

    def try_candidates(self) -> None:
        """Evaluates every candidate for which there is time; adds it to ``trials``, or with the reason to ``failed``.

        ConfigurationError if no candidate can be made.
        """
        candidates = TARGETS[self.target]
        for index, candidate in enumerate(candidates):
            if self._left(1.0 - LATENCY_SHARE) <= 0.0 and self.trials:
                self.failed.append({"name": candidate.name, "why": "the budget is spent"})
                continue
            self.on_progress(candidate.name, index / len(candidates), self._left())
            self._add_trial(candidate)
        if not self.trials:
            raise ConfigurationError(f"no int8 model of {self.trained.task.name} can be made: {self.failed[0]['why']}")

    def _add_trial(self, candidate: QuantizationCandidate) -> bool:
        """Whether the int8 model could be made and evaluated; if not, ``failed`` gets the reason."""
        try:
            self.trials.append(self._try(candidate))
        except (RunError, ConfigurationError) as error:
            self.failed.append({"name": candidate.name, "why": str(error)})
            return False
        return True

    def _try(self, candidate: QuantizationCandidate, batches: int | None = None) -> QuantizationTrial:
        if candidate.kind == "integer":
            ranges = measure_ranges(self.prepared, self.batches, FRACTIONS[candidate.calibration])
            model: OnnxModel | IntegerModel = lower(self.prepared, ranges, candidate.per_channel)
            if not model.bytes:
                raise RunError("the model has no layer with weights that can be quantized")
        else:
            path = self.directory / f"{len(list(self.directory.iterdir()))}.onnx"
            quantize_model(self.prepared, path, candidate, self.batches)
            model = OnnxModel(path, THREADS)
        is_onnx = isinstance(model, OnnxModel)  # whose dynamic ranges depend on what else is in the batch
        scores = partial(_onnx_scores, model, candidate.max_batch) if is_onnx else partial(_integer_scores, model)
        value = self.trained.evaluate(scores, batches)
        return QuantizationTrial(candidate, model, value, self._loss(value), model.bytes)

    def _loss(self, value: float, reference: float | None = None) -> float:
        """How much worse ``value`` is than ``reference`` (the float model's), as a fraction; infinite if not finite."""
        reference = self.value if reference is None else reference
        if not math.isfinite(value):
            return math.inf
        worse = reference - value if self.trained.higher_is_better else value - reference
        return worse / abs(reference) if reference else worse

    def keep_layers_in_float(self) -> None:
        """If no static candidate passes: finds the layers of the best that hurt, and leaves the worst in float.

        The cost of a layer is the loss if it alone is int8.
        """
        static = [trial for trial in self.trials if trial.candidate.kind == "static"]
        if not static or any(trial.loss <= self.max_loss for trial in static):
            return
        candidate = min(static, key=lambda trial: trial.loss).candidate
        nodes = quantizable_nodes(self.prepared)
        if not nodes:
            return
        for node in nodes:
            others = [other for other in nodes if other != node]
            if (loss := self._subset_loss(candidate.keeping(others), f"{node} in int8")) is None:
                return
            self.layers[node] = loss
        in_float: list[str] = []
        while len(in_float) < max(1, int(MAX_IN_FLOAT * len(nodes))):
            losses: dict[str, float] = {}
            for node in nodes:
                if node not in in_float:
                    loss = self._subset_loss(candidate.keeping([*in_float, node]), f"{node} in float")
                    if loss is None:
                        return
                    losses[node] = loss
            # two layers may hurt only together; until one helps, the one that costs most alone is next
            in_float.append(min(losses, key=lambda node: (round(losses[node], 4), -self.layers[node])))
            if self._add_trial(candidate.keeping(in_float)) and self.trials[-1].loss <= self.max_loss:
                return

    def _subset_loss(self, candidate: QuantizationCandidate, what: str) -> float | None:
        """The loss over SUBSET_BATCHES batches, infinite if it cannot be made; None once SEARCH_SHARE is spent."""
        if self._left(SEARCH_SHARE) <= 0.0:
            return None
        self.on_progress(what, 0.5, self._left())
        if self.subset_value is None:
            self.subset_value = self.trained.evaluate(predictor_of(self.float_model), SUBSET_BATCHES)
        try:
            return self._loss(self._try(candidate, SUBSET_BATCHES).value, self.subset_value)
        except (RunError, ConfigurationError):
            return math.inf

    @property
    def passed(self) -> list[QuantizationTrial]:
        """The trials whose loss is at most ``max_loss``."""
        return [trial for trial in self.trials if trial.loss <= self.max_loss]

    def compare(self) -> None:
        """Sets ``speedup`` and ``seconds`` of the trials that pass, in turns with the float model and eager PyTorch.

        Each computes LATENCY_BATCHES as it is served: a dynamic model one sample at a time.
        """
        passed = self.passed
        threads = torch.get_num_threads()
        torch.set_num_threads(THREADS)
        try:
            for index, size in enumerate(LATENCY_BATCHES):
                inputs = self._inputs(size)
                arrays = [tensor.numpy() for tensor in inputs]
                self.on_progress(f"latency at batch {size}", index / len(LATENCY_BATCHES), self._left())
                calls: dict[str, Callable[[], object]] = {
                    str(number): partial(_run_as_served, model, trial.candidate.max_batch, arrays)
                    for number, trial in enumerate(passed)
                    if isinstance(model := trial.model, OnnxModel)
                }
                calls["torch"] = partial(self._call_torch, inputs)
                seconds = max(1.0, self.budget * LATENCY_SHARE / len(LATENCY_BATCHES))
                found = compare_latency(partial(self.float_model.run, arrays), calls, min(seconds, 20.0))
                self.float_seconds[size] = found[""][1]
                self.speed_of_torch[size] = found["torch"][0]
                for number, trial in enumerate(passed):
                    trial.speedup[size], trial.seconds[size] = found[str(number)]
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def _call_torch(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.trained.model(*inputs)

    def _inputs(self, size: int) -> list[torch.Tensor]:
        """Inputs of ``size`` samples: those of the first validation batch, repeated if it has fewer."""
        batch = self.trained.first_inputs()
        return [
            tensor.repeat(-(-size // len(tensor)), *[1] * (tensor.ndim - 1))[:size].contiguous() for tensor in batch
        ]

    def choose(self) -> tuple[QuantizationTrial | None, str]:
        """(trial, "faster"): the fastest that passes and is surely faster than the float model; else (trial, "smaller")
        among nearly the smallest of those that pass and take fewer bytes; else (None, "no improvement").
        """
        in_int8 = [trial for trial in self.passed if trial.candidate.kind != "weights"]
        if faster := [trial for trial in in_int8 if _is_faster(list(trial.speedup.values()))]:
            return max(faster, key=_mean_speed), "faster"
        smaller = [trial for trial in self.passed if trial.bytes < self.float_bytes]
        if smaller:  # of nearly the smallest ones, the fastest, then the best
            largest = NEARLY_SMALLEST * min(trial.bytes for trial in smaller)
            small = [trial for trial in smaller if trial.bytes <= largest]
            return min(small, key=lambda trial: (-_mean_speed(trial), trial.loss)), "smaller"
        return None, "no improvement"

    def write(self, chosen: QuantizationTrial) -> list[Path]:
        """Writes ``model.onnx``, or ``model.h`` and ``model.c``, and ``signature.json`` of a trial, to a temporary
        directory; returns their paths.
        """
        needs_vnni = chosen.candidate.kind == "static" and has_vnni()  # whose weights then have 8 bits
        signature = signature_of(self.trained, chosen.value, chosen.candidate.max_batch, needs_vnni)
        finished = self.directory / "finished"
        finished.mkdir()
        files = [write_signature(signature, finished)]
        if isinstance(chosen.model, IntegerModel):
            files += write_c(chosen.model, finished, signature.task, signature.classes)
        else:
            files.append(Path(shutil.copyfile(chosen.model.path, finished / MODEL)))
        return files

    def peak_memory(self, chosen: QuantizationTrial) -> dict[str, int] | None:
        """Peak memory in bytes of the "float" and the "int8" model at the largest batch with which each is served, in a
        process of its own; None for C code, which states its memory itself, and where it cannot be measured.
        """
        if not isinstance(chosen.model, OnnxModel):
            return None
        largest = LATENCY_BATCHES[-1]
        models = (("float", self.prepared, largest), ("int8", chosen.model.path, chosen.candidate.max_batch or largest))
        try:
            return {
                name: peak_memory(path, dict(zip(self.float_model.inputs, self._inputs(size), strict=True)))
                for name, path, size in models
            }
        except (RunError, OSError):
            return None

    def result(self) -> dict[str, Any]:
        """The result of ``quantize`` as JSON data, all but the choice and the verdict."""
        return {
            "kind": "quantize",
            "target": self.target,
            "task": self.trained.task.name,
            "metric": {"name": name_of(self.trained.task), "higher_is_better": self.trained.higher_is_better},
            "max_loss": self.max_loss,
            "float": {
                "metric": self.value,
                "bytes": self.float_bytes,
                "seconds": {str(size): seconds for size, seconds in self.float_seconds.items()},
            },
            "torch_speedup": {str(size): ratio.to_json() for size, ratio in self.speed_of_torch.items()},
            "trials": [trial.to_json(self.max_loss) for trial in self.trials],
            "layers": {node: loss for node, loss in self.layers.items() if math.isfinite(loss)},
            "not_tried": self.failed,
            "threads": THREADS,
            "validation_samples": self.trained.validation_samples(),
            **machine_and_versions("cpu"),
            "seconds": time.monotonic() - self.began,
        }


def _integer_scores(model: IntegerModel, inputs: list[torch.Tensor]) -> torch.Tensor:
    scores = reference.run(model, reference.quantize_input(model.input, inputs[0].numpy()))
    return torch.from_numpy(reference.dequantize(model.output, scores))


def _onnx_scores(model: OnnxModel, max_batch: int | None, inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(_run_as_served(model, max_batch, [tensor.numpy() for tensor in inputs]))


def _run_as_served(model: OnnxModel, max_batch: int | None, arrays: Sequence[numpy.ndarray]) -> numpy.ndarray:
    """The scores of a batch, computed in parts of at most ``max_batch`` samples, as the server does."""
    step = max_batch or len(arrays[0])
    parts = [[array[start : start + step] for array in arrays] for start in range(0, len(arrays[0]), step)]
    scores = [model.run(part) for part in parts]
    return scores[0] if len(scores) == 1 else numpy.concatenate(scores)


def _mean_speed(trial: QuantizationTrial) -> float:
    """Geometric mean of a trial's median speedups over the batch sizes; 1 if none was measured."""
    return math.prod(ratio.median for ratio in trial.speedup.values()) ** (1 / max(1, len(trial.speedup)))


def _is_faster(speedups: Sequence[Ratio]) -> bool:
    """Whether a model is surely faster at one batch size, and surely slower at none.

    Surely: the interval lies beyond 1 by SESSION_SPREAD, by which two sessions of one model may differ all the time.
    """
    is_faster = any(ratio.low > 1.0 + SESSION_SPREAD for ratio in speedups)
    return is_faster and not any(ratio.high < 1.0 - SESSION_SPREAD for ratio in speedups)
