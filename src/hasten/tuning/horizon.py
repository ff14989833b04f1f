"""A shorter training that stands for the whole one where whole trainings do not fit into the budget."""

from dataclasses import dataclass
from typing import Any

import torch

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method
from hasten.core.run_context import RunContext, TrainPlan
from hasten.core.types import OptimizerFactory
from hasten.utils.accelerated_schedule import accelerate_schedule
from hasten.utils.optimizers import optimizer_and_schedule


@dataclass(frozen=True)
class Horizon(Method):
    """Trains ``fraction`` of the epochs, with the learning-rate schedule compressed into them.

    The metric is measured ``evaluations`` times, at equal distances.
    """

    fraction: float = 1.0
    evaluations: int = 8

    card = Card(summary="a part of the training", exactness=Exactness.CHANGES_TRAINING, order=WrapOrder.FIRST)

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        plan.epochs *= self.fraction
        if plan.samples:
            plan.evaluate_every = max(plan.batch_size, int(plan.samples * plan.epochs / self.evaluations))
        return plan

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        def make_compressed(model: torch.nn.Module) -> Any:
            optimizer, schedule = optimizer_and_schedule(make(model))
            return optimizer, accelerate_schedule(schedule, self.fraction, run)

        return make_compressed
