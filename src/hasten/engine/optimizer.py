"""The optimizer of a run with its learning-rate schedule, and the gradient clipping that belongs to the task."""

from collections.abc import Callable
from typing import Any, cast

import torch

from hasten.core.errors import ConfigurationError
from hasten.core.run_context import RunContext
from hasten.core.task import Task
from hasten.core.types import OptimizerFactory, StepFn
from hasten.distributed.dtensor_state import clip_norm
from hasten.engine.metrics import name_of
from hasten.utils.optimizers import (
    OptimizerList,
    optimizer_and_schedule,
    parameters_outside,
    sparse_gradients_layer,
    takes_steps,
)
from hasten.utils.tensor_list import TensorList

STATE = ("state_dict", "load_state_dict")  # what a checkpoint needs


def build_optimizer(task: Task, fold: Callable[[str, Any], Any], run: RunContext) -> tuple[torch.optim.Optimizer, Any]:
    """(optimizer, schedule or None) from Task(optimizer=), called through the ``optimizer`` hooks of all methods.

    ConfigurationError if it returns something else, or does not fit the task's step, schedule or length.
    """
    if task.schedule_interval == "epoch" and takes_steps(task.optimizer):
        reason = "an optimizer function that takes steps makes a schedule that counts steps"
        raise ConfigurationError(f'Task(schedule_interval="epoch") counts epochs, but {reason}; choose one of them')
    make = _saving_outside(_noting_plateau(_with_steps(task.optimizer, run.plan.steps), task, run), run)
    make = fold("optimizer", make)
    optimizer, schedule = optimizer_and_schedule(make(run.unwrapped_model))
    if isinstance(optimizer, OptimizerList) and task.step is None:
        advice = "give Task(step=), a generator that yields a loss for each"
        raise ConfigurationError(f"the task has {len(optimizer.optimizers)} optimizers; {advice}")
    pair = "a torch optimizer, or (optimizer, schedule)"
    if not all(hasattr(optimizer, name) for name in ("step", "zero_grad", "param_groups", *STATE)):
        raise ConfigurationError(f"Task(optimizer=) must return {pair}; it returned a {type(optimizer).__name__}")
    if schedule is not None and not hasattr(schedule, "step"):
        kind = type(schedule).__name__
        raise ConfigurationError(f"Task(optimizer=) must return {pair}; it returned a {kind} as the schedule")
    return cast(Any, optimizer), schedule


def check_schedule_state(schedule: Any) -> None:
    """ConfigurationError if a schedule, or one of several, has no state to save in a checkpoint."""
    for one in getattr(schedule, "schedules", [schedule] if schedule is not None else []):
        if not all(hasattr(one, name) for name in STATE):
            what = f"the schedule of Task(optimizer=), a {type(one).__name__}, has no state_dict and load_state_dict"
            advice = "without which no run can be resumed or measured; add both, or derive it from torch's LRScheduler"
            raise ConfigurationError(f"{what}, {advice}")


def _noting_plateau(make_optimizer: OptimizerFactory, task: Task, run: RunContext) -> OptimizerFactory:
    """``make_optimizer``, which for a ReduceLROnPlateau sets ``run.plan.schedule_interval`` to "evaluation".

    ConfigurationError if its ``mode`` contradicts the metric, validation data are missing, or it is one of several.
    """

    def make(model: torch.nn.Module) -> Any:
        made = make_optimizer(model)
        _, schedule = optimizer_and_schedule(made)
        several = getattr(schedule, "schedules", ())
        if any(isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) for one in several):
            advice = "use schedules that count steps or epochs"
            raise ConfigurationError(f"ReduceLROnPlateau cannot be one of several schedules; {advice}")
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            run.plan.schedule_interval = "evaluation"
            mode = "max" if run.services.higher_is_better() else "min"
            if task.validation_data is None:
                raise ConfigurationError("ReduceLROnPlateau waits for a metric; give Task(validation_data=)")
            if cast(Any, schedule).mode != mode:
                metric = f"the metric of the task, {name_of(task)}"
                raise ConfigurationError(f'ReduceLROnPlateau waits for {metric}; give it mode="{mode}"')
        return made

    return make


def _saving_outside(make_optimizer: OptimizerFactory, run: RunContext) -> OptimizerFactory:
    """``make_optimizer``, whose parameters outside the model, such as those of a loss, become part of checkpoints.

    ConfigurationError if no parameter of the model is among them, and for several processes, which average the
    gradients of the model only.
    """

    def make(model: torch.nn.Module) -> Any:
        made = make_optimizer(model)
        optimizer, _ = optimizer_and_schedule(made)
        outside = parameters_outside(model, optimizer) if hasattr(optimizer, "param_groups") else []
        if outside and len(outside) == sum(len(group["params"]) for group in optimizer.param_groups):
            advice = "use the model that it is given: lambda model: Adam(model.parameters())"
            raise ConfigurationError(f"Task(optimizer=) trains no parameter of the model of Task(model=); {advice}")
        if outside and not run.ranks.is_single_process:
            text = f"the optimizer trains {len(outside)} parameters that are not in the model"
            raise ConfigurationError(
                f"{text}; several processes share only those of the model, so make them part of it"
            )
        if outside:
            run.checkpoint_state["optimizer"] = TensorList(weight.detach() for weight in outside)
        return made

    return make


def _with_steps(make_optimizer: Callable[..., Any], steps: int | None) -> OptimizerFactory:
    """Task(optimizer=) as ``(model) -> optimizer``; ConfigurationError if it takes ``steps`` and these are unknown."""
    if not takes_steps(make_optimizer):
        return make_optimizer
    if steps is None:
        reason = "the training data has no length; give the dataset a __len__"
        raise ConfigurationError(f"the optimizer's schedule needs the number of steps, but {reason}")
    return lambda model: make_optimizer(model, steps)


def with_clipping(grad_transform: StepFn, max_norm: float | None, run: RunContext) -> StepFn:
    """``grad_transform``, then clips the gradients to ``max_norm`` (None: does not), which must be unscaled by then.

    ConfigurationError if the model has sparse gradients.
    """
    if max_norm is None:
        return grad_transform
    if layer := sparse_gradients_layer(run.unwrapped_model):
        reason = f"the gradients of {layer} are sparse, and torch computes no norm of these"
        raise ConfigurationError(f"Task(clip_grad_norm=) cannot be used: {reason}; make it with sparse=False")
    optimizer: Any = run.optimizer
    optimizers = optimizer.optimizers if isinstance(optimizer, OptimizerList) else [optimizer]
    # a strategy may let the optimizer update shards, which get their gradients in its step: those of the full weights
    parameters = [
        [getattr(weight, "full", weight) for group in one.param_groups for weight in group["params"]]
        for one in optimizers
    ]

    def transform_and_clip() -> None:
        grad_transform()
        current = optimizer.current if len(optimizers) > 1 else 0
        clip_norm(parameters[current], max_norm, run.parallel)

    return transform_and_clip
