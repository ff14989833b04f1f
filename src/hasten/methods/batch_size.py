"""Larger batches with a learning rate to match: fewer steps, each of which uses the hardware better."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten import BatchSource, Card, Exactness, Method, RunContext, TrainPlan, option
from hasten.core.errors import ConfigurationError, NoEffectError
from hasten.core.types import OptimizerFactory, StepFn
from hasten.utils.accelerated_schedule import accelerate_schedule
from hasten.utils.op_recorder import NOT_CHECKED
from hasten.utils.optimizers import optimizer_and_schedule, scale_learning_rates
from hasten.utils.search_range import SearchRange

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda factor: 1.0}


@dataclass(frozen=True)
class BatchSize(Method):
    """Multiplies the batch size by ``factor``, and the learning rate by the factor that ``rule`` computes from it.

    During the warm-up the learning rate rises linearly, step by step, from the task's own rate to the scaled one (Goyal
    et al. 2017, section 2.2), multiplied with the schedule of the task, which advances as fast as the samples.
    """

    card = Card(
        summary="larger batches with a scaled learning rate and warm-up",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://arxiv.org/abs/1706.02677",
        gain_when="the fixed cost of a step exceeds its arithmetic; linear for SGD, sqrt for Adam",
        accelerates={"steps", "forward", "backward", "optimizer_step", "input"},
        presets=tuple({"factor": factor, "rule": rule} for factor in (2, 4, 8) for rule in ("sqrt", "linear")),
        search_space={"factor": SearchRange(1, 16, powers_of_two=True, no_effect=1), "rule": "none"},
        trial_priority=1,
        ceiling="larger_batch",
    )

    factor: int = option(2, at_least=2, at_most=65536)  # new batch size / batch size of the task
    rule: str = option("sqrt", one_of=tuple(RULES))  # learning rate times factor, its square root, or 1
    warmup: float = option(0.05, at_least=0, below=1)  # fraction of the run's steps

    @property
    def lr_scale(self) -> float:
        return RULES[self.rule](self.factor)

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        run.observe_effect(self, partial(_observe, plan.batch_size, run))
        plan.batch_size *= self.factor
        return plan

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if batches.training and batches.spec is not None and len(batches.spec.dataset) < run.plan.batch_size:
            raise ConfigurationError(
                f"batch_size:factor={self.factor} gives a batch of {run.plan.batch_size}, which is larger than the "
                f"training data ({len(batches.spec.dataset)} samples); choose a factor below {self.factor}"
            )
        return batches

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        def make_scaled(model: torch.nn.Module) -> Any:
            optimizer, schedule = optimizer_and_schedule(make(model))
            if run.task.schedule_interval == "step":  # one that counts epochs stays; so does one made for ``steps``
                schedule = accelerate_schedule(schedule, 1 / self.factor, run)
            scale_learning_rates(optimizer, schedule, self.lr_scale)
            return optimizer, schedule

        return make_scaled

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        if not self.warmup or self.lr_scale == 1:
            return optimizer_step
        if run.plan.steps is None:
            problem = "batch_size:warmup is a fraction of the steps, but the training data has no length"
            raise ConfigurationError(f"{problem}; pass warmup=0")
        warmup_steps, progress = round(self.warmup * run.plan.steps), run.progress

        def step_with_warmup() -> None:
            if progress.step >= warmup_steps:
                return optimizer_step()
            groups = run.optimizer.param_groups  # new dictionaries after a checkpoint was loaded
            scheduled = [group["lr"] for group in groups]
            share = (1 + (self.lr_scale - 1) * progress.step / warmup_steps) / self.lr_scale
            for group in groups:
                group["lr"] = group["lr"] * share
            optimizer_step()
            for group, lr in zip(groups, scheduled, strict=True):
                group["lr"] = lr

        return step_with_warmup


def _observe(usual: int, run: RunContext) -> Generator[None, None, str]:
    before = run.progress.samples
    yield
    samples = run.progress.samples - before
    if samples > usual:
        return f"the observed step trained {samples} samples instead of {usual}"
    if run.progress.samples > usual * run.progress.step:  # on average, whatever the length of an epoch
        return f"{NOT_CHECKED}: the observed step was the last one of an epoch, of {samples} samples"
    raise NoEffectError(f"the observed step trained {samples} samples, as without the method")
