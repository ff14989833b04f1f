"""Fewer passes over the data, with the whole schedule squeezed into them. Most record speed-ups are this."""

from dataclasses import dataclass
from math import cos, pi

from torch.optim.lr_scheduler import LambdaLR

from hasten._torch_compat import chained_schedulers
from hasten.core.card import Card, Exactness
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext, TrainPlan
from hasten.core.task import optimizer_and_schedule, scale_learning_rates, takes_steps
from hasten.core.types import OptimizerFactory

DECAYS = {"linear": lambda left: left, "cosine": lambda left: (1 - cos(pi * left)) / 2, "none": lambda left: 1.0}


@dataclass(frozen=True)
class BudgetedSchedule(Method):
    """``factor`` times the epochs, at ``peak`` times the learning rate.

    A task with a schedule keeps its shape, in less time. A task without one gets ``decay``: the rate climbs over the
    first ``warmup`` share of the steps, then falls to zero at the end of the run. Reaching zero is what makes a short
    run end where a long one ends; the more epochs are left out, the higher a peak it takes.
    """

    factor: float = option(0.5, above=0, below=1)
    decay: str = option("linear", one_of=tuple(DECAYS))
    peak: float = option(1.0, above=0)
    warmup: float = option(0.1, at_least=0, below=1)  # share of the steps

    card = Card(
        summary="fewer epochs with the learning-rate schedule squeezed into them",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://arxiv.org/abs/2404.00498",
        gain_when="the learning rate is constant, or the run goes on long after it could have ended",
        accelerates={"steps"},
        presets=(
            {"factor": 0.5, "peak": 3.0},
            {"factor": 0.5, "peak": 5.0},
            {"factor": 0.5, "peak": 8.0},
            {"factor": 0.25, "peak": 8.0},
            {"factor": 0.15, "peak": 10.0},
            {"factor": 0.1, "peak": 20.0},
        ),
        trial_priority=2,
    )

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        plan.epochs *= self.factor
        return plan

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        if run.plan.steps is None:
            raise ConfigurationError(
                "budgeted_schedule cannot tell where the run ends: the training data has no length; give the dataset a __len__"
            )

        def squeezed(model):
            optimizer, schedule = optimizer_and_schedule(make(model))
            if schedule is None:
                schedule = self._own_schedule(optimizer, run.plan.steps)
            elif not takes_steps(run.task.optimizer):  # it was made for the long run
                schedule = Squeezed(schedule, self.factor)
            scale_learning_rates(optimizer, schedule, self.peak)
            return optimizer, schedule

        return squeezed

    def _own_schedule(self, optimizer, steps: int):
        if self.decay == "none":
            return None
        climb, fall = min(round(self.warmup * steps), steps - 1), DECAYS[self.decay]
        return LambdaLR(
            optimizer, lambda step: (step + 1) / (climb + 1) if step < climb else fall((steps - step) / (steps - climb))
        )


class Squeezed:
    """A schedule that advances 1 / ``factor`` of its steps for every step of the run."""

    def __init__(self, schedule, factor: float):
        self.schedule, self.factor, self.step_number, self.advanced = schedule, factor, 0, 0

    @property
    def _schedulers(self) -> list:
        return [self.schedule, *chained_schedulers(self.schedule)]

    def step(self) -> None:
        self.step_number += 1
        while self.advanced < round(self.step_number / self.factor):
            self.schedule.step()
            self.advanced += 1

    def state_dict(self) -> dict:
        return {"schedule": self.schedule.state_dict(), "step_number": self.step_number, "advanced": self.advanced}

    def load_state_dict(self, state: dict) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.step_number, self.advanced = state["step_number"], state["advanced"]
