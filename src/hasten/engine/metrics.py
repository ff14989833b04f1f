"""Metrics by name, torchmetrics metrics and plain functions, behind one accumulator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from hasten.core.errors import ConfigurationError, RunError, suggest
from hasten.core.task import Task
from hasten.utils.batch import TARGET_NAMES

SumOverRanks = Callable[[list[float]], list[float]]


@dataclass(frozen=True)
class EvaluationResult:
    """The metric and the mean loss per sample of one evaluation; the loss is NaN with Task(evaluate=)."""

    metric: float
    loss: float


class WeightedMean(NamedTuple):
    """A mean over a batch, and over how many values it is, where these are not its samples."""

    mean: Any
    weight: Any


@dataclass(frozen=True)
class NamedMetric:
    """A metric that is a mean over the samples, followed by a function of that mean."""

    higher_is_better: bool
    per_batch: Callable[[Any, Any, Any], Any]  # (output, target, loss) -> mean over the batch, or a WeightedMean
    finish: Callable[[float], float] = float  # mean -> metric


def logits_of(output: Any) -> Any:
    """The scores in a model's output: itself, its ``logits``, or those beside a loss in a tuple; ConfigurationError for
    a dict without any.
    """
    whole: Any = output
    if isinstance(output, (tuple, list)) and not hasattr(whole, "logits"):
        tensors = [item for item in cast(Sequence[Any], output) if isinstance(item, torch.Tensor)]
        has_loss = any(not item.ndim for item in tensors)
        return next((item for item in tensors if item.ndim), whole) if has_loss else whole
    if not isinstance(output, dict):
        return getattr(whole, "logits", whole)
    entries = cast(dict[str, Any], output)
    if "logits" not in entries:
        keys = ", ".join(map(str, entries))
        advice = "give Task(metric=) a function of it and the target"
        raise ConfigurationError(f"the model's output holds {keys} but no logits; {advice}")
    return entries["logits"]


def _reshape_like(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``scores`` in the shape of ``target``; RunError unless they have as many elements: nothing is broadcast."""
    if scores.numel() != target.numel():
        shapes = f"scores of shape {tuple(scores.shape)} cannot be compared with targets of shape {tuple(target.shape)}"
        raise RunError(f"{shapes}; give Task(metric=) a function of output and target")
    return scores.reshape(target.shape)


def _accuracy(output: Any, target: torch.Tensor, loss: Any, threshold: float | None = None, ignored: int = -1) -> Any:
    """The fraction of samples whose class has the highest score.

    A score for each target is a binary decision: positive if it is above ``threshold``, or where that is None above 0,
    the threshold of a logit, unless ``loss`` shows that it is a probability. Targets that are one-hot, or give each
    class a probability, are compared by the class with the highest one, unless ``loss`` is that of binary decisions.
    ``ignored`` is a label that does not count, besides negative ones.
    """
    scores = logits_of(output)
    if scores.ndim == target.ndim or scores.shape[-1] == 1:
        decided = _reshape_like(scores, target)
        if threshold is None:
            threshold = _threshold_by_loss(decided, target, loss)
        if threshold is None and scores.shape == target.shape and _are_class_probabilities(target):
            return (scores.argmax(1) == target.argmax(1)).double().mean()
        return ((decided > (threshold or 0.0)) == (target > 0.5)).double().mean()
    in_first, in_last = scores.shape[:1] + scores.shape[2:] == target.shape, scores.shape[:-1] == target.shape
    if in_first and in_last and scores.ndim > 2:
        shape = f"scores of shape {tuple(scores.shape)}, whose second or last dimension may be that of the classes"
        raise RunError(f"the accuracy is ambiguous for {shape}; give Task(metric=) a function of output and target")
    hits = _reshape_like(scores.argmax(1 if in_first else -1), target) == target  # dimension 1 as in torch, or the last
    counted = (target >= 0) & (target != ignored)  # negative targets are ignored, as -100 in torch's losses
    number = counted.sum()
    return WeightedMean((hits & counted).double().sum() / number.clamp(min=1), number.double())


def _are_class_probabilities(target: torch.Tensor) -> bool:
    """Whether targets of shape (samples, classes, ...) are one-hot or probabilities: they add up to 1."""
    if target.ndim < 2 or target.shape[1] < 2:
        return False
    return bool(((target >= 0).all() & ((target.sum(1) - 1).abs() < 1e-3).all()).item())


def _threshold_by_loss(scores: torch.Tensor, target: torch.Tensor, loss: torch.Tensor) -> float | None:
    """0.5 if ``loss`` is the binary cross-entropy of ``scores``, which are probabilities then; 0 if it is that of
    logits; else None.

    By its value, because Task(loss=) is often a function that converts the target first. The scores themselves do not
    show it: logits of a batch may all be between 0 and 1.
    """
    if not bool(((target >= 0) & (target <= 1)).all().item()):  # such as -1 and 1, of a hinge loss
        return None
    logits, target = scores.float().nan_to_num(0.5), target.float()
    probabilities = logits.clamp(0, 1)  # others would be refused
    of_probabilities = binary_cross_entropy(probabilities, target)
    found = torch.stack([of_probabilities, binary_cross_entropy_with_logits(logits, target)])
    is_half, is_zero = torch.isclose(loss.detach().to(found), found, rtol=1e-3)
    return 0.5 if bool(is_half) else 0.0 if bool(is_zero) else None


def _binary_threshold(loss: Any) -> float | None:
    """The threshold of binary decisions under a loss function of torch that is known to make them; else None."""
    function = getattr(loss, "func", loss)  # of a partial
    if function is binary_cross_entropy or isinstance(loss, torch.nn.BCELoss):
        return 0.5
    of_logits = isinstance(loss, torch.nn.BCEWithLogitsLoss) or function is binary_cross_entropy_with_logits
    return 0.0 if of_logits else None


def _ignored_label(loss: Any) -> int:
    """The label that a loss of torch, or a partial of its function, leaves out; -1 if it names none."""
    label = getattr(loss, "keywords", {}).get("ignore_index", getattr(loss, "ignore_index", -1))
    return label if isinstance(label, int) else -1


def _mean_power(exponent: int, output: Any, target: torch.Tensor, loss: Any) -> torch.Tensor:
    """The mean of the absolute errors to a power: 1 or 2."""
    return (_reshape_like(logits_of(output).float(), target) - target).abs().pow(exponent).mean()


def _loss(output: Any, target: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss


METRICS = {
    "accuracy": NamedMetric(True, _accuracy),
    "error": NamedMetric(False, _accuracy, lambda mean: 1.0 - mean),
    "loss": NamedMetric(False, _loss),
    "perplexity": NamedMetric(False, _loss, lambda mean: math.exp(mean) if mean < 700 else math.inf),
    "bits per character": NamedMetric(False, _loss, lambda mean: mean / math.log(2)),
    "mse": NamedMetric(False, partial(_mean_power, 2)),
    "rmse": NamedMetric(False, partial(_mean_power, 2), math.sqrt),
    "mae": NamedMetric(False, partial(_mean_power, 1)),
}


def name_of(task: Task) -> str:
    """The name of the task's metric: that given as text, else the name of its function or class."""
    metric = task.metric
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def higher_is_better(task: Task) -> bool:
    """Whether a larger metric of the task is better; ConfigurationError if neither metric nor task states it."""
    if task.evaluate is None:
        MetricAccumulator(task)  # reports an unknown name first
    if task.higher_is_better is not None:
        return task.higher_is_better
    metric = METRICS.get(task.metric) if isinstance(task.metric, str) else task.metric
    direction = getattr(metric, "higher_is_better", None)
    if direction is None:
        advice = "set Task(higher_is_better=True) or False"
        raise ConfigurationError(f"it is unknown whether a higher {name_of(task)} is better; {advice}")
    return direction


def own_result(value: Any) -> EvaluationResult:
    """The result of an evaluation by Task(evaluate=), which has no loss (NaN); RunError if it is not one number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise RunError(f"Task(evaluate=) must return one number; it returned {value!r:.80} ({type(value).__name__})")
    return EvaluationResult(_drop_rounding_error(float(value)), math.nan)


class MetricAccumulator:
    """Accumulates the task's metric and loss over an evaluation; ConfigurationError if Task(metric=) is unusable."""

    def __init__(self, task: Task) -> None:
        metric: Any = task.metric
        self.name = name_of(task)
        self.sum: Any = 0.0
        self.loss: Any = 0.0
        self.samples = 0
        self.weight: Any = 0.0  # of all batches in the metric: samples, or values that count
        self.torchmetric: Any = None
        self.named: NamedMetric | None = None
        self.needs_target = True
        if isinstance(metric, str):
            if metric not in METRICS:
                raise ConfigurationError(f"no metric is called {metric!r}{suggest(metric, METRICS)}")
            self.named = METRICS[metric]
            self.needs_target = self.named.per_batch is not _loss
            if self.named.per_batch is _accuracy:
                how: dict[str, Any] = {"threshold": _binary_threshold(task.loss), "ignored": _ignored_label(task.loss)}
                self.named = replace(self.named, per_batch=partial(_accuracy, **how))
        elif hasattr(metric, "update") and hasattr(metric, "compute"):
            self.torchmetric = metric.clone() if hasattr(metric, "clone") else metric
            self.torchmetric.reset()
        elif callable(metric):
            self.named = NamedMetric(True, lambda output, target, loss: metric(output, target))
            self.needs_target = False
        else:
            kinds = f"one of {', '.join(METRICS)}, a torchmetrics metric or a function"
            raise ConfigurationError(f"Task(metric=) must be {kinds}, not {type(metric).__name__}")

    @property
    def adds_up(self) -> bool:
        """Whether ranks can compute the metric together: a mean, or one of torchmetrics, which merge their states."""
        return self.named is not None or hasattr(self.torchmetric, "distributed_available_fn")

    def update(self, output: Any, target: Any, loss: torch.Tensor, samples: int) -> None:
        """Adds a batch of ``samples`` with its mean ``loss``, on the device. ConfigurationError if the metric needs a
        target and ``target`` is None, or if the metric does not return one number.
        """
        if target is None and self.needs_target:
            names = ", ".join(TARGET_NAMES)
            raise ConfigurationError(f"the metric {self.name} needs a target, but the batch names none among {names}")
        self.samples += samples
        self.loss += loss.detach().double() * samples
        if self.named is None:
            self.torchmetric.to(cast(torch.Tensor, target).device).update(logits_of(output), target)
        else:
            found = self.named.per_batch(output, target, loss)
            mean, weight = found if isinstance(found, WeightedMean) else (found, samples)
            self.sum += self._as_number(mean) * weight
            self.weight += weight

    def result(self, sum_over_ranks: SumOverRanks | None = None) -> EvaluationResult:
        """Metric and loss over all batches, with ``sum_over_ranks`` also other ranks'; RunError if there were none."""
        totals = [float(self.sum), float(self.loss), float(self.samples), float(self.weight)]
        total, loss, samples, weight = sum_over_ranks(totals) if sum_over_ranks else totals
        if not samples:
            raise RunError("the validation data gave no batch, so there is no metric")
        value = total / weight if weight else 0.0
        if self.named is None:
            if self.adds_up:  # else ``compute``, also of its parts, waits for ranks that may not call it
                for part in self.torchmetric.modules():
                    part.distributed_available_fn = lambda: sum_over_ranks is not None
            value = float(self._as_number(self.torchmetric.compute()))
        elif math.isfinite(value):
            value = self.named.finish(value)
        return EvaluationResult(_drop_rounding_error(value), loss / samples)

    def _as_number(self, value: Any) -> Any:
        """What a metric function returned, as float64 on its device; ConfigurationError if it is not one number."""
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.detach().double()
        if isinstance(value, Real):  # also NumPy's
            return float(value)
        kind = type(value).__name__
        raise ConfigurationError(f"the metric {self.name} must return one number; it returned {value!r:.80} ({kind})")


def _drop_rounding_error(value: float) -> float:
    """Rounds to 7 digits if the value is a float32, else to 12, so that 9 of 10 correct reach a target of 0.9."""
    single = float(f"{value:.7g}")
    return single if torch.tensor(single, dtype=torch.float32).item() == value else float(f"{value:.12g}")
