"""A whole run of a script, and the metric in what it printed or logged."""

from __future__ import annotations

import math
import time
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.hosts.metric import HELD_OUT, Ambiguous, Found, choose_metric, question, select_metric, series_of_logged
from hasten.hosts.metric_lines import series_of
from hasten.hosts.metric_names import meaning_of
from hasten.hosts.process import ScriptProcess
from hasten.hosts.site_map import known_sites

if TYPE_CHECKING:
    from hasten.hosts.arm import ScriptWorker
    from hasten.hosts.metric_lines import Line, Series
    from hasten.hosts.script_ref import ScriptRef

MOST_STEPS = 1 << 40  # of one request: to the end of the script
ENOUGH_VALUES = 3  # of a metric, after which a name like its own that is asked for will not come either
SPELLING = 0.8  # least likeness of two spellings of a name, as in difflib
MAX_LINE = 4_000  # characters


def metric_of_run(script: ScriptRef, process: ScriptProcess, described: dict[str, Any]) -> Found | None:
    """The metric of a run: what ``--metric`` names, else what the script monitors, logs or prints, in this order.

    None if no number looks like a metric, and, with a warning, if none is known to be measured on held-out data.

    Raises:
        ConfigurationError: It is not clear which of several numbers is the metric, or whether higher is better: the
            text asks the user. Or no number has the name that ``--metric`` gives.
    """
    found = metric_so_far(script, process, described)
    if not isinstance(found, Ambiguous):
        return found
    if _is_held_out(found):
        raise question(found)
    text = str(question(found)).partition("; pass ")[2]
    warnings.warn(f"no metric is measured on held-out data; to judge by one, pass {text}", HastenWarning, 2)
    return None


def metric_so_far(script: ScriptRef, process: ScriptProcess, described: dict[str, Any]) -> Found | Ambiguous | None:
    """The metric in what a script has printed and logged until now; as ``metric_of_run``, but candidates are returned.

    Raises:
        ConfigurationError: No number has the name that ``--metric`` gives, several have it, or its direction is
            unknown.
    """
    logged, printed = _series(process, described)
    if script.metric is not None:
        return select_metric([*logged, *printed], script.metric)
    if described["monitor"] is not None:  # by a callback, an argument or ``hasten.attach``
        return select_metric(logged, ":".join(filter(None, described["monitor"])))
    known = (known_sites(script) or {}).get("metric")  # in a run that evaluates once, another one may seem likelier
    for series in (logged, printed):
        if known and (same := [one for one in series if one.name == known["name"]]):
            return select_metric(same, f"{known['name']}:{known['direction']}")
    evaluating = next((mark[0] for mark in described["marks"]), math.inf)
    found = [choose_metric(series, evaluating) for series in (logged, printed)]
    return next((one for one in found if _is_held_out(one)), found[1] or found[0])


def _series(process: ScriptProcess, described: dict[str, Any]) -> tuple[list[Series], list[Series]]:
    """(series that a script has logged, series that it has printed) until now."""
    printed = series_of(lines_of(*process.printed(), described["marks"], described["seconds"]))
    return series_of_logged(described["logged"]), printed


def seen_metric(script: ScriptRef, process: ScriptProcess, described: dict[str, Any]) -> dict[str, Any]:
    """``metric_so_far`` as plain data; its errors become ``why``.

    Keys: ``name``, ``direction`` and ``values`` of the metric, empty if there is none; ``candidates``, if the choice is
    not clear, each with a name, a direction ("" if unknown) and values; ``why`` there is no metric.
    """
    nothing = {"name": "", "direction": "", "values": [], "candidates": [], "why": ""}
    try:
        found = metric_so_far(script, process, described)
    except ConfigurationError as error:
        return nothing | {"why": str(error)}
    if found is None:
        return nothing | {"why": "the script has printed and logged no number that looks like a metric so far"}
    if isinstance(found, Found):
        return nothing | {"name": found.name, "direction": found.direction, "values": _finite(found.values)}
    seen = {"candidates": list[dict[str, Any]](), "why": str(question(found))}
    for one in found.candidates:
        direction = meaning_of(one.name).direction
        seen["candidates"].append({"name": one.name, "direction": direction, "values": _finite(one.values)})
    return nothing | seen


def _finite(values: Sequence[float]) -> list[float]:
    """The values that JSON can hold: a loss may be infinite for a while."""
    return [value for value in values if math.isfinite(value)]


def metric_at_end(script: ScriptRef, process: ScriptProcess, described: dict[str, Any]) -> Found | None:
    """``metric_of_run`` of a script that has ended; raises as ``ScriptProcess.check_end`` if it leaves in error."""
    try:
        return metric_of_run(script, process, described)  # before it continues, and prints more
    finally:
        process.check_end()


def has_named_metric(
    script: ScriptRef, process: ScriptProcess, described: dict[str, Any], enough: int = ENOUGH_VALUES
) -> bool:
    """Whether a script that still trains has printed or logged what ``--metric`` names.

    Raises:
        ConfigurationError: It has not, but ``enough`` times a number of held-out data whose name is spelled nearly so.
            Any other name may be that of a number that comes at the end.
    """
    try:
        return metric_so_far(script, process, described) is not None
    except ConfigurationError:
        held_out = [one for series in _series(process, described) for one in series if one.phase in HELD_OUT]
        often = [one.name for one in held_out if len(one.values) >= enough]
        if get_close_matches((script.metric or "").partition(":")[0], often, 1, SPELLING):
            raise
        return False


def lines_of(before: int, output: bytes, marks: list[list[Any]], seconds: float) -> list[Line]:
    """(seconds by which it was printed, text, whether in an evaluation) of each line of a script's output.

    Blank lines are left out, and those of more than MAX_LINE characters: no metric is searched in data.

    Args:
        before: Bytes that it printed before ``output``.
        output: What it printed, or the end of it.
        marks: [seconds, step, bytes printed until then, whether it begins] at begin and end of each evaluation.
        seconds: Of the whole run.
    """
    ends = [*marks, [seconds, 0, 1 << 62, not (marks and marks[-1][3])]]
    starts = [0, *(mark[2] for mark in ends)]
    lines: list[Line] = []
    for (begin, end), (at, _, _, begins) in zip(pairwise(starts), ends, strict=True):
        part = output[max(0, begin - before) : max(0, end - before)].decode(errors="replace")
        lines += [(at, line, not begins) for line in part.splitlines() if line.strip() and len(line) <= MAX_LINE]
    return lines


def run_to_end(trial: ScriptWorker, target: float | None = None, time_limit: float | None = None) -> dict[str, Any]:
    """Runs the script of a trial to its end. Returns a dictionary with the keys of that of ``tuning.trial.Trial.run``.

    Args:
        trial: The script, its methods, device, seed and deadline.
        target: Value of the metric that the run must have reached at ``time_limit``.
        time_limit: Seconds after which a run without the target is pruned; it has no metric if it has measured none by
            then. They begin with the command, as those of the evaluations do. None: no limit.

    Raises:
        RunError: A run that was not pruned has no metric, or the script failed under the methods.
        ConfigurationError: It is not clear which number is the metric.
    """
    script, deadline = trial.script, trial.deadline
    with ScriptProcess(script, trial.methods, trial.device, trial.seed, known_sites(script), deadline) as process:
        answer = process.wait_until_trained(None, deadline)
        described = process.ask("describe", None, deadline)
        per_step = described["samples_per_step"] or 1  # while the loaders exist
        limit = None if time_limit is None else time.monotonic() - described["seconds"] + time_limit
        pruned, chunks = False, process.train_in_chunks(deadline)
        while not answer.get("ended") and not pruned:
            to_end = limit is None
            answer = process.ask("train", None, deadline, count=MOST_STEPS) if to_end else next(chunks)
            if limit is not None and time.monotonic() > limit and not answer.get("ended"):
                limit, pruned = None, not _has_reached(script, process, target, deadline)
        described = process.ask("describe", None, deadline)
        has_metric = not pruned or seen_metric(script, process, described)["name"]  # a pruned run may end before it
        find_metric = metric_at_end if answer.get("ended") else metric_of_run
        found = find_metric(script, process, described) if has_metric else None
    if found is None and not pruned:
        raise RunError(f"the metric is missing: {script.name} printed and logged none on held-out data")
    marks = described["marks"]
    times = [mark[0] for mark in marks]
    rows = []
    for at, value in zip(found.seconds, found.values, strict=True) if found else ():
        index = bisect_right(times, at) - 1
        # without a mark, as of a model that stays in training mode, the steps are taken as equally long
        done = (at - described["imported"]) / (described["seconds"] - described["imported"])
        step = marks[index][1] if index >= 0 else round(answer["steps"] * min(1.0, max(0.0, done)))
        metric = value if math.isfinite(value) else None
        rows.append({"step": step, "samples": step * per_step, "seconds": at, "metric": metric})
    if found and rows and rows[-1]["metric"] is None and not pruned:
        raise RunError(f"the metric is not a finite number at the end: {script.name} gives {found.values[-1]}")
    best = max if found and found.direction == "max" else min
    return {
        "metric": rows[-1]["metric"] if rows else None,
        "best_metric": best((row["metric"] for row in rows if row["metric"] is not None), default=None),
        "evaluations": rows,
        "resolution": found.resolution if found else 0.0,
        "steps": answer["steps"],
        "samples": answer["steps"] * per_step,
        "seconds": described["seconds"],
        "split": {},
        "stopped": pruned,
        "effects": {},
        "pruned": pruned,
    }


def _has_reached(script: ScriptRef, process: ScriptProcess, target: float | None, deadline: float | None) -> bool:
    """Whether some value of the metric so far is as good as the target."""
    seen = seen_metric(script, process, process.ask("describe", None, deadline))
    sign = 1 if seen["direction"] == "max" else -1
    return target is not None and any(sign * value >= sign * target for value in seen["values"])


def _is_held_out(found: Found | Ambiguous | None) -> bool:
    """Whether ``found`` is a metric, or holds a candidate that was measured on held-out data."""
    if isinstance(found, Ambiguous):
        return any(one.phase in HELD_OUT for one in found.candidates)
    return found is not None
