"""The outcome of a run as plain data."""

from typing import Any

from hasten.core.run_context import Evaluation, RunContext
from hasten.core.task import Task
from hasten.engine.metrics import higher_is_better, name_of
from hasten.engine.observers import finite_or_none
from hasten.utils.targets import first_sustained_target


def run_summary(task: Task, run: RunContext, history: list[Evaluation], seconds_at: list[float]) -> dict[str, Any]:
    """The metrics of a run and when its target was reached; ``seconds_at``: seconds of the run at each evaluation.

    ``task`` is the task as the user gave it; a method may have changed ``run.task``.
    """
    higher = higher_is_better(task)
    metrics = [finite_or_none(evaluation.metric) for evaluation in history]
    finite = [metric for metric in metrics if metric is not None]
    reached = first_sustained_target(metrics, task.target, higher)
    return {
        "metric": metrics[-1] if metrics else None,
        "metric_name": name_of(task),
        "best_metric": (max if higher else min)(finite, default=None),
        "higher_is_better": higher,
        "target": task.target,
        "reached": reached is not None,
        "seconds_to_target": None if reached is None else seconds_at[reached],
        "samples_to_target": None if reached is None else history[reached].samples,
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
