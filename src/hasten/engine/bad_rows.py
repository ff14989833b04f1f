"""Rows that cannot be read: skipped up to a limit per run, stored in checkpoints, listed in the run directory.

Of a pipeline of hasten.data this module uses ``skip_bad_rows(limit)`` and ``faults``, which lists the skipped rows.
"""

from dataclasses import replace
from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.core.task import Task
from hasten.engine.data_adapters import is_factory

FILE = "skipped.jsonl"


def with_bad_row_limit(task: Task, max_rows: int) -> Task:
    """A copy of the task whose hasten.data pipelines (training, validation) each skip up to ``max_rows`` rows per run.

    ConfigurationError if the training data are no such pipeline.
    """
    validation = _with_limit(task.validation_data, max_rows, required=False)
    return replace(task, train_data=_with_limit(task.train_data, max_rows, required=True), validation_data=validation)


def skipped_rows(task: Task) -> list[dict[str, Any]]:
    """The rows skipped so far: [{"data": "train" or "validation", "row": index, "where": file and position, "why"}]."""
    return [{"data": name, **row} for name, faults in _policies(task).items() for row in faults.listed()]


def restore_skipped_rows(task: Task, rows: list[dict[str, Any]]) -> None:
    """Makes the pipelines of the task count as skipped the ``rows`` that ``skipped_rows`` returned, and no others."""
    for name, faults in _policies(task).items():
        own_rows = [row for row in rows if row["data"] == name]
        faults.restore({key: value for key, value in row.items() if key != "data"} for row in own_rows)


def _with_limit(data: Any, max_rows: int, required: bool) -> Any:
    if is_factory(data):
        return lambda: _with_limit(data(), max_rows, required)
    if hasattr(data, "skip_bad_rows"):
        return data.skip_bad_rows(max_rows)
    if required:
        advice = "only a pipeline of hasten.data can skip bad rows; leave --max-bad-rows out"
        raise ConfigurationError(f"Task(train_data=) is a {type(data).__name__}, but {advice}")
    return data


def _policies(task: Task) -> dict[str, Any]:
    """Name of the data ("train", "validation") -> bad-row policy of its pipeline; one that both share only once."""
    pipelines = {"train": task.train_data, "validation": task.validation_data}
    policies = {name: data.faults for name, data in pipelines.items() if hasattr(data, "skip_bad_rows")}
    policies = {name: faults for name, faults in policies.items() if faults.max_rows}
    if len(policies) == 2 and policies["train"] is policies["validation"]:
        del policies["validation"]
    return policies
