"""A task: what the user wants trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hasten.core.errors import ConfigurationError
from hasten.core.optimizer_list import OptimizerList, ScheduleList

if TYPE_CHECKING:
    from hasten.core.run_context import TrainProgress

_OPTIONAL_FUNCTIONS = {
    "loss": "(output, target) -> scalar",
    "step": "(model, batch, context) -> loss",
    "evaluate": "(model, batches) -> number",
}


@dataclass
class StepContext:
    """What the training step of a task is given besides model and batch.

    Attributes:
        progress: Step, epoch and batch, counted from 0.
        state: Carried from one batch to the next, such as the hidden state of a recurrent network: tensors and plain
            data. It is empty at the first batch of every epoch, detached after every step, and part of checkpoints.
    """

    progress: TrainProgress
    state: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train, on which data, and when it counts as done.

    Attributes:
        model: ``() -> nn.Module``, called once for every run, after the seed is set.
        train_data: A map-style or iterable dataset, a DataLoader (used with its sampler, collate function and workers),
            or a function that returns one. A map-style dataset is shuffled anew every epoch.
        validation_data: The same, for the metric; never shuffled.
        loss: ``(output, target) -> scalar``; None for a model that returns its own loss (dict batches).
        step: The training step, in place of model and loss: ``(model, batch, context) -> loss``, see ``StepContext``.
            For several optimizers it is a generator that yields a loss for each, in their order: hasten computes the
            gradients of a loss and updates its optimizer before the generator continues.
        optimizer: ``(model) -> optimizer``, or ``(model, steps) -> (optimizer, schedule)``. Several optimizers are a
            list; their schedules, too.
        schedule_interval: When the schedule steps: after every "step" or "epoch". ReduceLROnPlateau steps after every
            evaluation, with the metric.
        clip_grad_norm: Limit of the norm of all gradients that an optimizer uses, as in ``clip_grad_norm_`` of torch.
        metric: A name (``accuracy``, ``loss``, ``perplexity``, ...), a torchmetrics metric, or
            ``(output, target) -> number``, averaged over the samples.
        evaluate: ``(model, batches) -> number`` computes the metric from the validation batches in a way of its own; in
            evaluation mode, without gradients. ``metric`` is then its name.
        higher_is_better: The metric's direction; required only if neither its name nor the metric itself determines it.
        target: The metric at which training counts as done; None for what the task's own training reaches.
        batch_size: Samples of a step. A DataLoader has its own; None for an iterable whose items are batches.
        epochs: Epochs to train; may be fractional.
        evaluate_every: Training samples between two evaluations; None for once an epoch.
        name: How reports call it.
    """

    model: Callable[[], Any]
    train_data: Any
    validation_data: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    step: Callable[[Any, Any, StepContext], Any] | None = None
    optimizer: Callable[..., Any]
    schedule_interval: str = "step"
    clip_grad_norm: float | None = None
    metric: Any = "loss"
    evaluate: Callable[[Any, Iterable[Any]], Any] | None = None
    higher_is_better: bool | None = None
    target: float | None = None
    batch_size: int | None = None
    epochs: float = 1
    evaluate_every: int | None = None
    name: str = "task"

    def __post_init__(self) -> None:
        for name, signature in {"model": "() -> nn.Module", "optimizer": "(model) -> optimizer"}.items():
            value = getattr(self, name)
            is_instance = hasattr(value, "state_dict") and not isinstance(value, type)
            if is_instance or not callable(value):
                raise ConfigurationError(f"Task({name}=) must be a function {signature}, not a {type(value).__name__}")
        for name, signature in _OPTIONAL_FUNCTIONS.items():
            value = getattr(self, name)
            if value is not None and not callable(value):
                kind = type(value).__name__
                raise ConfigurationError(f"Task({name}=) must be a function {signature} or None, not a {kind}")
        if self.evaluate is not None and self.validation_data is None:
            raise ConfigurationError("Task(evaluate=) requires Task(validation_data=), whose batches it is given")
        if self.evaluate is not None and not isinstance(self.metric, str):
            raise ConfigurationError("with Task(evaluate=), Task(metric=) must be the name of what it returns")
        if self.schedule_interval not in ("step", "epoch"):
            interval = self.schedule_interval
            raise ConfigurationError(f'Task(schedule_interval=) must be "step" or "epoch", not {interval!r:.80}')
        if self.schedule_interval == "epoch" and takes_steps(self.optimizer):
            reason = "an optimizer function that takes steps makes a schedule that counts steps"
            raise ConfigurationError(f'Task(schedule_interval="epoch") counts epochs, but {reason}; choose one of them')
        _check_positive("clip_grad_norm", self.clip_grad_norm, (int, float), optional=True)
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
    """A task's optimizer function's result as (optimizer, schedule or None); ConfigurationError for other tuples.

    Lists of several optimizers and schedules become an ``OptimizerList`` and a ``ScheduleList``.
    """
    result: tuple[Any, ...] = made if isinstance(made, tuple) else (made, None)  # pyright: ignore[reportUnknownVariableType]
    if len(result) != 2:
        given = f"it returned a tuple of {len(result)} items"
        advice = "several optimizers are a list"
        raise ConfigurationError(
            f"Task(optimizer=) must return a torch optimizer, or (optimizer, schedule); {given}; {advice}"
        )
    optimizer, schedule = result
    if isinstance(optimizer, list):
        optimizer = OptimizerList(optimizer)  # pyright: ignore[reportUnknownArgumentType]
    return optimizer, ScheduleList(schedule) if isinstance(schedule, list) else schedule  # pyright: ignore[reportUnknownArgumentType]


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
