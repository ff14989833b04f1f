"""Early stopping: ends the run once the target is held, or the metric no longer improves."""

from dataclasses import dataclass

from hasten import Card, Evaluation, Exactness, Method, NoEffectError, RunContext, TrainPlan, option


@dataclass(frozen=True)
class EarlyStopping(Method):
    """Stops after ``target_patience`` consecutive evaluations at the target, or ``patience`` without improvement.

    The decision is a function of all evaluations so far, which checkpoints store: a resumed run stops at the same step.
    """

    card = Card(
        summary="stop once the target is reached and held, or the metric no longer improves",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://doi.org/10.1007/3-540-49430-8_3",  # Prechelt 1998
        gain_when="the run continues long after its target",
        accelerates={"steps"},
        applies_to={"evaluations"},
        presets=({"target_patience": 3}, {"target_patience": 2}),
        not_searched="it reaches no target sooner; add it to the recipe to save the rest of the run",
    )

    target_patience: int = option(2, at_least=1)  # consecutive evaluations at or beyond the target
    patience: int = option(10, at_least=1)  # evaluations without improvement
    min_delta: float = option(0.0, at_least=0)  # smallest improvement that counts, in units of the metric

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        if run.task.validation_data is None:
            return run.report_no_effect(self, "the task has no validation data, so there are no evaluations", plan)
        sign, target, inner = (1 if run.services.higher_is_better() else -1), run.task.target, plan.stop

        def stop(history: list[Evaluation]) -> bool:
            scores = [sign * evaluation.metric for evaluation in history]
            last = scores[-self.target_patience :]
            is_held = target is not None and len(last) == self.target_patience and min(last) >= sign * target
            earlier, recent = scores[: -self.patience], scores[-self.patience :]
            is_stuck = bool(earlier) and max(recent) <= max(earlier) + self.min_delta
            return run.ranks.any(is_held or is_stuck or (inner is not None and inner(history)))

        def describe() -> str:
            if run.plan.stop is None:
                raise NoEffectError("the plan has lost its condition to stop")
            return "decides after every evaluation whether the run ends"

        run.observe_effect(self, describe)
        plan.stop = stop
        return plan
