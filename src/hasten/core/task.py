"""A task: what the user wants trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hasten.core.errors import ConfigurationError

if TYPE_CHECKING:
    from hasten.core.run_context import TrainProgress

_REQUIRED = {"model": "() -> nn.Module", "optimizer": "(model) -> optimizer"}
_OPTIONAL = {"step": "(model, batch, context) -> loss", "evaluate": "(model, batches) -> number"}
_FUNCTIONS = _REQUIRED | _OPTIONAL | {"loss": "(output, target) -> scalar"}


@dataclass
class StepContext:
    """What Task(step=) is given besides model and batch: the ``progress``, counted from 0, and a ``state``.

    The state is carried from one batch to the next, such as that of a recurrent network: tensors and plain data. It is
    empty at the first batch of every epoch, detached after every step, and part of checkpoints.
    """

    progress: TrainProgress
    state: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train, on which data, and when it counts as done.

    Attributes:
        model: ``() -> nn.Module``, called once for every run, after the seed is set.
        train_data: A map-style or iterable dataset, a DataLoader (used with its sampler, collate function and workers),
            or a function that returns one, or yields batches. A map-style dataset is shuffled anew every epoch.
        validation_data: The same, for the metric; never shuffled.
        loss: ``(output, target) -> scalar``; None for a model that returns its own loss (dict batches).
        step: ``(model, batch, context) -> loss``, in place of ``loss``; see ``StepContext``. For several optimizers, a
            generator of a loss for each in turn, which continues once that optimizer has updated.
        optimizer: ``(model) -> optimizer``, or ``(model, steps) -> (optimizer, schedule)``. Several of each are lists.
        schedule_interval: "step" or "epoch", after which the schedule steps. ReduceLROnPlateau steps after evaluations.
        clip_grad_norm: Maximum norm of the gradients that an optimizer uses, as in torch's ``clip_grad_norm_``.
        metric: A name (``accuracy``, ``loss``, ``perplexity``, ...), a torchmetrics metric, or
            ``(output, target) -> number``, averaged over the samples.
        evaluate: ``(model, validation batches) -> number``, a metric that is no mean; ``metric`` is then its name.
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
        for name, signature in _FUNCTIONS.items():
            value, required = getattr(self, name), name in _REQUIRED
            is_instance = required and hasattr(value, "state_dict") and not isinstance(value, type)
            if is_instance or not (callable(value) or (value is None and not required)):
                kind = f"a function {signature}{'' if required else ' or None'}"
                raise ConfigurationError(f"Task({name}=) must be {kind}, not a {type(value).__name__}")
        if self.evaluate is not None and (self.validation_data is None or not isinstance(self.metric, str)):
            needed = "Task(validation_data=), and the name of what it returns as Task(metric=)"
            raise ConfigurationError(f"Task(evaluate=) requires {needed}")
        if (value := self.schedule_interval) not in ("step", "epoch"):
            raise ConfigurationError(f'Task(schedule_interval=) must be "step" or "epoch", not {value!r:.80}')
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


def _check_positive(field: str, value: Any, kind: Any, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not _is_finite_number(value) or not isinstance(value, kind) or value <= 0:
        whole = "whole " if kind is int else ""
        raise ConfigurationError(f"Task({field}=) must be a positive {whole}number, not {value!r:.80}")


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
