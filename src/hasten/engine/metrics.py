"""Metrics by name, torchmetrics metrics and plain functions, all read the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hasten.core.errors import ConfigurationError, RunError, suggest
from hasten.core.task import Task
from hasten.utils.batch import TARGET_NAMES


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation: the metric and the loss beside it."""

    metric: float
    loss: float


@dataclass(frozen=True)
class Known:
    """A metric by name: a mean over the samples, and what is made of that mean at the end."""

    higher_is_better: bool
    per_batch: Callable[[Any, Any, Any], torch.Tensor]  # (output, target, loss) -> mean over the batch
    finish: Callable[[float], float] = float


def _logits(output):
    if isinstance(output, dict) and "logits" not in output:
        raise ConfigurationError(
            f"the model's output holds {', '.join(map(str, output))} but no logits; give Task(metric=) a function of it and the target"
        )
    return output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)


def _shaped(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One score a target, in the target's shape: nothing is broadcast."""
    if scores.numel() != target.numel():
        raise RunError(
            f"scores of shape {tuple(scores.shape)} cannot be compared with targets of shape {tuple(target.shape)}"
        )
    return scores.reshape(target.shape)


def _right(output, target, loss):
    scores = _logits(output)
    if scores.ndim == target.ndim or scores.shape[-1] == 1:  # one score a sample: its sign decides
        return ((_shaped(scores, target) > 0) == (target > 0.5)).double().mean()
    classes = 1 if scores.shape[:1] + scores.shape[2:] == target.shape else -1  # torch's place for classes, or the last
    return (_shaped(scores.argmax(classes), target) == target).double().mean()


def _squared(output, target, loss):
    return (_shaped(_logits(output).float(), target) - target).square().mean()


def _absolute(output, target, loss):
    return (_shaped(_logits(output).float(), target) - target).abs().mean()


def _loss(output, target, loss):
    return loss


METRICS = {
    "accuracy": Known(True, _right),
    "error": Known(False, _right, lambda mean: 1.0 - mean),
    "loss": Known(False, _loss),
    "perplexity": Known(False, _loss, lambda mean: math.exp(mean) if mean < 700 else math.inf),
    "bits per character": Known(False, _loss, lambda mean: mean / math.log(2)),
    "mse": Known(False, _squared),
    "rmse": Known(False, _squared, math.sqrt),
    "mae": Known(False, _absolute),
}


def name_of(task: Task) -> str:
    metric = task.metric
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def higher_is_better(task: Task) -> bool:
    """The direction of the task's metric.

    Raises:
        Refusal: nobody says.
    """
    MetricAccumulator(task)  # an unknown name is the better reason
    if task.higher_is_better is not None:
        return task.higher_is_better
    direction = (
        METRICS[task.metric].higher_is_better
        if isinstance(task.metric, str) and task.metric in METRICS
        else getattr(task.metric, "higher_is_better", None)
    )
    if direction is None:
        raise ConfigurationError(
            f"nobody says whether a higher {name_of(task)} is better; set Task(higher_is_better=True) or False"
        )
    return direction


class MetricAccumulator:
    """An accumulator for the task's metric and its loss."""

    def __init__(self, task: Task):
        self.metric, self.name = task.metric, name_of(task)
        self.sum = self.loss = 0.0
        self.samples = 0
        if isinstance(self.metric, str):
            if self.metric not in METRICS:
                raise ConfigurationError(f"no metric is called {self.metric!r}{suggest(self.metric, METRICS)}")
            self.known = METRICS[self.metric]
            self.per_batch = self.known.per_batch
            self.compares = self.per_batch is not _loss
        elif hasattr(self.metric, "update") and hasattr(self.metric, "compute"):
            self.metric = self.metric.clone() if hasattr(self.metric, "clone") else self.metric
            self.metric.reset()
            self.per_batch, self.compares = None, True
        elif callable(self.metric):
            self.known, self.compares = Known(True, None), False
            self.per_batch = lambda output, target, loss: self.metric(output, target)
        else:
            raise ConfigurationError(
                f"Task(metric=) must be one of {', '.join(METRICS)}, a torchmetrics metric or a function, not {type(self.metric).__name__}"
            )

    def update(self, output, target, loss: torch.Tensor, samples: int) -> None:
        if target is None and self.compares:
            raise ConfigurationError(
                f"the metric {self.name} needs a target, but the batch names none among {', '.join(TARGET_NAMES)}"
            )
        self.samples += samples
        self.loss += loss.detach().double() * samples
        if self.per_batch is None:
            self.metric.to(target.device).update(_logits(output), target)
        else:
            self.sum += self._number(self.per_batch(output, target, loss)) * samples

    def result(self) -> EvaluationResult:
        if not self.samples:
            raise RunError("the validation data gave no batch, so there is no metric")
        value = self.metric.compute() if self.per_batch is None else self.sum / self.samples
        value = float(self._number(value))
        if self.per_batch is not None:
            value = self.known.finish(value) if math.isfinite(value) else value
        return EvaluationResult(_without_rounding_dust(value), float(self.loss / self.samples))

    def _number(self, value):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.detach().double()
        if isinstance(value, (int, float)):
            return value
        raise ConfigurationError(
            f"the metric {self.name} must give one number; it gave {value!r:.80} ({type(value).__name__})"
        )


def _without_rounding_dust(value: float) -> float:
    """9 right out of 10 are 0.9, so that they reach a target of 0.9, whether they were counted in float32 or float64."""
    single = float(f"{value:.7g}")
    return single if torch.tensor(single, dtype=torch.float32).item() == value else float(f"{value:.12g}")
