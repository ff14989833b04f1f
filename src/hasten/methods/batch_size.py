"""Larger batches, with the learning rate that goes with them: fewer steps, each better at filling the machine."""

import math
from dataclasses import dataclass

from hasten.core.card import Card, Exactness
from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext, TrainPlan
from hasten.core.task import optimizer_and_schedule, scale_learning_rates
from hasten.core.types import OptimizerFactory, StepFn

RULES = {"linear": float, "sqrt": math.sqrt, "none": lambda factor: 1.0}


@dataclass(frozen=True)
class BatchSize(Method):
    """``factor`` times the batch; the learning rate grows by the factor (``linear``), its root (``sqrt``) or not (``none``).

    Over the first ``warmup`` share of the steps it climbs from the task's own rate, a little in every step, to the
    larger one (Goyal et al. 2017, section 2.2), on top of whatever schedule there is.
    """

    factor: int = option(2, at_least=2, at_most=65536)
    rule: str = option("sqrt", one_of=tuple(RULES))
    warmup: float = option(0.05, at_least=0, below=1)  # share of the steps

    card = Card(
        summary="larger batches with a matching learning rate and warm-up",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://arxiv.org/abs/1706.02677",
        gain_when="a step's fixed costs weigh more than its arithmetic; linear for SGD, sqrt for Adam",
        accelerates={"steps", "forward", "backward", "optimizer_step", "input"},
        presets=tuple({"factor": factor, "rule": rule} for factor in (2, 4, 8) for rule in ("sqrt", "linear")),
        trial_priority=1,
        ceiling="larger_batch",
    )

    @property
    def scale(self) -> float:
        """What the learning rate is multiplied by."""
        return RULES[self.rule](self.factor)

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        plan.batch_size *= self.factor
        return plan

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if batches.training and batches.spec is not None and len(batches.spec.dataset) < run.plan.batch_size:
            samples, size = len(batches.spec.dataset), run.plan.batch_size
            raise ConfigurationError(
                f"a batch of {size} is larger than the training data ({samples} samples); choose a factor below {self.factor}"
            )
        return batches

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        def with_scaled_rates(model):
            optimizer, schedule = optimizer_and_schedule(make(model))
            scale_learning_rates(optimizer, schedule, self.scale)
            return optimizer, schedule

        return with_scaled_rates

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        if not self.warmup or self.scale == 1:
            return optimizer_step
        if run.plan.steps is None:
            raise ConfigurationError(
                "the warm-up of batch_size is a share of the steps, but the training data has no length; say warmup=0"
            )
        steps, progress, groups = round(self.warmup * run.plan.steps), run.progress, run.optimizer.param_groups

        def warmed_up():
            if progress.step >= steps:
                return optimizer_step()
            planned = [group["lr"] for group in groups]
            share = (1 + (self.scale - 1) * progress.step / steps) / self.scale
            for group in groups:
                group["lr"] = group["lr"] * share
            optimizer_step()
            for group, rate in zip(groups, planned, strict=True):
                group["lr"] = rate

        return warmed_up
