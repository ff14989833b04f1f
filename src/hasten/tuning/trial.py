"""A trial, inside its own process or as one rank of a job: a whole run, or a proof. Nothing that it changes survives it."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass

from hasten.benchmarking.exactness import check_exactness
from hasten.benchmarking.worker_group import COLLECTIVE_TIMEOUT_S
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import RunError
from hasten.core.method import Method
from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.core.run_context import Evaluation, RunContext, TrainPlan
from hasten.core.types import StepFn
from hasten.distributed.process_group import init_process_group
from hasten.engine.summary import first_sustained_target
from hasten.engine.tasks import TaskRef
from hasten.engine.train import device_of, train


class Trial:
    """One task, one recipe, one seed."""

    def __init__(self, task: str, methods: dict, device: str, seed: int):
        self.task, self.recipe, self.device, self.seed = TaskRef.from_json(task), Recipe(methods), device, seed
        self.watch = no_progress

    def run(self, target: float | None = None, give_up_after: float | None = None) -> dict:
        """A whole run: metric, evaluations (with the stopwatch's seconds), best_metric, seconds, gave_up.

        ``give_up_after``: seconds after which a run that has not reached the target can no longer win, and ends.
        """
        task, recipe = self.task.load(), self.recipe.with_method(f"{__name__}:NothingInVain")
        if give_up_after is not None and target is not None:
            recipe = recipe.with_method(f"{__name__}:GiveUp", seconds=float(give_up_after), target=float(target))
        result = train(task, recipe, device=self.device, seed=self.seed, timeout=COLLECTIVE_TIMEOUT_S, watch=self.watch)
        _refuse_idle(result["no_effect"])  # found out on the way
        if result["metric"] is None:
            raise RunError("the metric is missing or not a finite number")
        kept = ("metric", "best_metric", "evaluations", "steps", "samples", "seconds", "split", "stopped")
        late = give_up_after is not None and result["seconds"] >= give_up_after
        never = (
            first_sustained_target(
                [look["metric"] for look in result["evaluations"]], target, result["higher_is_better"]
            )
            is None
        )
        return {**{key: result[key] for key in kept}, "gave_up": result["stopped"] and late and never}

    def prove(self, base: dict, exactness: str, seconds: float) -> dict:
        """{"passed", "number", "why"}: what the candidate's exactness class promises, held against this very task."""
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


def _refuse_idle(idle: list) -> None:
    if idle:
        raise RunError("; ".join(f"{method} has nothing to act on: {why}" for method, why in idle))


@dataclass(frozen=True)
class RequireEffect(Method):
    """Refuses a run, as soon as it is built, of which a method says that it has nothing to act on."""

    card = Card(summary="no run in vain", exactness=Exactness.BIT_EXACT, order=WrapOrder.LAST)

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        _refuse_idle(run.no_effect)
        return optimizer_step


@dataclass(frozen=True)
class TimeLimitPruner(Method):
    """Ends a run that has missed its chance: ``seconds`` are over and the target has not been reached."""

    seconds: float = 0.0
    target: float = 0.0

    card = Card(summary="end a run that can no longer win", exactness=Exactness.BIT_EXACT, order=WrapOrder.LAST)

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        inner, began, sign = plan.stop, time.monotonic(), 1 if run.services.higher_is_better() else -1

        def stop(history: list[Evaluation]) -> bool:
            reached = any(sign * look.metric >= sign * self.target for look in history)
            late = time.monotonic() - began > self.seconds
            return (late and not reached) or (inner is not None and inner(history))

        plan.stop = stop
        return plan
