"""A trial, inside its own process or as one rank of a job: a whole run or an exactness check. It leaks nothing."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hasten.benchmarking.exactness import check_exactness
from hasten.benchmarking.worker_group import COLLECTIVE_TIMEOUT_S
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import RunError
from hasten.core.method import Method
from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.core.run_context import Evaluation, RunContext, TrainPlan
from hasten.core.types import OptimizerFactory
from hasten.distributed.process_group import init_process_group
from hasten.engine.data_adapters import check_process_count
from hasten.engine.metrics import higher_is_better, name_of
from hasten.engine.tasks import TaskRef, hash_of_loaded_code
from hasten.engine.train import device_of, train
from hasten.profiling.probe import Probe
from hasten.utils.accelerated_schedule import accelerate_schedule
from hasten.utils.optimizers import optimizer_and_schedule
from hasten.utils.targets import first_sustained_target

RESULT_KEYS = ("metric", "best_metric", "evaluations", "steps", "samples", "seconds", "split", "stopped", "effects")


class Trial:
    """A trial of one task with one recipe and one seed, in this process."""

    def __init__(self, task: str, methods: dict, device: str, seed: int):
        self.task, self.recipe, self.device, self.seed = TaskRef.from_json(task), Recipe(methods), device, seed
        self.on_progress = no_progress

    def run(self, target: float | None = None, time_limit: float | None = None, horizon: float = 1.0) -> dict:
        """A run: RESULT_KEYS of the result of ``train``, and whether the run was ``pruned``.

        It trains the fraction ``horizon`` of the training, or the whole.
        A run that has not reached the target of the metric after ``time_limit`` seconds is pruned: it can no longer
        win. Its evaluations up to there are its result.

        Raises RunError if a method has no effect, or the metric is missing or not finite.
        """
        recipe = self.recipe
        if time_limit is not None and target is not None:
            limits = {"seconds": float(time_limit), "target": float(target)}
            recipe = recipe.with_method(f"{__name__}:TimeLimitPruner", **limits)
        if horizon < 1:
            recipe = recipe.with_method(f"{__name__}:Horizon", fraction=float(horizon))
        where = {"device": self.device, "seed": self.seed, "timeout": COLLECTIVE_TIMEOUT_S, "require_effect": True}
        result = train(self.task.load(), recipe, on_progress=self.on_progress, **where)
        if result["metric"] is None:
            raise RunError("the metric is missing or not a finite number")
        metrics = [evaluation["metric"] for evaluation in result["evaluations"]]
        missed = first_sustained_target(metrics, target, result["higher_is_better"]) is None
        lost = time_limit is not None and missed and result["seconds"] >= time_limit
        return {**{key: result[key] for key in RESULT_KEYS}, "pruned": result["stopped"] and lost}

    def check_exactness(self, base: dict, exactness: str, seconds: float) -> dict:
        """Checks what the candidate's exactness class promises, against the methods ``base``.

        Returns the fields of an ``ExactnessCheck``, ``number`` None if not finite. ``seconds`` limits its time.
        """
        with init_process_group(self.device, COLLECTIVE_TIMEOUT_S) as ranks:
            check = check_exactness(
                self.task.load(),
                Recipe(base),
                self.recipe,
                Exactness[exactness],
                device=device_of(ranks, self.device),
                seed=self.seed,
                seconds=seconds,
                ranks=ranks,
            )
        return {**asdict(check), "number": check.number if math.isfinite(check.number) else None}


class FirstSteps(Probe):
    """An arm that runs the first steps, for an estimate of a training's time, and collects the facts of the run."""

    def build(self, with_evaluation: bool = True) -> dict:
        """The plan of ``Arm.build``, and the ``facts`` of the run: a diagnosis may be too long for the budget."""
        return super().build(with_evaluation) | {"facts": self.facts()}


class Description:
    """Loads a task, which may take long, in a process that can be ended."""

    def __init__(self, task: str):
        self.task, self.on_progress = TaskRef.from_json(task), no_progress

    def facts(self, processes: int, run_seconds: float | None = None, needs_metric: bool = True) -> dict:
        """``fingerprint``, ``has_validation``, ``higher_is_better``, ``metric`` (its name) and ``target`` of the task.

        ConfigurationError if it cannot be trained by so many ``processes``.
        """
        task = self.task.load()
        check_process_count(task, processes)
        return {
            "fingerprint": [self.task.fingerprint(), hash_of_loaded_code()],
            "has_validation": task.validation_data is not None,
            "higher_is_better": higher_is_better(task),
            "metric": name_of(task),
            "target": task.target,
        }


@dataclass(frozen=True)
class TimeLimitPruner(Method):
    """Ends a run that has not reached the target within ``seconds``."""

    seconds: float = 0.0
    target: float = 0.0

    card = Card(summary="ends a run that can no longer win", exactness=Exactness.BIT_EXACT, order=WrapOrder.LAST)

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        inner, began, sign = plan.stop, time.monotonic(), 1 if run.services.higher_is_better() else -1

        def stop(history: list[Evaluation]) -> bool:
            reached = any(sign * evaluation.metric >= sign * self.target for evaluation in history)
            lost = time.monotonic() - began > self.seconds and not reached
            return lost or (inner is not None and inner(history))

        plan.stop = stop
        return plan


@dataclass(frozen=True)
class Horizon(Method):
    """Trains ``fraction`` of the epochs, with the learning-rate schedule compressed into them.

    It stands for the whole training where whole ones do not fit into the budget. The metric is measured ``evaluations``
    times, at equal distances.
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
