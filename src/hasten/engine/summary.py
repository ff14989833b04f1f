"""What a run came to, as plain data."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.core.run_context import Evaluation, RunContext
from hasten.core.task import Task
from hasten.engine.metrics import higher_is_better, name_of
from hasten.engine.observers import number_or_none


def run_summary(task: Task, run: RunContext, history: list[Evaluation], seconds_at: list[float]) -> dict:
    """The metrics of a run and when its target was reached.

    Args:
        task: as it was given, whatever a method made of ``run.task``.
        seconds_at: of each evaluation, since the run began.
    """
    target, higher = task.target, higher_is_better(task)
    metrics = [number_or_none(evaluation.metric) for evaluation in history]
    known = [metric for metric in metrics if metric is not None]
    at = first_sustained_target(metrics, target, higher)
    return {
        "metric": metrics[-1] if metrics else None,
        "metric_name": name_of(task),
        "best_metric": (max if higher else min)(known, default=None),
        "higher_is_better": higher,
        "target": target,
        "reached": at is not None,
        "seconds_to_target": seconds_at[at] if at is not None else None,
        "samples_to_target": history[at].samples if at is not None else None,
        "steps": run.progress.step,
        "samples": run.progress.samples,
        "evaluations": [
            {"step": evaluation.step, "samples": evaluation.samples, "metric": metric, "seconds": seconds}
            for evaluation, metric, seconds in zip(history, metrics, seconds_at, strict=True)
        ],
        "no_effect": [list(pair) for pair in run.no_effect],
        "task": task.name,
        "seed": run.seed,
        "device": str(run.device),
    }


def first_sustained_target(metrics: Sequence[float | None], target: float | None, higher: bool) -> int | None:
    """The first evaluation that reaches the target and whose successor holds it; the last one needs no successor."""
    if target is None:
        return None
    there = [metric is not None and (metric >= target if higher else metric <= target) for metric in metrics]
    return next((i for i, yes in enumerate(there) if yes and all(there[i + 1 : i + 2])), None)
