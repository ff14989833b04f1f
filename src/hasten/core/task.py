"""A task: what the user wants trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hasten.core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train, on what, and when it counts as done.

    Attributes:
        model: ``() -> nn.Module``, made anew for every run, after the seed is set.
        train_data: a map-style or iterable dataset, a ready DataLoader (kept with its sampler, collate and
            workers), or a function that returns one. A map-style dataset is shuffled anew every epoch.
        validation_data: the same, for the metric; never shuffled.
        loss: ``(output, target) -> scalar``, or None for a model that returns its own loss (dict batches).
        optimizer: ``(model) -> optimizer``, or ``(model, steps) -> (optimizer, schedule)``. A schedule steps once after
            every optimizer step, not once an epoch: count in steps.
        metric: a known name (``accuracy``, ``loss``, ``perplexity``, ...), a torchmetrics metric, or
            ``(output, target) -> number``, averaged over the samples.
        higher_is_better: the metric's direction, where its name or the metric itself does not tell.
        target: the value at which training counts as done, in the metric's unit; None: what the task's own
            training reaches.
        batch_size: samples a step sees (a ready DataLoader brings its own).
        epochs: passes over the training data.
        evaluate_every: training samples between two evaluations; None: once an epoch.
        name: what to call it.
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

    def __post_init__(self):
        must_be_callable = {"model": "() -> nn.Module", "optimizer": "(model) -> optimizer"}
        for field, shape in must_be_callable.items():
            made_already = hasattr(getattr(self, field), "state_dict") and not isinstance(getattr(self, field), type)
            if made_already or not callable(getattr(self, field)):
                raise ConfigurationError(
                    f"Task({field}=) must be a function {shape}, not {_kind(getattr(self, field))}"
                )
        if self.loss is not None and not callable(self.loss):
            raise ConfigurationError(
                f"Task(loss=) must be a function (output, target) -> scalar or None, not {_kind(self.loss)}"
            )
        _positive("batch_size", self.batch_size, int, optional=True)
        _positive("epochs", self.epochs, (int, float))
        _positive("evaluate_every", self.evaluate_every, int, optional=True)
        if self.target is not None and not _is_finite_number(self.target):
            raise ConfigurationError(f"Task(target=) must be a finite number or None, not {self.target!r:.80}")
        if not isinstance(self.higher_is_better, (bool, type(None))):
            raise ConfigurationError(
                f"Task(higher_is_better=) must be True, False or None, not {self.higher_is_better!r:.80}"
            )

    def named(self, name: str) -> Task:
        """The same task under a name, unless it has one."""
        return self if self.name != "task" else replace(self, name=name)


def optimizer_and_schedule(made) -> tuple[Any, Any]:
    """What a task's optimizer function returned, as (optimizer, schedule or None).

    Raises:
        Refusal: a tuple of something else.
    """
    if isinstance(made, tuple) and len(made) != 2:
        raise ConfigurationError(
            f"Task(optimizer=) must return a torch optimizer, or (optimizer, schedule); it returned {len(made)} things"
        )
    return made if isinstance(made, tuple) else (made, None)


def takes_steps(make_optimizer: Callable) -> bool:
    """Whether a task's optimizer function is of the form ``(model, steps)`` and so builds its schedule for the run's length."""
    try:
        parameters = inspect.signature(make_optimizer).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) >= 2


def scale_learning_rates(optimizer, schedule, factor: float) -> None:
    """Multiplies every learning rate, and the base and peak rates from which a schedule computes them."""
    from hasten._torch_compat import (
        chained_schedulers,  # imports torch, which a script that only describes tasks need not
    )

    for group in optimizer.param_groups:
        for key in group.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
            group[key] = group[key] * factor
    for each in (schedule, *chained_schedulers(schedule)):
        for name in ("base_lrs", "max_lrs"):
            if hasattr(each, name):
                setattr(each, name, [rate * factor for rate in getattr(each, name)])


def _positive(field: str, value, kind, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not _is_finite_number(value) or not isinstance(value, kind) or value <= 0:
        raise ConfigurationError(
            f"Task({field}=) must be a positive {'whole ' if kind is int else ''}number, not {value!r:.80}"
        )


def _is_finite_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _kind(value) -> str:
    return f"a {type(value).__name__}"
