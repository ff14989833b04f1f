"""A task: what the user wants trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hasten.core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train, on which data, and when it counts as done.

    Attributes:
        model: ``() -> nn.Module``, called once for every run, after the seed is set.
        train_data: A map-style or iterable dataset, a DataLoader (used with its sampler, collate function and workers),
            or a function that returns one. A map-style dataset is shuffled anew every epoch.
        validation_data: The same, for the metric; never shuffled.
        loss: ``(output, target) -> scalar``; None for a model that returns its own loss (dict batches).
        optimizer: ``(model) -> optimizer``, or ``(model, steps) -> (optimizer, schedule)``. A schedule steps once after
            every optimizer step, not once an epoch: count in steps.
        metric: A name (``accuracy``, ``loss``, ``perplexity``, ...), a torchmetrics metric, or
            ``(output, target) -> number``, averaged over the samples.
        higher_is_better: The metric's direction; required only if neither its name nor the metric itself determines it.
        target: The metric at which training counts as done; None for what the task's own training reaches.
        batch_size: Samples of a step (a DataLoader has its own).
        epochs: Epochs to train; may be fractional.
        evaluate_every: Training samples between two evaluations; None for once an epoch.
        name: How reports call it.
    """

    model: Callable[[], Any]
    train_data: Any
    validation_data: Any = None
    loss: Callable[[Any, Any], Any] | None
    optimizer: Callable[..., Any]
    metric: Any = "loss"
    higher_is_better: bool | None = None
    target: float | None = None
    batch_size: int | None = None
    epochs: float = 1
    evaluate_every: int | None = None
    name: str = "task"

    def __post_init__(self) -> None:
        for field, signature in {"model": "() -> nn.Module", "optimizer": "(model) -> optimizer"}.items():
            value = getattr(self, field)
            is_instance = hasattr(value, "state_dict") and not isinstance(value, type)
            if is_instance or not callable(value):
                raise ConfigurationError(f"Task({field}=) must be a function {signature}, not a {type(value).__name__}")
        if self.loss is not None and not callable(self.loss):
            kind = type(self.loss).__name__
            raise ConfigurationError(f"Task(loss=) must be a function (output, target) -> scalar or None, not a {kind}")
        _check_positive("batch_size", self.batch_size, int, optional=True)
        _check_positive("epochs", self.epochs, (int, float))
        _check_positive("evaluate_every", self.evaluate_every, int, optional=True)
        if self.target is not None and not _is_finite_number(self.target):
            raise ConfigurationError(f"Task(target=) must be a finite number or None, not {self.target!r:.80}")
        value: Any = self.higher_is_better
        if not isinstance(value, (bool, type(None))):
            raise ConfigurationError(f"Task(higher_is_better=) must be True, False or None, not {value!r:.80}")

    def named(self, name: str) -> Task:
        """The task itself if it has a name, else a copy called ``name``."""
        return self if self.name != "task" else replace(self, name=name)


def optimizer_and_schedule(made: Any) -> tuple[Any, Any]:
    """A task's optimizer function's result as (optimizer, schedule or None); ConfigurationError for other tuples."""
    result: tuple[Any, ...] = made if isinstance(made, tuple) else (made, None)  # pyright: ignore[reportUnknownVariableType]
    if len(result) != 2:
        given = f"it returned a tuple of {len(result)} items"
        raise ConfigurationError(f"Task(optimizer=) must return a torch optimizer, or (optimizer, schedule); {given}")
    return result


def takes_steps(make_optimizer: Callable[..., Any]) -> bool:
    """Whether a task's optimizer function takes ``(model, steps)`` rather than ``(model)``."""
    try:
        parameters = inspect.signature(make_optimizer).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.default is p.empty and p.kind in positional]) >= 2


def scale_learning_rates(optimizer: Any, schedule: Any, factor: float) -> None:
    """Multiplies every learning rate, and the base and peak rates that a schedule stores, by ``factor``."""
    from hasten._torch_compat import chained_schedulers  # imports torch, which describing a task does not need

    for group in optimizer.param_groups:
        for key in group.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
            group[key] = group[key] * factor
    for scheduler in (schedule, *chained_schedulers(schedule)):
        for name in ("base_lrs", "max_lrs"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])


def _check_positive(field: str, value: Any, kind: Any, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not _is_finite_number(value) or not isinstance(value, kind) or value <= 0:
        whole = "whole " if kind is int else ""
        raise ConfigurationError(f"Task({field}=) must be a positive {whole}number, not {value!r:.80}")


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
