"""Implements for scripts the services that workers offer for tasks: Arm, Probe, Description, Trial."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hasten.core.errors import ConfigurationError, HastenWarning, RunError, suggest
from hasten.core.progress import ProgressCallback, no_progress
from hasten.hosts.arm import HANGING_S, ScriptArm, ScriptProbe, ScriptWorker, WatchedArm, start_seconds
from hasten.hosts.exactness import check_exactness
from hasten.hosts.process import ScriptProcess
from hasten.hosts.site_map import remember
from hasten.hosts.whole_run import has_named_metric, metric_at_end, run_to_end
from hasten.utils.durations import duration_option
from hasten.utils.parsed_arguments import scales_with_length

if TYPE_CHECKING:
    from hasten.hosts.script_ref import ScriptRef

WATCH_SHARE = 0.08  # of the budget, that the first run is watched at most after its first step
WATCH_S = 60.0  # after which watching continues only if the run may end within that part of the budget
UNKNOWN_LENGTH_WATCH_S = 300.0  # the same, where the length of the run is unknown
WHOLE_RUN_SHARE = 0.16  # of the budget, for a first run that has to be a whole one: with --vary or --metric
FIRST_METRIC_CHECK_S = 1.0  # of training, after which --metric is looked for in the output; then after twice the time
BUDGET_RUNS = 16  # of the script, that a recommended budget is worth: in 8 % of it one ends, with a margin of a quarter
LONGER_RUN = 1.25  # by which a whole run may take longer than an earlier search has found
ENOUGH_BLOCKS = 3  # of the watched run, that an estimate rests on
MUCH_WRITTEN = 50e6  # bytes, before the first step
DEFAULT_BUDGET_S = 240.0  # that a watched run without a deadline is a part of


class ScriptDescription(ScriptWorker):
    """The ``Description`` of a script: runs it without any method for a part of the budget, and returns what it saw."""

    def facts(self, processes: int, run_seconds: float | None = None, needs_metric: bool = True) -> dict[str, Any]:
        """The keys of ``tuning.trial.Description.facts``, from a watched run of the script, and: ``no_whole_run``, why
        it did not end ("" if it did); ``default_budget``, seconds or None; ``varied``, argument -> value;
        ``length_arguments``, names of those that set the length of the training or of a part of its schedule.

        ``run_seconds``: of a whole run, which an earlier search has seen and this one waits for. Without
        ``needs_metric`` nothing is judged by one, and no question is asked about it.
        """
        self.script.begin("search")
        site_map = watch_script(self.script, self.deadline, run_seconds, needs_metric, self.on_progress)
        varied = _varied(self.script, site_map)
        why = "" if site_map["total_steps"] else _reason_run_is_too_long(site_map)
        if why and self.script.metric:
            warnings.warn(f"--metric is not used: {why}", HastenWarning, stacklevel=2)
        metric = site_map["metric"] if site_map["total_steps"] else None  # whole runs are needed to judge by it
        return {
            "fingerprint": [self.script.fingerprint(), self.script.metric, list(self.script.vary)],
            "has_validation": metric is not None,
            "higher_is_better": metric is None or metric["direction"] == "max",
            "metric": metric["name"] if metric else "",
            "no_whole_run": why,
            "default_budget": DEFAULT_BUDGET_S if why else None,  # the search needs no whole runs
            "target": None,
            "varied": varied,
            "length_arguments": sorted(filter(scales_with_length, _numbers_above_zero(site_map["arguments"]))),
        }


class ScriptTrial(ScriptWorker):
    """A trial of a script under a recipe."""

    def run(self, target: float | None = None, time_limit: float | None = None, horizon: float = 1.0) -> dict[str, Any]:
        """A whole run; see ``tuning.trial.Trial.run``. RunError if ``horizon`` < 1: the script owns its length."""
        if horizon < 1:
            raise RunError(f"{self.script.name} owns its training loop, which cannot be shortened")
        return run_to_end(self, target, time_limit)

    def check_exactness(self, base: dict[str, Any], exactness: str, seconds: float) -> dict[str, Any]:
        """Compares the script under its methods with ``base``, see ``exactness.check_exactness``."""
        return check_exactness(self, base, exactness)


def watch_script(
    script: ScriptRef,
    deadline: float | None = None,
    run_seconds: float | None = None,
    needs_metric: bool = True,
    on_progress: ProgressCallback = no_progress,
) -> dict[str, Any]:
    """Runs a script unchanged for a while, or to its end if that comes sooner. Returns and remembers its site map.

    With ``run_seconds``, those of a whole run, it is watched for as long where that is below half of the time.

    Raises:
        ConfigurationError: It failed, never trained, trains in several processes, or its metric is not clear.
    """
    started, blocks = time.monotonic(), list[dict[str, Any]]()
    left = DEFAULT_BUDGET_S if deadline is None else deadline - started
    on_progress(f"starting {script.name}", 0.0, left)
    with ScriptProcess(script, {}, deadline=deadline) as process:
        answer = process.wait_until_trained(HANGING_S if deadline is None else None, deadline)
        elapsed = time.monotonic() - started
        process.check_one_process()
        early = process.ask("describe", None, deadline)  # while the loaders exist
        start = start_seconds(elapsed, answer, early)
        _warn_of_preparation(script, early["written_bytes"])
        memory = process.ask("memory", None, deadline)
        host_memory = process.ask("memory", None, deadline, of_host=True)
        needs_whole_run = bool(script.vary or script.metric)
        limit, whole_run = (WHOLE_RUN_SHARE if needs_whole_run else WATCH_SHARE) * left, LONGER_RUN * (run_seconds or 0)
        limit = max(limit, whole_run) if whole_run < left / 2 else limit
        began, chunks = time.monotonic(), process.train_in_chunks(deadline)
        has_come, look = script.metric is None, began + FIRST_METRIC_CHECK_S
        while not answer.get("ended"):
            watched = time.monotonic() - began
            may_end = needs_whole_run or _may_end_within(limit, watched, answer["steps"], early["expected_steps"])
            if watched >= limit or not may_end:
                break
            spent = time.monotonic() - started
            on_progress(f"watching the training of {script.name}", spent / left, left - spent)
            answer = next(chunks)
            blocks.append(answer)
            if not has_come and time.monotonic() > look:
                has_come = has_named_metric(script, process, process.ask("describe", None, deadline))
                look += look - began  # all output is read each time
        process.check_one_process()
        if process.found_checkpoints():  # it has saved to a file that it had loaded
            process.close()
            return watch_script(script, deadline, run_seconds, needs_metric, on_progress)
        described = process.ask("describe", None, deadline)
        if not (has_come or answer.get("ended")):
            has_come = has_named_metric(script, process, described, enough=1)
        described |= {"watched_seconds": time.monotonic() - began, "watched_steps": answer["steps"]}
        described["metric_has_come"] = has_come
        described |= {"memory": memory, "host_memory": host_memory, "first_steps": _first_steps(start, blocks)}
        earlier = {*early["facts"]} - {"idle_cores"}  # the script may set its number of threads late
        described["facts"] = sorted({*described["facts"], *earlier})
        described["samples_per_step"] = described["samples_per_step"] or early["samples_per_step"]
        described["total_steps"] = answer["steps"] if answer.get("ended") else None
        metric = None
        if answer.get("ended") and needs_metric:
            metric = metric_at_end(script, process, described)
        elif answer.get("ended"):
            process.check_end()
        described["metric"] = metric and {"name": metric.name, "direction": metric.direction}
        return remember(script, described)


def _warn_of_preparation(script: ScriptRef, written: int) -> None:
    """Warns if a script wrote so much before its first step that it may have downloaded or prepared its data."""
    if written > MUCH_WRITTEN:
        text = f"{script.name} wrote {written / 1e6:.0f} MB before its first step, as for a download or prepared data"
        remedy = (
            "so does each trial, since nothing of it is kept: run the script by itself first, up to its first steps"
        )
        warnings.warn(f"{text}; {remedy}", HastenWarning, stacklevel=3)


def _may_end_within(limit: float, watched: float, steps: int, total: int | None) -> bool:
    """Whether a run may end within ``limit`` seconds, after ``watched`` seconds with ``steps`` of ``total`` steps.

    Its pace is known after WATCH_S seconds. Where ``total`` is None, not known, it may until UNKNOWN_LENGTH_WATCH_S.
    """
    if total is None or steps > LONGER_RUN * total:  # what was taken for the length is that of a part
        return watched < UNKNOWN_LENGTH_WATCH_S
    return watched < WATCH_S or watched * total / max(1, steps) < limit


def _first_steps(start: float, blocks: list[dict[str, Any]]) -> dict[str, float] | None:
    """``start`` and ``step``, in seconds, from the blocks after the first one; None if there were too few.

    The step is the lower quartile: other programs only make steps longer, but a block may hold short batches.
    """
    warm = sorted(block["seconds"] / block["count"] for block in blocks[1:] if block["count"])
    if len(warm) < ENOUGH_BLOCKS or not warm[0] > 0.0:
        return None
    step = warm[len(warm) // 4]
    return {"start": max(0.0, start - step), "step": step}


def _reason_run_is_too_long(site_map: dict[str, Any]) -> str:
    """Why no whole run can be judged: the first one did not end in its part of the budget; and the budget it needs."""
    watched, steps, total = site_map["watched_seconds"], site_map["watched_steps"], site_map["expected_steps"]
    is_known = total and total > steps
    seconds = watched * (total / steps if is_known else 2)
    length = f"{steps} of about {total} steps, which take about {seconds:.0f} s" if is_known else f"{steps} steps"
    unseen = "" if site_map["metric_has_come"] else "no metric of that name has come so far, and "
    budget = duration_option(BUDGET_RUNS * seconds)
    return (
        f"{unseen}the first run did not end in the {watched:.0f} s that it was watched ({length}); give "
        f"{'' if is_known else 'more than '}--budget {budget}, or a shorter training"
    )


def _varied(script: ScriptRef, site_map: dict[str, Any]) -> dict[str, float]:
    """The arguments that ``--vary`` names, with their values.

    Raises:
        ConfigurationError: The script has no such argument, its value is no number above 0, or there is no metric.
    """
    arguments = site_map["arguments"]
    for name in script.vary:
        if name not in arguments:
            hint = suggest(name, arguments) if arguments else ""
            raise ConfigurationError(
                f"--vary: {script.name} parses no argument {name!r} with argparse, and its command gives it no number"
                f"{hint}; give its present value in the command, such as --{name}=0.1 or {name}=0.1"
            )
        if name not in _numbers_above_zero(arguments):
            raise ConfigurationError(f"--vary: {name} is {arguments[name]!r}; only a number above 0 can be varied")
    if script.vary and not site_map["total_steps"]:
        raise ConfigurationError(f"--vary needs whole runs of the script, and {_reason_run_is_too_long(site_map)}")
    if script.vary and site_map["metric"] is None:
        raise ConfigurationError(
            "--vary needs a metric to judge by, and none is measured on held-out data; see --metric"
        )
    return {name: arguments[name] for name in script.vary}


def _numbers_above_zero(arguments: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in arguments.items() if isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if not isinstance(value, bool) and value > 0}


SERVICES: dict[str, Any] = {
    "Arm": ScriptArm,
    "FirstSteps": WatchedArm,
    "Probe": ScriptProbe,
    "Description": ScriptDescription,
    "Trial": ScriptTrial,
}
