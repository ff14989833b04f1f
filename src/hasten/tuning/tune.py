"""``tune``: from a task to a recipe with evidence, or to the verdict "no improvement".

    duration -> diagnosis -> baseline -> search -> contributions -> confirmation -> result

The margin and the target are fixed before the first candidate is tried. Everything measured is stored at once; a search
that was killed continues where it stopped.
"""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from hasten.benchmarking.arm import estimate
from hasten.benchmarking.fork_server import mark_warnings_shown, reset_shown_warnings
from hasten.benchmarking.ratio import SLOWER, Ratio
from hasten.core.errors import ConfigurationError, HastenWarning, ProgressWarning, RunError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.data_adapters import check_process_count
from hasten.engine.devices import pick_device
from hasten.engine.effects import NO_EFFECT
from hasten.engine.environment import cores, source_hash
from hasten.engine.metrics import higher_is_better, name_of
from hasten.engine.registry import drop_distributed
from hasten.engine.resources import warn_oversubscribed
from hasten.engine.tasks import TaskRef
from hasten.profiling.diagnose import diagnose
from hasten.reporting.result_schema import TuneResult
from hasten.tuning.ablation import contributions, leave_one_out
from hasten.tuning.candidates import MethodSelection, candidates_for, strong_baselines
from hasten.tuning.confirm import SEED_STEP, compare_with_strong_baseline, confirm
from hasten.tuning.gate import MIN_SEEDS, resolve_margin
from hasten.tuning.result import SearchState, machine_and_versions, result_of, write
from hasten.tuning.search import Baseline, run_speedup, search_systems, search_training
from hasten.tuning.study import PROFILE_SECONDS, Budget, OutOfBudgetError, Study
from hasten.tuning.trial_store import TrialStore
from hasten.utils.durations import parse_budget

BASELINE_SEEDS = 3
BUDGET_RUNS = 18  # runs of the task as it is that the default budget is worth
MIN_BUDGET_RUNS = 10  # a smaller budget measures little more than the baselines
MIN_BUDGET_S = 160.0  # below this the worker processes themselves are the cost
SYSTEMS_SHARE, TRAINING_SHARE = 0.4, 0.75  # of the budget left when each begins
MIN_COMPARISON_S, SCREENING_S = 5.0, 8.0  # budget of a comparison of the search
ONE_PROCESS_SHARE = 0.2  # of the budget, for the comparison with one process
# the timeout is the largest of: seconds, share of the budget, runs of the task
MIN_TIMEOUT_S, TIMEOUT_FRACTION, TIMEOUT_RUNS = 30.0, 1 / 8, 2.0
RESERVED_RUNS = 5.0  # runs of the task reserved for the confirmation: three seeds of both arms, and further ones


def tune(
    task: Any,
    *,
    budget: float | str | None = None,
    margin: float | None = None,
    methods: Iterable[str] | None = None,
    extra: Iterable[str] = (),
    out: str | Path | None = None,
    runs: int = 10,
    processes: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    seed: int = 0,
    watch: ProgressCallback = no_progress,
) -> TuneResult:
    """Finds a faster recipe for a task and proves that it is as good, or returns "no improvement" with the evidence.

    Args:
        task: a workload's name, ``file.py:function`` or a Task with validation data.
        budget: seconds of the search, or a text such as "10m". The default is a small multiple of one run of the task;
            a ProgressWarning states it before the search starts.
        margin: how much worse the metric may be, in its own unit; by default 0.5 % of the baseline's.
        methods: the only methods to try, as ``--with`` text; None: all.
        extra: methods to try besides, as ``./file.py:Class[:key=value]``.
        out: folder of the search, ``runs/tune-TASK`` by default; a search that was stopped there continues.
        runs: trainings that the user expects to do with the result; decides whether the report says that the search
            pays.
        processes: number of ranks that train together. The baseline is then the task's own data-parallel training;
            whether one process would be faster is measured, too.
        timeout: seconds without progress after which a job of several processes counts as hanging; by default a part of
            the budget.
        device: "cpu" or "cuda"; None picks one.
        seed: seed of the search.
        watch: called with the progress.

    Returns:
        The content of ``result.json``: verdict, recipe, speedup, quality, trials, and what they cost.

    Raises:
        ConfigurationError: a wrong request.
        RunError: the task's own training does not run.
    """
    reset_shown_warnings()
    budget = None if budget is None else parse_budget(budget)
    task, device = TaskRef.of(task), pick_device(device)
    with mark_warnings_shown():  # here and not in a trial: in a search that continues, all trials may be in the store
        loaded = task.load()
        check_process_count(loaded, processes)
        warn_oversubscribed(processes)
    if loaded.validation_data is None:
        raise ConfigurationError(
            "tune needs a task with validation_data and a metric, to check that the quality does not suffer"
        )
    higher, selection = higher_is_better(loaded), MethodSelection.of(methods, extra)  # checked before anything runs
    folder = Path(out) if out is not None else Path("runs", "tune-" + re.sub(r"[^\w-]", "-", str(task)))
    settings = {
        "task": task.fingerprint(),
        "target": loaded.target,
        "device": device,
        "seed": seed,
        "processes": processes,
        "code": source_hash(),
    }
    study = Study(
        task,
        device,
        TrialStore(folder, settings | machine_and_versions(device)),
        Budget(float("inf")),
        watch,
        seed=seed,
        processes=processes,
        higher_is_better=higher,
        target=loaded.target,
        source_hashes=selection.source_hashes(),
    )
    run_seconds = _set_budget(study, budget, timeout)
    state = SearchState()
    try:
        _measure_baseline(study, state, selection, margin)
        _search(study, state)
        _confirm(study, state)
    except OutOfBudgetError:
        enough = max(BUDGET_RUNS * run_seconds, 2 * study.budget.total)
        raise RunError(
            f"the budget of {_format_duration(study.budget.total)} ended before the task's own training was measured; "
            f"give --budget {enough:.0f}s or more"
        ) from None
    result = result_of(study, state, metric=name_of(loaded), offered=selection.offered)
    result |= {"baseline_seconds": run_seconds, "expected_runs": runs, "out": str(folder)}
    write(folder, result)
    return result


def _set_budget(study: Study, budget: float | None, timeout: float | None) -> float:
    """Sets the budget and the timeout of the search, and announces the budget. Returns the seconds of one run."""
    seconds = study.measure_once(
        "run_seconds",
        f"timing a few steps of {study.task}",
        lambda _: estimate(study.task, study.device, study.seed, study.processes, timeout or DEFAULT_TIMEOUT_S),
    )["seconds"]
    total = study.budget.total = budget if budget is not None else max(MIN_BUDGET_S, BUDGET_RUNS * seconds)
    study.timeout = timeout or max(MIN_TIMEOUT_S, total * TIMEOUT_FRACTION, TIMEOUT_RUNS * seconds)
    run_time, search_time = _format_duration(seconds), _format_duration(total)
    message = f"one run of the task takes about {run_time}; the search may take {search_time}"
    warnings.warn(message, ProgressWarning, stacklevel=3)
    if total / seconds < MIN_BUDGET_RUNS:
        message = (
            f"the budget is worth {total / seconds:.1f} runs of the task, and below {MIN_BUDGET_RUNS} little more than "
            f"the baselines gets measured; --budget {BUDGET_RUNS * seconds:.0f}s would do"
        )
        warnings.warn(message, HastenWarning, stacklevel=3)
    return seconds


def _measure_baseline(study: Study, state: SearchState, selection: MethodSelection, margin: float | None) -> None:
    """Runs the diagnosis and the baseline: which methods are worth trying, and what they have to beat."""
    total = study.budget.total
    seconds = min(40.0, total / 8)

    def measure(watch: ProgressCallback) -> Any:
        where = {"device": study.device, "processes": study.processes, "timeout": study.timeout, "seed": study.seed}
        return diagnose(study.task, budget=seconds, watch=watch, **where)

    state.diagnosis = study.measure_once("diagnosis", f"diagnosing {study.task}", measure)
    state.candidates = candidates_for(state.diagnosis, selection)
    for name, why in state.candidates.not_tried:
        study.note(name, "diagnosis", "not tried", why)
    baseline = state.baseline = _run_baseline(study, margin)
    state.step_profiles["baseline"] = study.step_profile(Recipe())
    state.comparison_seconds = min(30.0, max(MIN_COMPARISON_S, total / 18))
    run_seconds = fmean(run["trial_seconds"] for run in baseline.runs)
    study.budget.reserved = min(total / 2, RESERVED_RUNS * run_seconds + 2 * state.comparison_seconds)
    if study.processes > 1:
        with study.budget.part(ONE_PROCESS_SHARE):
            state.one_process = _compare_with_one_process(study, state, Recipe(), baseline.samples_to_target())


def _run_baseline(study: Study, margin: float | None) -> Baseline:
    """Trains the original on the search's seeds; sets target and margin. RunError if it fails or misses its target."""
    seeds = [study.seed + SEED_STEP * index for index in range(BASELINE_SEEDS)]
    runs = [study.run(Recipe(), seed) for seed in seeds]
    for run in runs:
        if "failed" in run:
            raise RunError(f"the task's own training does not run: {run['failed']}")
    metrics = [run["metric"] for run in runs]
    worst, best = (min, max) if study.higher_is_better else (max, min)
    target = study.target
    if target is None:  # what every seed reaches
        target = study.target = worst(run["best_metric"] for run in runs)
        runs = [study.run(Recipe(), seed) for seed in seeds]
    if all(run["seconds_to_target"] is None for run in runs):
        raise RunError(
            f"the task's own training never held its target {target:g} (it ended at {best(metrics):.4g}); "
            "lower the target or train longer"
        )
    baseline = Baseline(seeds, runs, target, resolve_margin(fmean(metrics), margin), study.higher_is_better)
    ends = ", ".join(f"{metric:.4g}" for metric in metrics)
    why = f"{len(runs)} seeds end at {ends}; margin {baseline.margin:.3g}"
    study.note("baseline", "baseline", "measured", why, seconds=sum(run["trial_seconds"] for run in runs))
    return baseline


def _search(study: Study, state: SearchState) -> None:
    """Finds the best recipe and what each of its methods contributes, until the search's part of the budget ends."""
    baseline, budget, incumbents, candidates = state.baseline, study.budget, state.incumbents, state.candidates
    assert baseline is not None
    screening = min(SCREENING_S, max(MIN_COMPARISON_S, state.comparison_seconds / 2))
    with budget.part(1.0):
        state.strong_baseline = _find_strong_baseline(study, screening)
        if candidates.communication:
            with budget.part(SYSTEMS_SHARE):
                search_training(study, incumbents, candidates.communication, baseline)
        with budget.part(SYSTEMS_SHARE):
            search_systems(study, incumbents, candidates.systems, baseline.samples_to_target(), screening)
        _reserve_for_incumbent(study, state)
        with budget.part(TRAINING_SHARE):
            search_training(study, incumbents, candidates.training, baseline)
        state.contributions = leave_one_out(study, incumbents)
    state.ablated = incumbents.best
    if budget.exhausted:
        tried = [trial["what"] for trial in study.trials]
        by_time = [*candidates.communication, *candidates.training]
        for stage, items in (("systems", candidates.systems), ("training", by_time)):
            for item in items:
                if not any(item.name in what for what in tried):
                    study.note(item.name, stage, "not tried", "the search's part of the budget ended before it")
        why = "the search's part of the budget is spent; what was found by then is confirmed"
        study.note("search", "search", "stopped", why)


def _reserve_for_incumbent(study: Study, state: SearchState) -> None:
    """Reserves what it takes to confirm the best recipe so far, half of what is left at most."""
    recipe = state.incumbents.best
    if recipe and state.baseline:
        seconds = study.run(recipe, state.baseline.seeds[0])["trial_seconds"]
        needed = MIN_SEEDS * seconds + state.comparison_seconds
        study.budget.reserved += min(max(0.0, study.budget.left()) / 2, needed)


def _confirm(study: Study, state: SearchState) -> None:
    """Confirms the best recipes; measures a winner against one process and the strong baseline, and its parts."""
    budget, seconds = study.budget, state.comparison_seconds
    assert state.baseline is not None
    comparisons = bool(state.strong_baseline) + (study.processes > 1)
    budget.reserved = 0.0
    budget.reserved = min(max(0.0, budget.left()) / 2, PROFILE_SECONDS + comparisons * seconds)
    state.confirmation = confirm(study, state.incumbents, state.baseline, seconds)
    budget.reserved = 0.0
    winner = state.winner
    if winner is None:
        return
    if study.processes > 1 and drop_distributed(winner.recipe):
        with budget.part(1.0):
            samples = fmean(row[1] for row in winner.samples)
            state.winner_in_one_process = _compare_with_one_process(study, state, winner.recipe, samples)
    with budget.part(1.0):
        compare_with_strong_baseline(study, winner, state.strong_baseline, seconds)
        state.step_profiles["tuned"] = study.step_profile(winner.recipe)
    if winner.recipe != state.ablated or len(state.contributions) < len(winner.recipe.methods):
        state.ablated, state.contributions = winner.recipe, contributions(study, winner.recipe)


def _compare_with_one_process(study: Study, state: SearchState, recipe: Recipe, samples: float) -> Ratio | None:
    """Speed-up of one process with all cores over the job, for a run of ``samples``; None if it cannot be measured."""
    single = drop_distributed(recipe)
    outcome = study.compare_speed(recipe, single, seconds=state.comparison_seconds, single_process=True)
    what, spent = f"{single}, one process" if recipe else "one process", outcome["trial_seconds"]
    if "failed" in outcome:
        study.note(what, "baseline", "failed", outcome["failed"], seconds=spent)
        return None
    ratio = outcome["ratio"]
    study.note(what, "baseline", outcome["verdict"], outcome["why"], ratio=ratio, seconds=spent)
    scale = run_speedup(outcome, samples) / ratio["median"]
    return Ratio(*(scale * ratio[key] for key in ("median", "low", "high")))


def _find_strong_baseline(study: Study, seconds: float) -> Recipe:
    """The fastest recipe of ``strong_baselines``, without methods that have no effect here."""
    best, no_effect = Recipe(), set()
    for form in strong_baselines(study.device, max(1, cores() // study.processes)):
        while True:
            recipe = form.drop(*no_effect)
            if not recipe or recipe == best:
                break
            outcome = study.compare_speed(best, recipe, seconds=seconds)
            failed = outcome.get("failed", "")
            without_effect = {name for name in recipe.methods if f"{name} {NO_EFFECT}" in failed}
            if without_effect:
                no_effect |= without_effect
                continue
            verdict, ratio = outcome.get("verdict", "failed"), outcome.get("ratio")
            why, spent = f"as the strong baseline, against {best}", outcome["trial_seconds"]
            study.note(str(recipe), "baseline", verdict, why, ratio=ratio, seconds=spent)
            if ratio and verdict != SLOWER and ratio["median"] > 1:
                best = recipe
            break
    return best


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
