"""What a part of a run is replaced by to see what the run would be without it: methods of a few lines.

Input and update can be switched off and on in the middle of a run, so that one process gives the time with
the part and without it, seconds apart. None of these methods trains anything useful.
"""

from __future__ import annotations

import dataclasses

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.data import BatchSource
from hasten.core.method import Method
from hasten.core.run_context import RunContext, TrainPlan
from hasten.core.types import StepFn
from hasten.engine.registry import method_names
from hasten.utils.batch import batch_size

BATCH_FACTOR = 8
LARGER_BATCH = "larger_batch"  # the ceiling (of the cards) that a larger batch gives


def disabled_phases(run) -> set[str]:
    """What of a run is switched off at the moment: "input" and "optimizer_step" here, "logging" by the probe."""
    return run.checkpoint_state.setdefault("taken away", set())


def _card(summary: str) -> Card:
    """Outermost, so that what the recipe's own methods do in that phase is taken away too."""
    return Card(
        summary=summary, exactness=Exactness.CHANGES_TRAINING, order=WrapOrder.LAST, after=tuple(method_names())
    )


class ReplayedBatch(Method):
    card = _card("gives the same batch again and again: input costs nothing")

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if not batches.training:
            return batches
        away, progress = disabled_phases(run), run.progress

        def epoch(number, start):
            kept = None
            for batch in batches.epoch(number, start):
                if kept is None or batch_size(batch) > batch_size(kept):  # the last of a pass may be short
                    kept, counts = batch, (progress.global_batch_size, progress.loss_weight)
                yield batch
                while "input" in away:
                    progress.global_batch_size, progress.loss_weight = counts
                    yield kept

        return dataclasses.replace(batches, epoch=epoch)


class NoUpdate(Method):
    card = _card("leaves the weights as they are: the update costs nothing")

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        away = disabled_phases(run)
        return lambda: None if "optimizer_step" in away else optimizer_step()


class LargerBatch(Method):
    card = _card(
        f"{BATCH_FACTOR} times the batch: what every step costs whatever its size is paid {BATCH_FACTOR} times less often"
    )

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        return dataclasses.replace(plan, batch_size=BATCH_FACTOR * plan.batch_size)


def outside_name(method: type[Method]) -> str:
    """The name under which a recipe finds a method of this room."""
    return f"{method.__module__}:{method.__name__}"
