"""Diagnoses a task: where the time of its real steps goes, what causes it, and what each part could give at most."""

from __future__ import annotations

import time

from hasten.benchmarking.ratio import Ratio
from hasten.core.card import PHASES
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.devices import pick_device
from hasten.engine.registry import make_methods, method_class, method_names
from hasten.engine.tasks import TaskRef
from hasten.profiling.advise import advise, amdahl
from hasten.profiling.ceilings import measure_allocator_ceiling
from hasten.profiling.step_profile import StepProfile, profile_steps
from hasten.profiling.verdict import gains, verdict_of
from hasten.reporting.result_schema import DiagnoseResult
from hasten.utils.durations import parse_budget

INSIDE = 0.6  # of the budget, for what one process can tell; another allocator gets what is left
INPUT = 0.1  # of the budget, for the throughput of the input pipeline


def diagnose(
    task,
    *,
    recipe=None,
    budget: float | str = 60.0,
    processes: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    seed: int = 0,
    watch: ProgressCallback = no_progress,
) -> DiagnoseResult:
    """Where a task's time goes and what could be gained.

    Args:
        task: a workload's name, ``file.py:function`` or a Task.
        recipe: what it is trained with: a Recipe, a ``.toml`` file or ``--with`` text; None for the task as it is.
        budget: seconds to spend, or a text such as "10m"; exceeded by one experiment at most.
        processes: that train together. Of several no phase is taken away, so the timeline alone bounds what could be gained.
        patience: seconds of silence after which several processes count as hanging.

    Returns:
        Plain data: ``verdict`` (a sentence), ``phases`` (share of the wall clock; they sum to 1), ``headroom``
        (ceilings by replacement: time with / time without), ``advice`` and ``not_advised`` (methods), ``causes``,
        ``input`` (samples/s of the input pipeline's stages and of the training step, as ``measure_input`` gives them),
        ``flops``, ``facts``, and the pace of the run in seconds and samples.

    Raises:
        Refusal: a wrong request. Failure: the task could not run.
    """
    task, recipe, device, budget = TaskRef.of(task), Recipe.coerce(recipe), pick_device(device), parse_budget(budget)
    check_conflicts(sort_methods(make_methods(recipe)))
    cards = {name: method_class(name).card for name in method_names() if name not in recipe.methods}
    began = time.monotonic()
    where = {"device": device, "seed": seed, "processes": processes}
    anatomy = profile_steps(
        task,
        recipe,
        **where,
        budget=budget * INSIDE,
        input_budget=budget * INPUT,
        ceilings=processes == 1,
        timeout=timeout,
        watch=_part(watch, 0.0, INSIDE + INPUT),
    )
    left = budget - (time.monotonic() - began)
    outside = measure_allocator_ceiling(
        task,
        recipe,
        anatomy.system_share,
        **where,
        budget=left,
        plan=anatomy.plan,
        watch=_part(watch, INSIDE + INPUT, 1.0),
    )
    ratios = anatomy.headroom.ceilings | outside.ceilings
    headroom = _headroom(anatomy, ratios)
    possible = gains(anatomy, headroom)
    advice, against = advise(anatomy.phases, {"system_time": possible["system_time"]} | headroom, anatomy.facts, cards)
    return {
        "kind": "diagnose",
        "task": str(task),
        "recipe": str(recipe),
        "device": device,
        "verdict": verdict_of(anatomy, possible),
        "phases": anatomy.phases,
        "headroom": headroom,
        "intervals": {name: ratio.to_json() for name, ratio in ratios.items()},
        "not_measured": anatomy.headroom.not_measured | outside.not_measured,
        "advice": advice,
        "not_advised": against,
        "causes": _causes(anatomy),
        "input": anatomy.input,
        "flops": anatomy.flops,
        "facts": sorted(anatomy.facts),
        "batch_size": anatomy.plan["batch_size"],
        "seconds_per_step": anatomy.step,
        "seconds_a_run": anatomy.seconds_a_run(),
        "samples_per_second": 1.0 / anatomy.sample,
        "start_seconds": anatomy.plan["start"],
        "evaluation_seconds": anatomy.evaluation,
        "system_noise": anatomy.noise,
        "seconds": time.monotonic() - began,
    }


def _headroom(anatomy: StepProfile, ratios: dict[str, Ratio]) -> dict[str, float]:
    """Ceilings as plain numbers. To take a phase away never costs time: below 1 it was noise. Evaluations are simply subtracted."""
    measured = {name: max(1.0, ratio.median) if name in PHASES else ratio.median for name, ratio in ratios.items()}
    return measured | ({"evaluation": amdahl(anatomy.phases["evaluation"])} if anatomy.evaluation else {})


def _causes(anatomy: StepProfile) -> dict:
    return {
        "page_faults_per_step": anatomy.faults_per_step,
        "system_time_share": anatomy.system_share,
        "host_reads_per_step": anatomy.host_reads_per_step,
        "timing_cost": anatomy.timing_cost,
    }


def _part(watch: ProgressCallback, low: float, high: float) -> ProgressCallback:
    """``watch`` for a part of the work, from ``low`` to ``high`` of the whole."""
    return lambda what, done, left=None: watch(what, low + (high - low) * done, left)
