"""``diagnose``: where the time of a task's real steps goes, what causes it, and what each phase could give at most."""

import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hasten.benchmarking.arm import warm_up_steps
from hasten.core.card import PHASES, REMEDIES
from hasten.core.errors import ConfigurationError, ProgressWarning, RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.devices import pick_device
from hasten.engine.memory import largest_batch
from hasten.engine.registry import method_class, method_names
from hasten.engine.tasks import TaskLike, TaskRef
from hasten.profiling.advise import advise, amdahl
from hasten.profiling.ceilings import CHEAP_S, MIN_SHARE
from hasten.profiling.drift import STRETCHES, Drift, describe, measure_drift
from hasten.profiling.ops import ONE_PROCESS, check_lower_precision, measure_operations
from hasten.profiling.step_profile import StepProfile, profile_steps
from hasten.profiling.verdict import describe_diagnosis, memory_sentence, possible_gains
from hasten.reporting.result_schema import DetectedMetric, DiagnoseResult, DriftRow, Interval, NotAdvised
from hasten.utils.durations import format_duration, parse_budget

PROFILE_SHARE, INPUT_SHARE, DRIFT_SHARE = 0.6, 0.1, 0.2  # of the budget; the rest is for building the run

ONE_PROCESS_DRIFT = "measured in one process only; leave --processes out"


def diagnose(
    task: TaskLike,
    *,
    recipe: Recipe | str | Path | Iterable[str] | None = None,
    budget: float | str = 60.0,
    processes: int = 1,
    timeout: float | None = None,
    deadline: float | None = None,
    device: str | None = None,
    seed: int = 0,
    ops: bool = False,
    on_progress: ProgressCallback = no_progress,
) -> DiagnoseResult:
    """Measures where a task's time goes and what could be gained.

    Args:
        task: A workload's name, ``file.py:function``, a Task, a function that returns one, or ``hasten.script(...)``.
        recipe: The methods to train with: a Recipe, a ``.toml`` file or ``--with`` text; None for the task as it is.
        budget: Seconds, or a text such as "10m"; exceeded by one experiment at most.
        processes: Number of ranks. With several, no phase is switched off, so only the phase timer bounds the gains.
        timeout: Seconds without progress after which several processes count as hanging; None for the default.
        deadline: Time of ``time.monotonic`` at which the diagnosis ends; what is not measured then is missing.
        device: "cpu" or "cuda"; None picks one.
        seed: Seed of the run that is measured.
        ops: Also show which operations ran in which precision, for a recipe with lower precision in one process. Takes
            a few steps beyond the budget.
        on_progress: Called with the progress.

    Returns:
        Plain data. ``verdict``: a sentence. ``phases``: share of the wall clock, summing to 1. ``ceilings``: time with
        / time without, with a 95 % interval. ``advice`` and ``not_advised``: methods. ``causes``: page faults and host
        reads a step, shares of system and issue time, the cost of timing. ``input``: samples/s of the input pipeline
        and of the training step, see ``InputThroughput``. ``flops``, ``facts``, and the speed of the run in seconds and
        samples. ``operations``: see ``Operations``; None without ``ops``. ``drift``: see ``measure_drift``.
        ``peak_memory_bytes``: of each rank, see ``engine/memory.py``.

    Raises:
        ConfigurationError: A wrong request.
        RunError: The task could not run.
    """
    task, recipe, device, budget = TaskRef.of(task), Recipe.coerce(recipe), pick_device(device), parse_budget(budget)
    task.begin("command")  # unless it is a part of a search
    task.check_recipe(recipe)
    if task.command and deadline is None:
        what = f"{task} starts first; the {format_duration(budget)} of the measurement begin after its first steps"
        warnings.warn(what, ProgressWarning, stacklevel=2)
    if ops:
        check_lower_precision(recipe)
        if processes > 1:
            raise ConfigurationError(ONE_PROCESS)
    where: dict[str, Any] = {"device": device, "seed": seed, "deadline": deadline}
    operations = measure_operations(task, recipe, **where, on_progress=on_progress) if ops else None
    cards = {name: method_class(name).card for name in method_names() if name not in recipe.methods}
    began, before_drift = time.monotonic(), PROFILE_SHARE + INPUT_SHARE
    profile = profile_steps(
        task,
        recipe,
        **where,
        processes=processes,
        timeout=timeout,
        budget=budget * PROFILE_SHARE,
        input_budget=budget * INPUT_SHARE,
        ceilings=processes == 1,
        on_progress=_part(on_progress, 0.0, before_drift, budget * DRIFT_SHARE if processes == 1 else 0.0),
    )
    drift, no_drift = Drift(), {"drift": ONE_PROCESS_DRIFT}
    if processes == 1:
        where |= {
            "seconds": budget * DRIFT_SHARE,
            "on_progress": _part(on_progress, before_drift, before_drift + DRIFT_SHARE),
        }
        drift, no_drift = _measure_drift(task, recipe, profile.plan, **where)
    peaks, ceilings = profile.plan["peak_memory"], _ceilings(profile)
    measured = {*profile.ceilings.ratios, "evaluation"}
    medians = {name: interval["median"] or 1.0 for name, interval in ceilings.items() if name in measured}
    gains = possible_gains(profile, medians)
    bounds = {"system_time": gains["system_time"]} | medians | _denormals_ceiling(drift, profile.plan["steps"])
    problems = frozenset({"denormals"} if drift.has_denormals else ()) | profile.facts & REMEDIES.keys()
    refused = {name: why for name in cards if (why := task.refusal(Recipe({name: {}})))}
    able = {name: card for name, card in cards.items() if name not in refused}
    advice, not_advised = advise(profile.phases, bounds, profile.facts, able, problems)
    not_advised += [NotAdvised(method=name, why=why) for name, why in refused.items()]
    return {
        "kind": "diagnose",
        "task": str(task),
        "recipe": str(recipe),
        "device": task.device(device),
        "verdict": describe_diagnosis(profile, gains),
        "phases": profile.phases,
        "ceilings": ceilings,
        "not_measured": profile.ceilings.not_measured | no_drift,
        "advice": advice,
        "not_advised": not_advised,
        "causes": {
            "page_faults_per_step": profile.faults_per_step,
            "system_time_share": profile.system_share,
            "host_reads_per_step": profile.host_reads_per_step,
            "issue_share": profile.issue_share if "cuda" in profile.facts else None,
            "timing_cost": profile.timing_cost,
        },
        "input": profile.input,
        "flops": profile.flops,
        "operations": operations,
        "drift": {
            "rows": [DriftRow(**asdict(row)) for row in drift.rows],
            "slow_from": drift.slow_from,
            "text": describe(drift) or "",
        },
        "facts": sorted(profile.facts),
        "batch_size": profile.plan["batch_size"],
        "seconds_per_step": profile.step,
        "seconds_per_run": profile.seconds_per_run(drift.seconds_of_steps(profile.plan["steps"])),
        "samples_per_second": 1.0 / profile.sample,
        "start_seconds": profile.plan["start"],
        "peak_memory_bytes": peaks,
        "memory": memory_sentence(profile.plan["batch_size"], largest_batch(profile.plan["batch_size"], peaks)),
        "evaluation_seconds": profile.evaluation,
        "system_noise": profile.system_noise,
        "sites": task.sites() or {},
        "metric": DetectedMetric(
            **{"name": "", "direction": "", "values": [], "candidates": [], "why": ""} | profile.metric
        ),
        "synchronizations": profile.code["synchronizations"],
        "functions": profile.code["functions"],
        "seconds": time.monotonic() - began,
    }


def _measure_drift(
    task: TaskRef, recipe: Recipe, plan: dict[str, Any], seconds: float, **where: Any
) -> tuple[Drift, dict[str, str]]:
    """(drift, {"drift": reason} if it was not measured): a training that fails later on can still be diagnosed."""
    least = (warm_up_steps(plan["step"]) + STRETCHES) * plan["step"]
    if least > max(seconds, CHEAP_S):
        return Drift(), {"drift": f"it would take {least:.0f} s to train on; give a larger budget"}
    try:
        drift = measure_drift(task, recipe, seconds=seconds, **where)
    except RunError as error:
        drift = Drift(not_measured=str(error))
    return drift, {"drift": drift.not_measured} if drift.not_measured else {}


def _denormals_ceiling(drift: Drift, steps: int | None) -> dict[str, float]:
    """``denormals``: ceiling of a training without denormal numbers; {} where it is unknown what they cost.

    A training of which only the first steps were seen may contain them later: moving averages need hundreds of steps.
    """
    if drift.has_denormals:
        return {"denormals": drift.denormals_gain} if drift.denormals_gain else {}
    return {"denormals": 1.0} if drift.reached(steps) else {}


def _ceilings(profile: StepProfile) -> dict[str, Interval]:
    """The measured ceilings; those of other phases, and of the system time, follow from their shares by Amdahl's law.

    A phase that is switched off never costs time, so a median below 1 is measurement noise and becomes 1.
    """
    ceilings = {name: ratio.to_json() for name, ratio in profile.ceilings.ratios.items()}
    for name in PHASES.keys() & ceilings.keys():
        ceilings[name]["median"] = max(1.0, profile.ceilings.ratios[name].median)
    bounds = {name: amdahl(share) for name, share in profile.phases.items() if share >= MIN_SHARE}
    if profile.evaluation:
        bounds["evaluation"] = amdahl(profile.phases["evaluation"])
    if profile.wasted_share >= MIN_SHARE:
        bounds["system_time"] = amdahl(profile.wasted_share)
    return {name: Interval(median=bound, low=None, high=None) for name, bound in bounds.items()} | ceilings


def _part(on_progress: ProgressCallback, low: float, high: float, later: float = 0.0) -> ProgressCallback:
    """A progress callback whose 0 to 1 is reported to ``on_progress`` as ``low`` to ``high``, ``later`` seconds before
    the end.
    """
    return lambda what, done, left=None: on_progress(what, low + (high - low) * done, left and left + later)
