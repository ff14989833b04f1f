"""Stops when the target is reached and held, or when nothing gets better any more."""

from dataclasses import dataclass

from hasten.core.card import Card, Exactness
from hasten.core.method import Method, option
from hasten.core.run_context import Evaluation, RunContext, TrainPlan


@dataclass(frozen=True)
class EarlyStopping(Method):
    """Stops after ``hold`` looks in a row at or beyond the task's target, or ``patience`` looks without ``min_delta`` of progress.

    The decision is a function of the evaluations so far, which travel in the checkpoint: so does the patience.
    """

    target_patience: int = option(2, at_least=1)  # looks
    patience: int = option(10, at_least=1)  # looks
    min_delta: float = option(0.0, at_least=0)  # in the metric's unit

    card = Card(
        summary="stop once the target is reached and held, or progress has ended",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://doi.org/10.1007/3-540-49430-8_3",  # Prechelt 1998
        gain_when="the run goes on long after its target",
        accelerates={"steps"},
        applies_to={"evaluations"},
        presets=({"hold": 3}, {"hold": 2}),
        not_searched="it ends a run at its target and does not reach it sooner; add it to the recipe to save the rest of the run",
    )

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        if run.task.validation_data is None:
            run.report_no_effect(self, "the task has no validation data, so nothing tells when to stop")
            return plan
        sign, target, inner = (1 if run.services.higher_is_better() else -1), run.task.target, plan.stop

        def stop(history: list[Evaluation]) -> bool:
            scores = [sign * look.metric for look in history]
            done = self._target_held(scores, None if target is None else sign * target) or self._no_progress(scores)
            wanted = inner is not None and inner(history)
            return run.any_rank(done or wanted)

        plan.stop = stop
        return plan

    def _target_held(self, scores: list[float], target: float | None) -> bool:
        last = scores[-self.target_patience :]
        return target is not None and len(last) == self.target_patience and min(last) >= target

    def _no_progress(self, scores: list[float]) -> bool:
        """Whether the last ``patience`` looks brought nothing that beats the best before them by ``min_delta``."""
        earlier, later = scores[: -self.patience], scores[-self.patience :]
        return bool(earlier) and max(later) <= max(earlier) + self.min_delta
