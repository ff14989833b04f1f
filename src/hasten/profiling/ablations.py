"""Ablations: methods that replace one phase of a run by something free, to measure the run without that phase.

Input and optimizer step can be switched off and on between two blocks of steps, so that one process measures the time
with the phase and without it, seconds apart. None of these methods trains anything useful.
"""

import dataclasses
from collections.abc import Iterator

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.data import BatchSource
from hasten.core.method import Method
from hasten.core.run_context import RunContext, TrainPlan
from hasten.core.types import Batch, BatchFn, StepFn
from hasten.engine.registry import method_names
from hasten.utils.batch import batch_size

BATCH_FACTOR = 8
LARGER_BATCH = "larger_batch"  # name of the ceiling, also in the cards


def disabled_phases(run: RunContext) -> set[str]:
    """The mutable set of phases that are off in a run: "input", "copy", "optimizer_step" (here), "logging" (probe)."""
    return run.checkpoint_state.setdefault("disabled_phases", set())


def _card(summary: str) -> Card:
    """The card of an ablation: outermost, so that the recipe's own work in the phase is switched off, too."""
    after = tuple(method_names())
    return Card(summary=summary, exactness=Exactness.CHANGES_TRAINING, order=WrapOrder.LAST, after=after)


class ReplayedBatch(Method):
    """An ablation: while "input" is disabled, the training loop gets the same batch again and again."""

    card = _card("replays one batch: input costs nothing")

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if not batches.training:
            return batches
        disabled, progress = disabled_phases(run), run.progress

        def epoch(index: int, start: int) -> Iterator[Batch]:
            replayed, counts = None, (0, 1.0)
            for batch in batches.epoch(index, start):
                # the last batch of an epoch may be short
                if replayed is None or batch_size(batch) > batch_size(replayed):
                    replayed, counts = batch, (progress.global_batch_size, progress.loss_weight)
                yield batch
                while "input" in disabled:
                    progress.global_batch_size, progress.loss_weight = counts
                    yield replayed

        return dataclasses.replace(batches, epoch=epoch)


class ResidentBatch(Method):
    """An ablation: while "copy" is disabled, the step gets the batch that the step before it got on the device."""

    card = _card("keeps a batch on the device: copying costs nothing")

    def batch_transform(self, to_device: BatchFn, run: RunContext) -> BatchFn:
        disabled, resident = disabled_phases(run), list[Batch]()

        def transform(batch: Batch) -> Batch:
            if "copy" not in disabled or not resident or batch_size(resident[0]) != batch_size(batch):
                resident[:] = [to_device(batch)]
            return resident[0]

        return transform


class NoUpdate(Method):
    """An ablation: while "optimizer_step" is disabled, the weights are not updated."""

    card = _card("skips the optimizer step: the update costs nothing")

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        disabled = disabled_phases(run)
        return lambda: None if "optimizer_step" in disabled else optimizer_step()


class LargerBatch(Method):
    """An ablation: trains with BATCH_FACTOR times the batch size, to measure the fixed cost of a step."""

    card = _card(f"{BATCH_FACTOR} times the batch: the fixed cost of a step is paid {BATCH_FACTOR} times less often")

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        return dataclasses.replace(plan, batch_size=BATCH_FACTOR * plan.batch_size)


def import_path(method: type[Method]) -> str:
    """``module:Class``: how a recipe names a method that is not one of hasten's catalogue."""
    return f"{method.__module__}:{method.__name__}"
