"""Keras's metrics are read when something shows them, not after every batch."""

import time
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext
from hasten.utils.keras_models import NO_KERAS, is_keras, replace_method

BATCH_HOOKS = ("on_train_batch_end", "on_test_batch_end", "on_batch_end")
INTERVAL_S = 0.05  # in which Keras's progress bar draws itself at most once


@dataclass(frozen=True)
class LazyKerasMetrics(Method):
    """Computes the results of metrics at the end of an epoch, and for the progress bar as often as that draws itself.

    Keras computes them after every batch, and hands them to its callbacks in a thread. The metrics are updated with
    every batch as before, so the values at the end of an epoch are the same. A callback of the user's that runs after a
    batch gets its values after every batch, and this method then has no effect. ``train_on_batch`` and
    ``test_on_batch`` return the values of their batch. Hooks of ``keras.callbacks.CallbackList`` are replaced until the
    process ends; for other models they do what Keras's do.
    """

    card = Card(
        summary="read Keras's metrics once an epoch, not after every batch",
        exactness=Exactness.BIT_EXACT,
        source="https://keras.io/api/metrics/",
        gain=(1.0, 1.3),
        gain_when="the steps of a Keras model take a few milliseconds",
        accelerates={"logging", "evaluation"},
        applies_to={"keras"},
    )

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if not is_keras(model):
            return run.report_no_effect(self, NO_KERAS, model)
        lists: Any = import_module("keras.callbacks").CallbackList
        trainer: Any = import_module("keras.src.backend.torch.trainer").TorchTrainer
        cls: Any = type(model)
        for name in ("train_step", "compute_metrics", "get_metrics_result"):
            if getattr(cls, name, None) is not getattr(trainer, name):
                return run.report_no_effect(self, f"{cls.__name__} has its own {name}", model)
        spared = [0]
        replace_method(model, "compute_metrics", _updated(model))
        for name in ("train_on_batch", "test_on_batch"):  # which return the metrics of the batch
            replace_method(model, name, _not_lazy(model, getattr(model, name)))
        for name in BATCH_HOOKS[:2]:
            setattr(lists, name, _lazy(getattr(lists, name), spared))

        def observe() -> str:
            if not spared[0]:
                raise NoEffectError("a callback reads the metrics after every batch")
            return "the metrics were updated but not read after a batch"

        run.observe_effect(self, observe)
        return model


class Unread(dict[str, Any]):
    """The logs of a batch: each name of a metric with None; ``model.get_metrics_result()`` computes the values."""

    def __init__(self, model: Any, names: Any):
        super().__init__(dict.fromkeys(names))
        self.model = model


def _updated(model: Any) -> Any:
    """A ``compute_metrics`` that updates the metrics and returns ``Unread``.

    It reads them only in the first batch after ``compile``, for their names.
    """
    known: list[Any] = [None, None, ()]  # the metrics, the mean of the loss, the names

    def compute_metrics(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        if model._compile_metrics is not None:
            model._compile_metrics.update_state(y, y_pred, sample_weight)
        if known[0] is not model._compile_metrics or known[1] is not model._loss_tracker:
            known[:] = model._compile_metrics, model._loss_tracker, tuple(model.get_metrics_result())
        return Unread(model, known[2])

    return compute_metrics


def _not_lazy(model: Any, original: Any) -> Any:
    """A method of the model that computes its metrics as Keras does."""

    @wraps(original)
    def on_batch(*args: Any, **kwargs: Any) -> Any:
        lazy = model.__dict__.pop("compute_metrics")
        try:
            return original(*args, **kwargs)
        finally:
            model.__dict__["compute_metrics"] = lazy

    return on_batch


def _lazy(original: Any, spared: list[int]) -> Any:
    drawn = [0.0]

    def on_batch_end(callbacks: Any, batch: int, logs: Any = None) -> None:
        if not isinstance(logs, Unread):
            return original(callbacks, batch, logs)
        bar, now = callbacks._progbar, time.monotonic()
        reads = any(_listens(callback) for callback in callbacks.callbacks if callback is not bar)
        draws = bar is not None and bar.verbose == 1 and now - drawn[0] >= INTERVAL_S
        if not reads and not draws:
            spared[0] += 1
            return
        drawn[0] = now
        return original(callbacks, batch, logs.model.get_metrics_result())

    return on_batch_end


def _listens(callback: Any) -> bool:
    """Whether a callback does something after a batch."""
    base: Any = import_module("keras.callbacks").Callback
    hooks = {name: getattr(callback, name) for name in BATCH_HOOKS}  # of the class, or set in the object
    return any(getattr(hook, "__func__", None) is not getattr(base, name) for name, hook in hooks.items())
