"""Rows that cannot be read and are skipped: up to a limit for each run, stored in its checkpoints, listed in its directory.

Of a pipeline of hasten.data only two names are used here: ``skip_bad(at_most)`` and ``faults``, which lists the skipped rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.core.task import Task
from hasten.engine.data_adapters import is_factory

FILE = "skipped.jsonl"


def with_bad_row_limit(task: Task, at_most: int) -> Task:
    """The task with data that skip up to ``at_most`` rows that cannot be read. Validation data that are no pipeline stay as they are.

    Raises:
        Refusal: an invalid number, or training data that are no pipeline; for data that a function makes, when it is called.
    """
    validation = _tolerant(task.validation_data, at_most, must=False)
    return replace(task, train_data=_tolerant(task.train_data, at_most, must=True), validation_data=validation)


def skipped_rows(task: Task) -> list[dict]:
    """The rows skipped so far: [{"data": "train" or "validation", "row", "where", "why"}], in order."""
    return [{"data": name, **row} for name, faults in _faults(task).items() for row in faults.listed()]


def restore_skipped_rows(task: Task, rows: list[dict]) -> None:
    """Restores the rows that ``left_out`` returned in an earlier process of the run."""
    for name, faults in _faults(task).items():
        faults.restore(
            {key: value for key, value in row.items() if key != "data"} for row in rows if row["data"] == name
        )


def _tolerant(data: Any, at_most: int, must: bool) -> Any:
    if is_factory(data):
        return lambda: _tolerant(data(), at_most, must)
    if hasattr(data, "skip_bad_rows"):
        return data.skip_bad_rows(at_most)
    if must:
        what = f"Task(train_data=) is a {type(data).__name__}"
        raise ConfigurationError(
            f"{what}, and only a pipeline of hasten.data can leave bad rows out; leave --max-bad-rows out"
        )
    return data


def _faults(task: Task) -> dict[str, Any]:
    """The counter of each pipeline that may skip rows; a counter that two pipelines share only once."""
    pipelines = {"train": task.train_data, "validation": task.validation_data}
    found = {
        name: data.faults for name, data in pipelines.items() if hasattr(data, "skip_bad_rows") and data.faults.max_rows
    }
    if len(found) == 2 and found["train"] is found["validation"]:
        del found["validation"]
    return found
