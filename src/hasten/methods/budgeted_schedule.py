"""Budgeted training: fewer epochs, with the whole learning-rate schedule compressed into them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import cos, pi
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from hasten import Card, ConfigurationError, Exactness, Method, NoEffectError, RunContext, TrainPlan, option
from hasten.core.types import OptimizerFactory
from hasten.utils.accelerated_schedule import accelerate_schedule
from hasten.utils.optimizers import OptimizerList, ScheduleList, optimizer_and_schedule, scale_learning_rates
from hasten.utils.search_range import SearchRange

DECAYS: dict[str, Callable[[float], float]] = {  # fraction of the steps left -> fraction of the peak learning rate
    "linear": lambda left: left,
    "cosine": lambda left: (1 - cos(pi * left)) / 2,
    "none": lambda left: 1.0,
}


@dataclass(frozen=True)
class BudgetedSchedule(Method):
    """Trains ``factor`` times the epochs, at ``peak`` times the learning rate.

    A schedule of the task keeps its shape and runs 1 / ``factor`` times as fast. A task without a schedule gets one:
    the learning rate rises linearly during the warm-up, then follows ``decay`` to zero at the end of the run. Reaching
    zero is what lets a short run end where a long one ends; the shorter the run, the higher the peak it needs.
    """

    card = Card(
        summary="fewer epochs with the learning-rate schedule compressed into them",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://arxiv.org/abs/2404.00498",
        gain_when="the learning rate is constant, or the run continues long after it could have ended",
        accelerates={"steps"},
        presets=(
            {"factor": 0.5, "peak": 3.0},
            {"factor": 0.5, "peak": 5.0},
            {"factor": 0.5, "peak": 8.0},
            {"factor": 0.25, "peak": 8.0},
            {"factor": 0.15, "peak": 10.0},
            {"factor": 0.1, "peak": 20.0},
        ),
        search_space={
            "factor": SearchRange(0.16, 0.64, is_length=True),
            "peak": SearchRange(1.5, 32.0),
            "warmup": SearchRange(0.03, 0.3),
        },
        trial_priority=2,
    )

    factor: float = option(0.5, above=0, below=1)  # epochs / epochs of the task
    decay: str = option("linear", one_of=tuple(DECAYS))  # schedule of a task without one; none: constant
    peak: float = option(1.0, above=0)  # learning rate / learning rate of the task
    warmup: float = option(0.1, at_least=0, below=1)  # fraction of the run's steps

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        run.observe_effect(self, partial(_describe, plan.epochs, run))
        plan.epochs *= self.factor
        return plan

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        steps = run.plan.steps
        if steps is None:
            raise ConfigurationError(
                "budgeted_schedule requires the number of steps, but the training data has no length; "
                "give the dataset a __len__"
            )

        def make_budgeted(model: torch.nn.Module) -> Any:
            optimizer, schedule = optimizer_and_schedule(make(model))
            if run.plan.schedule_interval == "evaluation":
                reason = "the task's schedule follows the metric, and has no length that could be compressed"
                raise ConfigurationError(f"budgeted_schedule cannot be used: {reason}; leave it out")
            if schedule is None:
                run.plan.schedule_interval = "step"
                schedule = self._default_schedule(optimizer, steps)
            else:
                schedule = accelerate_schedule(schedule, self.factor, run)
            scale_learning_rates(optimizer, schedule, self.peak)
            return optimizer, schedule

        return make_budgeted

    def _default_schedule(self, optimizer: Any, steps: int) -> Any:
        if self.decay == "none":
            return None
        warmup_steps, decay = min(round(self.warmup * steps), steps - 1), DECAYS[self.decay]

        def lr_factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            return decay((steps - step) / (steps - warmup_steps))

        if isinstance(optimizer, OptimizerList):
            return ScheduleList([LambdaLR(one, lr_factor) for one in optimizer.optimizers])
        return LambdaLR(optimizer, lr_factor)


def _describe(usual: float, run: RunContext) -> str:
    if run.plan.epochs >= usual:
        raise NoEffectError(f"the run has {run.plan.epochs:g} epochs, as without the method")
    rates = ", ".join(f"{rate:.3g}" for rate in sorted({float(group["lr"]) for group in run.optimizer.param_groups}))
    return f"{run.plan.epochs:g} epochs instead of {usual:g}; learning rate {rates} after step {run.progress.step}"
