"""A whole run of a script, and the metric in what it printed or logged."""

from __future__ import annotations

import time
import warnings
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hasten.core.errors import HastenWarning, RunError
from hasten.hosts.metric import (
    Ambiguous,
    Found,
    choose_metric,
    question,
    select_metric,
    series_of,
    series_of_logged,
)
from hasten.hosts.process import ScriptProcess
from hasten.hosts.site_map import known_sites

if TYPE_CHECKING:
    from hasten.hosts.metric_lines import Line, Series
    from hasten.hosts.script_ref import ScriptRef

MOST_STEPS = 1 << 40  # of one request: to the end of the script
HELD_OUT = ("validation", "test", "evaluation")


def find_metric(script: ScriptRef, process: ScriptProcess, described: dict[str, Any]) -> Found | None:
    """The metric of a run: what ``--metric`` names, else what was logged, else what was printed; None if there is none.

    Raises:
        ConfigurationError: Several numbers could be the metric: the question to the user. Or none has the given name.
    """
    logged = series_of_logged([(t, name, value, evaluating) for t, name, value, evaluating in described["logged"]])
    printed = series_of(lines_of(process.whole_output(), described["marks"], described["seconds"]))
    if script.metric is not None:
        return select_metric([*logged, *printed], script.metric)
    if described["monitor"] is not None:  # by a callback, an argument or ``hasten.attach``
        return select_metric(logged, ":".join(filter(None, described["monitor"])))
    for series in (logged, printed):
        found = choose_metric(series)
        if isinstance(found, Found):
            return found
        if isinstance(found, Ambiguous):
            if any(_is_held_out(one) for one in found.candidates):
                raise question(found)
            text = str(question(found)).partition("; pass ")[2]
            warnings.warn(f"no metric is measured on held-out data; to judge by one, pass {text}", HastenWarning, 2)
    return None


def lines_of(output: str, marks: list[list[Any]], seconds: float) -> list[Line]:
    """Each line of a script's output, with the seconds until which it was printed, and whether in an evaluation.

    Args:
        output: What it printed.
        marks: [seconds, step, bytes of the output until then, whether an evaluation begins] at each change.
        seconds: Of the whole run.
    """
    ends = [*marks, [seconds, 0, 1 << 62, not (marks and marks[-1][3])]]
    starts = [0, *(mark[2] for mark in ends)]
    lines: list[Line] = []
    data = output.encode(errors="replace")
    for (begin, end), (at, _, _, begins) in zip(pairwise(starts), ends, strict=True):
        part = data[begin:end].decode(errors="replace")
        lines += [(at, line, not begins) for line in part.splitlines() if line.strip()]
    return lines


def run_to_end(
    script: ScriptRef, methods: dict[str, Any], device: str, seed: int, deadline: float | None, time_limit: float | None
) -> dict[str, Any]:
    """Runs a script to its end: the keys of ``tuning.trial.Trial.run``.

    Raises:
        RunError: The metric is missing, or a method has no effect.
    """
    began = time.monotonic()
    with ScriptProcess(script, methods, device, seed, known_sites(script), deadline) as process:
        answer = process.wait_until_trained(None, deadline)
        pruned = False
        while not answer.get("ended") and not pruned:
            answer = process.ask("train", None, deadline, count=MOST_STEPS if time_limit is None else 1000)
            pruned = time_limit is not None and time.monotonic() - began > time_limit
        described = process.ask("describe", None, deadline)
        found = find_metric(script, process, described)
    if found is None:
        raise RunError("the metric is missing")
    per_step = (known_sites(script) or {}).get("samples_per_step") or 1
    marks = described["marks"]
    times = [mark[0] for mark in marks]
    rows = []
    for at, value in zip(found.seconds, found.values, strict=True):
        index = bisect_right(times, at) - 1
        step = marks[index][1] if index >= 0 else 0
        rows.append({"step": step, "samples": step * per_step, "seconds": at, "metric": value})
    sign = 1 if found.direction == "max" else -1
    return {
        "metric": rows[-1]["metric"],
        "best_metric": sign * max(sign * row["metric"] for row in rows),
        "evaluations": rows,
        "steps": answer["steps"],
        "samples": answer["steps"] * per_step,
        "seconds": described["seconds"],
        "split": {},
        "stopped": pruned,
        "effects": {},
        "pruned": pruned,
    }


def _is_held_out(series: Series) -> bool:
    return series.phase in HELD_OUT
