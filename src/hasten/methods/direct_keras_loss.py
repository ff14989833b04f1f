"""The loss and the means of a Keras model are computed directly, without Keras's preparation of every call."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext
from hasten.utils.keras_models import NO_KERAS, computes_in, is_builtin, is_keras, is_stateless, replace_method

LOSSES, METRICS = "keras.src.losses.losses", "keras.src.metrics."
NOT_BUILT = "the loss is not built yet"
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
        accelerates={"evaluation", "logging"},
        applies_to={"keras"},
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not is_keras(model):
            return run.report_no_effect(self, NO_KERAS, model)
        trainer: Any = import_module("keras.src.trainers.trainer").Trainer
        if (why := _own_code(model, trainer)) or getattr(model, "_compile_loss", None) is None:
            return run.report_no_effect(self, why or "the model was compiled without a loss", model)
        calls: Counter[str] = Counter()
        replace_method(model, "_compute_loss", _direct_loss(model, calls))

        def observe() -> str:
            if not calls["direct"]:
                raise NoEffectError(next(reversed(calls), "the model computed no loss"))
            return f"{calls['direct']} losses were computed directly"

        run.observe_effect(self, observe)
        return model


def _own_code(model: Any, trainer: Any) -> str:
    """Why the loss of the model is not computed by Keras's own functions; empty if it is."""
    cls = model.__class__
    for name in ("compute_loss", "_compute_loss"):
        if not hasattr(trainer, name):
            return f"this version of Keras has no {name}"
        if getattr(cls, name, None) is not getattr(trainer, name) or name in vars(model):
            return f"{cls.__name__} has its own {name}"
    return "jit_compile compiles the step" if model.jit_compile else ""


def _direct_loss(model: Any, calls: Counter[str]) -> Callable[..., Any]:
    """``Trainer._compute_loss`` of the model; counts in ``calls`` "direct", or the reason for Keras's own code."""
    original, finish = model._compute_loss, import_module("keras.src.losses.loss").reduce_weighted_values
    chosen: list[Any] = [None, NOT_BUILT]  # the CompileLoss, its loss or why there is none

    def compute_loss(x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
        compiled = model._compile_loss
        if compiled is not chosen[0] and compiled is not None and compiled.built:
            chosen[:] = compiled, _loss_of(model, compiled)
            for metric in _means(model):
                replace_method(metric, "update_state", _direct_update(metric))
        loss: Any = chosen[1] if compiled is chosen[0] else NOT_BUILT
        if why := _obstacle(model, loss, y, y_pred, sample_weight):
            calls[why] += 1
            return original(x, y, y_pred, sample_weight, **kwargs)
        calls["direct"] += 1
        values: Any = loss.call(y.to(y_pred.dtype), y_pred)
        if _has_mask(values) or values.dtype != y_pred.dtype or not values.numel():
            mask = getattr(values, "_keras_mask", None)
            return finish(values, mask=mask, reduction=loss.reduction, dtype=loss.dtype)
        return values.sum() / _count(values) if values.ndim else values

    return compute_loss


def _loss_of(model: Any, compiled: Any) -> Any:
    """The loss of a model with a single built-in one, else the reason why it cannot be called directly."""
    flat = getattr(compiled, "_flat_losses", None) or ()
    if len(flat) != 1 or len(tuple(flat[0])) < 3 or tuple(flat[0][0]) or flat[0][2] is not None:
        return "the model has several losses, or weights of losses"
    loss = flat[0][1]
    function = getattr(loss, "fn", loss)
    if type(loss).__module__ != LOSSES or getattr(function, "__module__", "") != LOSSES or loss.reduction not in MEANS:
        return f"{getattr(function, '__name__', type(loss).__name__)} is no built-in loss that is a mean over the batch"
    if loss.dtype != compiled.dtype or not computes_in(loss.dtype):
        return f"the loss is computed in {loss.dtype}"
    has_regularizer = any(getattr(variable, "regularizer", None) is not None for variable in model.variables)
    if model.losses or has_regularizer or not all(_adds_no_loss(layer) for layer in model._flatten_layers()):
        return "layers of the model may add losses"
    return loss


def _adds_no_loss(layer: Any) -> bool:
    return is_builtin(layer) and layer.activity_regularizer is None


def _obstacle(model: Any, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> str:
    if isinstance(loss, str):  # the reason why there is none
        return loss
    if sample_weight is not None:
        return "the samples have weights"
    if not isinstance(y, torch.Tensor) or not isinstance(y_pred, torch.Tensor):
        return "the model has several outputs"
    if str(y_pred.dtype) != f"torch.{loss.dtype}" or y.device != y_pred.device or not y_pred.numel():
        return f"the outputs are not {loss.dtype}, or on another device than the labels"
    if "compute_loss" in vars(model):
        return "the model has its own compute_loss"
    return "a mask, or a call without state" if _has_mask(y_pred) or is_stateless() else ""


def _count(values: torch.Tensor) -> Any:
    """The number of values; on a GPU as a tensor, because there torch multiplies by the inverse of a plain number."""
    return values.numel() if values.device.type == "cpu" else values.new_full((), values.numel())


def _has_mask(x: Any) -> bool:
    return getattr(x, "_keras_mask", None) is not None


def _means(model: Any) -> Iterator[Any]:
    """The model's metrics that are running means: of its loss, and of built-in functions."""
    means: Any = import_module(f"{METRICS}reduction_metrics")
    known = means.Mean.update_state, means.MeanMetricWrapper.update_state
    lists: Any = getattr(model._compile_metrics, "_flat_metrics", None) or ()
    metrics: list[Any] = [model._loss_tracker]
    for one in filter(None, lists):
        metrics.extend(getattr(one, "metrics", ()))
    for metric in metrics:
        cls = metric.__class__
        is_known = cls.__module__.startswith(METRICS) and cls.update_state in known
        if is_known and computes_in(metric.dtype) and "update_state" not in vars(metric):
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
        if type(sample_weight) is not int or not is_fit(values, 0) or is_stateless():
            return original(values, sample_weight=sample_weight)
        return add(values * sample_weight, sample_weight)

    def update_mean_of_function(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is not None or _has_mask(y_pred) or is_stateless():
            return original(y_true, y_pred, sample_weight=sample_weight)
        values = metric._fn(y_true, y_pred, **metric._fn_kwargs)
        return add(values.sum(), len(values)) if is_fit(values, 1) else mean.update_state(metric, values)

    return update_mean if function is None else update_mean_of_function
