"""The loss and the means of a Keras model are computed directly, without Keras's preparation of every call."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext
from hasten.utils.keras_models import NO_KERAS, is_keras

LOSSES, METRICS = "keras.src.losses.losses", "keras.src.metrics."
MEANS = ("sum_over_batch_size", "mean")  # reductions of a loss


@dataclass(frozen=True)
class DirectKerasLoss(Method):
    """Computes the compiled loss of a model with one output, and the running means of its metrics, directly.

    Keras converts, casts and checks the arguments at several levels of every call, which costs more than the loss of a
    small model itself. For a built-in loss that is a mean over the batch, and tensors without mask and sample weights,
    all of that does nothing. Otherwise, and for metrics that are no mean of a built-in function, Keras's own code runs.
    """

    card = Card(
        summary="compute the loss and metrics of a Keras model without Keras's checks of every call",
        exactness=Exactness.BIT_EXACT,
        source="https://keras.io/api/losses/",
        gain=(1.0, 1.4),
        gain_when="the steps of a Keras model take a few milliseconds",
        accelerates={"forward", "evaluation"},
        applies_to={"keras"},
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not is_keras(model):
            return run.report_no_effect(self, NO_KERAS, model)
        trainer: Any = import_module("keras.src.trainers.trainer").Trainer
        cls: Any = type(model)
        for name in ("compute_loss", "_compute_loss"):
            if not hasattr(trainer, name):
                return run.report_no_effect(self, f"this version of Keras has no {name}", model)
            if getattr(cls, name, None) is not getattr(trainer, name):
                return run.report_no_effect(self, f"{cls.__name__} has its own {name}", model)
        if getattr(model, "_compile_loss", None) is None:
            return run.report_no_effect(self, "the model was compiled without a loss", model)
        calls: Counter[str] = Counter()
        model.__dict__["_compute_loss"] = _direct_loss(model, calls)

        def observe() -> str:
            if not calls["direct"]:
                raise NoEffectError(next(reversed(calls), "the model computed no loss"))
            return f"{calls['direct']} losses were computed directly"

        run.observe_effect(self, observe)
        return model


def _direct_loss(model: Any, calls: Counter[str]) -> Callable[..., Any]:
    """``Trainer._compute_loss`` of the model; counts in ``calls`` "direct", or the reason for Keras's own code."""
    original = model._compute_loss
    chosen: dict[int, Any] = {}  # id of a CompileLoss, as ``compile`` makes it -> its loss, or why there is none

    def compute_loss(x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
        compiled = model._compile_loss
        if id(compiled) not in chosen and compiled is not None and compiled.built:
            chosen.clear()
            chosen[id(compiled)] = _loss_of(model, compiled)
            for metric in _means(model):
                metric.__dict__["update_state"] = _direct_update(metric)
        loss = chosen.get(id(compiled), "the loss is not built yet")
        obstacle = loss if isinstance(loss, str) else _obstacle(loss, y, y_pred, sample_weight)
        if obstacle:
            calls[obstacle] += 1
            return original(x, y, y_pred, sample_weight, **kwargs)
        values = loss.call(y.to(y_pred.dtype), y_pred)
        if _has_mask(values):
            calls["a mask"] += 1
            return original(x, y, y_pred, sample_weight, **kwargs)
        calls["direct"] += 1
        return values.sum() / _count(values) if values.ndim else values

    return compute_loss


def _loss_of(model: Any, compiled: Any) -> Any:
    """The loss of a model with a single built-in one, else the reason why it cannot be called directly."""
    flat = getattr(compiled, "_flat_losses", None) or ()
    if len(flat) != 1 or len(tuple(flat[0])) < 3 or tuple(flat[0][0]) or flat[0][2] is not None:
        return "the model has several losses, or weights of losses"
    loss = flat[0][1]
    if type(loss).__module__ != LOSSES or loss.reduction not in MEANS or loss.dtype != compiled.dtype:
        return f"{type(loss).__name__} is no built-in loss that is a mean over the batch"
    layers = model._flatten_layers()
    if model.losses or not all(_adds_no_loss(layer) for layer in layers):
        return "layers of the model may add losses"
    return loss


def _adds_no_loss(layer: Any) -> bool:
    return type(layer).__module__.startswith("keras.src.") and layer.activity_regularizer is None


def _obstacle(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> str:
    if sample_weight is not None:
        return "the samples have weights"
    if not isinstance(y, torch.Tensor) or not isinstance(y_pred, torch.Tensor):
        return "the model has several outputs"
    if str(y_pred.dtype) != f"torch.{loss.dtype}" or y.device != y_pred.device or not len(y_pred):
        return f"the outputs are not {loss.dtype}, or on another device than the labels"
    return "a mask" if _has_mask(y_pred) else ""


def _count(values: torch.Tensor) -> Any:
    """The number of values; on a GPU as a tensor, because there torch multiplies by the inverse of a plain number."""
    return values.numel() if values.device.type == "cpu" else values.new_full((), values.numel())


def _has_mask(x: Any) -> bool:
    return getattr(x, "_keras_mask", None) is not None


def _means(model: Any) -> Iterator[Any]:
    """The model's metrics that are running means: of its loss, and of built-in functions."""
    means: Any = import_module(f"{METRICS}reduction_metrics")
    known = means.Mean.update_state, means.MeanMetricWrapper.update_state
    lists = getattr(model._compile_metrics, "_flat_metrics", None) or ()
    metrics = [metric for one in lists for metric in (getattr(one, "metrics", ()) if one else ())]
    for metric in [model._loss_tracker, *metrics]:
        if type(metric).__module__.startswith(METRICS) and type(metric).update_state in known:
            yield metric


def _direct_update(metric: Any) -> Callable[..., Any]:
    """``update_state`` of a ``Mean`` or ``MeanMetricWrapper`` that adds in place to its total and its count."""
    original = metric.update_state
    function, mean = getattr(metric, "_fn", None), import_module(f"{METRICS}reduction_metrics").Mean

    def add(total: torch.Tensor, count: float) -> None:
        with torch.no_grad():
            metric.total.value.add_(total)
            metric.count.value.add_(count)

    def is_fit(values: Any, ndim: int) -> bool:
        is_tensor = isinstance(values, torch.Tensor) and values.ndim == ndim and not _has_mask(values)
        return is_tensor and values.dtype == metric.total.value.dtype and values.device == metric.total.value.device

    def update_mean(values: Any, sample_weight: Any = None) -> Any:
        if type(sample_weight) is not int or not is_fit(values, 0):
            return original(values, sample_weight=sample_weight)
        return add(values * sample_weight, sample_weight)

    def update_mean_of_function(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is not None or _has_mask(y_pred):
            return original(y_true, y_pred, sample_weight=sample_weight)
        values = metric._fn(y_true, y_pred, **metric._fn_kwargs)
        return add(values.sum(), len(values)) if is_fit(values, 1) else mean.update_state(metric, values)

    return update_mean if function is None else update_mean_of_function
