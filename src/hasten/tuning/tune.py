"""``tune``: from a task to a recipe with evidence, or to the verdict "no improvement", within any budget.

    estimate -> diagnosis -> exact methods -> lower precision -> methods that change the training -> result

The first three stages need steps only, so they answer for trainings of any length. Each stage ends with a confirmation
by fresh processes; its findings are written at once, and the last result.json is the best answer so far. Margin and
target are fixed before the first method that changes the training is tried.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from hasten.benchmarking.arm import estimate
from hasten.benchmarking.fork_server import DeadlineError, reset_shown_warnings
from hasten.benchmarking.ratio import SLOWER, Ratio
from hasten.benchmarking.worker_group import start_workers
from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError, ProgressWarning, RunError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.devices import pick_device
from hasten.engine.effects import NO_EFFECT
from hasten.engine.environment import cores, source_hash
from hasten.engine.registry import drop_distributed
from hasten.engine.resources import warn_oversubscribed
from hasten.engine.run_dir import atomic_write
from hasten.engine.tasks import TaskRef
from hasten.profiling.diagnose import diagnose
from hasten.reporting.result_schema import TuneResult
from hasten.tuning import finding
from hasten.tuning.ablation import contributions, leave_one_out
from hasten.tuning.budget import Budget, OutOfBudgetError
from hasten.tuning.candidates import Candidates, MethodSelection, candidates_for, strong_baselines
from hasten.tuning.confirm import Confirmation, compare_with_strong_baseline, confirm, fresh_seeds
from hasten.tuning.experience import compositions, is_exact
from hasten.tuning.finding import DEFAULT_LEVEL, ESTIMATED, EXACT, LEVELS, PRECISION, PROVEN, Finding
from hasten.tuning.gate import LOOKS, MIN_SEEDS, resolve_margin
from hasten.tuning.result import SearchState, machine_and_versions, result_of, write
from hasten.tuning.study import PROFILE_SECONDS, Study
from hasten.tuning.systems import (
    ROUNDS,
    confirm_speed,
    run_speedup,
    search_systems,
    try_compositions,
    whole_run_ratio,
)
from hasten.tuning.training import Baseline, first_outcome, search_training, try_training_compositions
from hasten.tuning.trial_store import TrialStore
from hasten.utils.durations import parse_budget

BUDGET_RUNS, MIN_BUDGET_S, MAX_BUDGET_S = 8, 60.0, 2400.0  # runs of the task that the default budget is worth; limits
SEED_STEP = 1000
BASELINE_SEEDS = 3
FEW_BASELINE_SEEDS, FEW_RUNS = 2, 12  # seeds where the budget is worth fewer runs of the task than this
SYSTEMS_SHARE, TRAINING_SHARE = 0.35, 0.75  # of the budget left when each begins, if whole trainings fit
SYSTEMS_SHARE_OF_LONG = 0.75  # if they do not
EXACT_SHARE = 0.8  # of the budget of the systems stage, for the search among exact methods
COMMUNICATION_SHARE = 0.4
DIAGNOSIS_SHARE, MAX_DIAGNOSIS_S = 1 / 10, 40.0
SCREENING_S, COMPARISON_S = (2.0, 8.0), (5.0, 30.0)  # least and most seconds of a comparison: of the search, reported
ONE_PROCESS_SHARE = 0.2  # of the budget, for the comparison with one process
# the timeout is the largest of: seconds, share of the budget, runs of the task
MIN_TIMEOUT_S, TIMEOUT_FRACTION, TIMEOUT_RUNS = 30.0, 1 / 8, 2.0
WHOLE_RUNS = 7.0  # runs of the task that its training stage takes at least; with fewer left, shorter trainings are run
SHORT_RUNS = 14.0  # the length of a shorter training is the budget left, divided by this
MIN_SHORT_RUN_S = 2.0  # a shorter training says nothing
MAX_COMPOSITIONS = 2


def tune(
    task: Any,
    *,
    budget: float | str | None = None,
    margin: float | None = None,
    evidence: str | None = None,
    methods: Iterable[str] | None = None,
    extra: Iterable[str] = (),
    out: str | Path | None = None,
    runs: int = 10,
    processes: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    seed: int = 0,
    price_per_hour: float | None = None,
    watch: ProgressCallback = no_progress,
) -> TuneResult:
    """Finds a faster recipe for a task, with evidence, or returns "no improvement".

    Args:
        task: a workload's name, ``file.py:function`` or a Task.
        budget: seconds of the search, or a text such as "10m"; "+10m" continues a search for so long. The default is a
            small multiple of one run of the task; a ProgressWarning states it before the search starts.
        margin: how much worse the metric may be, in its own unit; by default the larger of 0.5 % of the baseline's
            metric and its standard deviation between seeds.
        evidence: weakest evidence of the recipe to recommend: "exact", "precision", "proven" (the default) or
            "estimated". The first two need no validation data, and no method that changes the training is tried.
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
        price_per_hour: price of an hour of this machine; the result then states the price of a training.
        watch: called with the progress.

    Returns:
        The content of ``result.json``: verdict, recipe, evidence, speedup, quality, frontier, trials, and their cost.

    Raises:
        ConfigurationError: a wrong request.
        RunError: the task's own training does not run, or the budget ended before its first steps.
    """
    reset_shown_warnings()
    if evidence is not None and evidence not in LEVELS:
        raise ConfigurationError(f"evidence must be one of {', '.join(LEVELS)}, not {evidence!r}")
    continues = isinstance(budget, str) and budget.startswith("+")
    seconds = None if budget is None else parse_budget(budget[1:] if isinstance(budget, str) and continues else budget)
    selection = MethodSelection.of(methods, extra)  # checked before anything runs
    task, device = TaskRef.of(task), pick_device(device)
    folder = search_folder(task, out)
    clock = Budget(float("inf") if seconds is None else seconds)
    facts = _describe(task, processes, clock)
    if not facts["has_validation"] and evidence in ("proven", "estimated"):
        raise ConfigurationError(f"evidence={evidence} needs a task with validation_data and a metric; it has none")
    settings = {
        "task": facts["fingerprint"],
        "target": facts["target"],
        "device": device,
        "seed": seed,
        "processes": processes,
        "code": source_hash(),
        **machine_and_versions(device),
    }
    clock.total += _earlier_budget(folder, settings) if continues else 0.0
    study = Study(
        task,
        device,
        TrialStore(folder, settings),
        clock,
        watch,
        seed=seed,
        processes=processes,
        higher_is_better=facts["higher_is_better"],
        target=facts["target"],
        source_hashes=selection.source_hashes(),
    )
    text = json.dumps(settings, indent=1, default=str)
    atomic_write(folder / "search.json", lambda file: file.write(text.encode()))
    state = SearchState(level=LEVELS[evidence] if evidence else DEFAULT_LEVEL)

    def save(is_partial: bool = True) -> TuneResult:
        about: Any = {"metric": facts["metric"], "offered": selection.offered, "price_per_hour": price_per_hour}
        result = result_of(study, state, is_partial=is_partial, **about)
        result |= {"expected_runs": runs, "out": str(folder)}
        write(folder, result)
        return result

    plan = _estimate(study, state, seconds, timeout)
    has_training_stage = facts["has_validation"] and state.level not in (EXACT, PRECISION)
    try:
        save()
        _diagnose(study, state, selection)
        _find_systems(study, state, plan, has_training_stage, save)
        if has_training_stage:
            _find_training(study, state, plan, margin)
    except OutOfBudgetError:
        study.note("search", "search", "stopped", "the budget is spent")
    except BaseException:
        save()
        raise
    return save(is_partial=False)


def search_folder(task: Any, out: str | Path | None = None) -> Path:
    """The folder of a search: ``out``, or ``runs/tune-TASK``."""
    return Path(out) if out is not None else Path("runs", "tune-" + re.sub(r"[^\w-]", "-", str(TaskRef.of(task))))


def _describe(task: TaskRef, processes: int, budget: Budget) -> dict[str, Any]:
    """What ``Description`` says about a task, in a process that ends at the deadline."""
    if processes > 1:
        warn_oversubscribed(processes)
    try:
        with start_workers(
            1, "hasten.tuning.trial:Description", None, budget.deadline(), task=task.to_json()
        ) as worker:
            return worker.call("facts", processes=processes)
    except DeadlineError:
        raise _too_small(budget, "to prepare the data and the model of the task") from None


def _too_small(budget: Budget, what: str) -> RunError:
    seconds = _format_duration(budget.total)
    return RunError(f"the budget of {seconds} was not enough {what}; give at least --budget {4 * budget.total:.0f}s")


def _earlier_budget(folder: Path, settings: dict[str, Any]) -> float:
    """Seconds of the search in ``folder`` that is continued; ConfigurationError if it was another one."""
    try:
        before = json.loads((folder / "search.json").read_text(encoding="utf-8"))
        seconds = float(json.loads((folder / "result.json").read_text(encoding="utf-8"))["budget_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(f"there is no search in {folder} to continue; give --budget without +") from None
    now = json.loads(json.dumps(settings, default=str))
    changed = [name for name in now if now[name] != before.get(name)]
    if changed:
        names = ", ".join(f"{name} ({before.get(name)} before, {now[name]} now)" for name in changed)
        raise ConfigurationError(f"the search in {folder} cannot be continued, since these changed: {names}")
    return seconds


def _estimate(study: Study, state: SearchState, budget: float | None, timeout: float | None) -> dict[str, Any]:
    """Estimates the training as it is, from a few steps; sets budget and timeout, and announces them. Its plan."""

    def measure(_: ProgressCallback) -> dict[str, Any]:
        limits = timeout or DEFAULT_TIMEOUT_S, study.budget.deadline()
        return estimate(study.task, study.device, study.seed, study.processes, *limits)

    try:
        found = study.measure_once("run_seconds", f"timing a few steps of {study.task}", measure)
    except OutOfBudgetError:
        raise _too_small(study.budget, "to time a few steps of the task") from None
    seconds = state.run_seconds = found["seconds"]
    if budget is None:
        study.budget.total = min(MAX_BUDGET_S, max(MIN_BUDGET_S, BUDGET_RUNS * (seconds or 0.0)))
    total = study.budget.total
    study.timeout = timeout or max(MIN_TIMEOUT_S, total * TIMEOUT_FRACTION, TIMEOUT_RUNS * (seconds or 0.0))
    run_time = f"takes about {_format_duration(seconds)}" if seconds else "has no known length"
    message = f"one run of the task {run_time}; the search may take {_format_duration(total)}"
    warnings.warn(message, ProgressWarning, stacklevel=3)
    state.comparison_seconds = min(max(COMPARISON_S[0], total / 12), COMPARISON_S[1])
    return found["plan"]


def _diagnose(study: Study, state: SearchState, selection: MethodSelection) -> None:
    """Finds which methods are worth trying. Without a diagnosis all are."""
    seconds = min(MAX_DIAGNOSIS_S, study.budget.total * DIAGNOSIS_SHARE)

    def measure(watch: ProgressCallback) -> Any:
        where = {"device": study.device, "processes": study.processes, "timeout": study.timeout, "seed": study.seed}
        return diagnose(study.task, budget=seconds, deadline=study.budget.deadline(), watch=watch, **where)

    state.diagnosis = study.measure_once("diagnosis", f"diagnosing {study.task}", measure)
    state.candidates = candidates_for(state.diagnosis, selection)
    for name, why in state.candidates.not_tried:
        study.note(name, "diagnosis", "not tried", why)


def _find_systems(
    study: Study, state: SearchState, plan: dict[str, Any], is_followed: bool, save: Callable[[], Any]
) -> None:
    """Finds the fastest recipe of exact methods, then with methods of lower precision; confirms both."""
    budget, seconds, samples = study.budget, state.comparison_seconds, _samples_of(plan)
    fits = is_followed and budget.left() >= WHOLE_RUNS * (state.run_seconds or float("inf"))
    fits_short = budget.left() * (1 - SYSTEMS_SHARE_OF_LONG) >= SHORT_RUNS * MIN_SHORT_RUN_S
    share = SYSTEMS_SHARE if fits else SYSTEMS_SHARE_OF_LONG if fits_short else 1.0
    share = share if is_followed else 1.0
    screening = min(max(SCREENING_S[0], budget.total / 40), SCREENING_S[1])
    exact, lower = _by_exactness(state.candidates)
    experienced = [] if state.candidates.is_restricted else _experience(state, study.device)
    if study.processes > 1:
        with budget.part(ONE_PROCESS_SHARE):
            state.one_process = _compare_with_one_process(study, state, Recipe(), samples)
    with budget.part(share):
        with budget.reserve(seconds + _comparison_overhead(plan)), budget.part(EXACT_SHARE if lower else 1.0):
            recipes = [*filter(is_exact, experienced)][:MAX_COMPOSITIONS]
            try_compositions(study, state.incumbents, recipes, samples, screening)
            search_systems(study, state.incumbents, exact, samples, screening)
            _find_strong_baseline(study, state, samples, screening)
            state.contributions = leave_one_out(study, state.incumbents, samples)
            state.ablated = state.incumbents.best
        _add(state, confirm_speed(study, state.incumbents.recipes, samples, seconds))
        save()
        if state.level != EXACT and lower:
            before = len(state.incumbents.recipes)
            with budget.reserve(seconds + _comparison_overhead(plan)), budget.part(1.0):
                search_systems(study, state.incumbents, lower, samples, screening)
            added = state.incumbents.recipes[before:]
            _add(state, confirm_speed(study, added, samples, seconds))
            save()
    if budget.exhausted:
        _note_not_tried(study, "systems", [*exact, *lower])


def _add(state: SearchState, found: Finding | None) -> None:
    if found:
        state.findings.append(found)


def _by_exactness(candidates: Candidates) -> tuple[list, list]:
    """(exact candidates, candidates of lower precision)."""
    lower = [item for item in candidates.systems if item.card.exactness is Exactness.REDUCED_PRECISION]
    return [item for item in candidates.systems if item not in lower], lower


def _experience(state: SearchState, device: str) -> list[Recipe]:
    phases = {name: share for name, share in (state.diagnosis.get("phases") or {}).items() if share}
    return compositions(state.diagnosis.get("facts") or (), phases, device)


def _samples_of(plan: dict[str, Any]) -> float:
    """Samples that the whole training trains; infinite if unknown."""
    return plan["samples_per_epoch"] * plan["epochs"] if plan["samples_per_epoch"] else float("inf")


def _comparison_overhead(plan: dict[str, Any]) -> float:
    """Seconds in which a comparison that is reported builds its pairs of processes."""
    return 2 * ROUNDS[0] * (0.5 + plan["start"] + 15 * plan["step"])


def _note_not_tried(study: Study, stage: str, items: list) -> None:
    tried = [trial["what"] for trial in study.trials]
    for item in items:
        if not any(item.name in what for what in tried):
            study.note(item.name, stage, "not tried", "the search's part of the budget ended before it")


def _find_training(study: Study, state: SearchState, plan: dict[str, Any], margin: float | None) -> None:
    """Finds and confirms recipes that change the training, by whole trainings or, if those do not fit, shorter ones."""
    budget, candidates, samples = study.budget, state.candidates, _samples_of(plan)
    items = [*candidates.communication, *candidates.training]
    study.horizon = _horizon(study, state, items)
    if not study.horizon:
        return
    is_whole = study.horizon >= 1
    exact = finding.recommended(state.findings, PRECISION)
    state.incumbents.recipes = [Recipe(), *([exact.recipe] if exact else [])]
    try:
        baseline = state.baseline = _run_baseline(study, margin)
    except OutOfBudgetError:
        return study.note("baseline", "baseline", "stopped", "the budget ended before the task's own training")
    except RunError as error:
        if not state.findings:
            raise
        return study.note("baseline", "baseline", "failed", str(error))  # exact recipes need no metric
    run_seconds = fmean(run["trial_seconds"] for run in baseline.runs)
    first = first_outcome(study, state.incumbents, baseline, exact.speedup.median if exact else 1.0)
    confirmation = (MIN_SEEDS - len(baseline.runs) + MIN_SEEDS / 2) * run_seconds + 2 * state.comparison_seconds
    with budget.reserve(confirmation), budget.part(TRAINING_SHARE):
        recipes = [] if candidates.is_restricted else _experience(state, study.device)
        recipes = [recipe for recipe in recipes if not is_exact(recipe)][:MAX_COMPOSITIONS]
        first = try_training_compositions(study, state.incumbents, first, recipes, baseline)
        search_training(study, state.incumbents, items, baseline, first)
        state.contributions = leave_one_out(study, state.incumbents, samples)
        state.ablated = state.incumbents.best
    if budget.exhausted:
        _note_not_tried(study, "training", items)
    known = [found.recipe for found in state.findings]
    recipes = [recipe for recipe in state.incumbents.recipes if recipe and recipe not in known]
    _confirm(study, state, baseline, recipes, is_whole)


def _horizon(study: Study, state: SearchState, items: list) -> float:
    """Fraction of the training that fits as often as the training stage needs it; 0 if none does."""
    left, seconds = study.budget.left(), state.run_seconds
    if not items or seconds is None:
        return 0.0
    if left >= WHOLE_RUNS * seconds:
        return 1.0
    if left / SHORT_RUNS < MIN_SHORT_RUN_S:
        needed = WHOLE_RUNS * seconds + study.budget.spent
        why = f"what is left of the budget is too little; --budget {needed:.0f}s lets it run whole trainings"
        study.note("methods that change the training", "training", "not tried", why)
        return 0.0
    return left / SHORT_RUNS / seconds


def _run_baseline(study: Study, margin: float | None) -> Baseline:
    """Trains the original on some seeds; sets target and margin. RunError if it fails or misses its target."""
    runs, seeds = [], []
    for seed in fresh_seeds(study.seed, BASELINE_SEEDS):
        runs.append(study.run(Recipe(), seed))
        seeds.append(seed)
        if "failed" in runs[-1]:
            raise RunError(f"the task's own training does not run: {runs[-1]['failed']}")
        is_expensive = study.budget.total < FEW_RUNS * runs[0]["trial_seconds"]
        if len(runs) == FEW_BASELINE_SEEDS and is_expensive:
            break
    metrics = [run["metric"] for run in runs]
    worst, best = (min, max) if study.higher_is_better else (max, min)
    if study.target is None or study.horizon < 1:  # what every seed reaches
        study.target = worst(run["best_metric"] for run in runs)
        runs = [study.run(Recipe(), seed) for seed in seeds]
    target: Any = study.target
    if all(run["seconds_to_target"] is None for run in runs):
        raise RunError(
            f"the task's own training never held its target {target:g} (it ended at {best(metrics):.4g}); "
            "lower the target or train longer"
        )
    size, why = resolve_margin(metrics, margin)
    search_seeds = [study.seed + SEED_STEP * index for index in range(len(runs))]
    baseline = Baseline(search_seeds, runs, target, size, study.higher_is_better, seeds, why)
    ends = ", ".join(f"{metric:.4g}" for metric in metrics)
    text = f"{len(runs)} seeds end at {ends}; margin {size:.3g}: {why}"
    study.note("baseline", "baseline", "measured", text, seconds=sum(run["trial_seconds"] for run in runs))
    return baseline


def _confirm(study: Study, state: SearchState, baseline: Baseline, recipes: list[Recipe], is_whole: bool) -> None:
    """Confirms the best recipes; measures a winner against one process and the strong baseline, and its parts."""
    budget, seconds = study.budget, state.comparison_seconds
    with budget.reserve(PROFILE_SECONDS + (bool(state.strong_baseline) + (study.processes > 1)) * seconds):
        attempts = confirm(study, recipes, baseline, seconds) if recipes else []
    for attempt in attempts:
        if attempt.speedup and attempt.speedup.median > 1:
            state.findings.append(_finding_of(study, state, attempt, is_whole))
    state.confirmation = attempts[0] if attempts and is_whole else None
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
        samples = baseline.samples_to_target()
        state.ablated, state.contributions = winner.recipe, contributions(study, winner.recipe, samples)


def _finding_of(study: Study, state: SearchState, attempt: Confirmation, is_whole: bool) -> Finding:
    """An attempt of the confirmation as a finding: proven if whole trainings passed the gate, else estimated."""
    assert attempt.speedup is not None
    is_proven = is_whole and attempt.gate.passed
    why = (
        attempt.why
        if is_whole
        else f"in {study.horizon:.2g} of the training, with its schedule compressed: {attempt.why}"
    )
    quality = attempt.gate.difference
    found = Finding(attempt.recipe, PROVEN if is_proven else ESTIMATED, attempt.speedup, why, quality)
    found.comparison = attempt.comparison
    if not is_proven:
        found.to_prove = _to_prove(state, attempt, is_whole)
    return found


def _to_prove(state: SearchState, attempt: Confirmation, is_whole: bool) -> str:
    """What it would take to prove the recipe of an attempt: seeds and budget."""
    difference, seconds = attempt.gate.difference, state.run_seconds
    if difference and difference["mean"] <= -attempt.gate.margin:
        return "more seeds would hardly prove it: it ends worse by more than the margin"
    done = len(attempt.paired) if is_whole else 0
    seeds = next((look for look in LOOKS if look > done), LOOKS[-1] + MIN_SEEDS) - done
    if seconds is None or attempt.speedup is None:
        return f"{seeds} more seeds"
    more = seeds * (seconds + seconds / attempt.speedup.median)
    return f"{seeds} more seeds, about {_format_duration(more)}: --budget +{more:.0f}s"


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


def _find_strong_baseline(study: Study, state: SearchState, samples: float, seconds: float) -> None:
    """Sets the strong baseline: the fastest of ``strong_baselines``, without methods that have no effect here."""
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
                speedup = whole_run_ratio(outcome, samples)
                state.strong_finding = None if best else Finding(recipe, "", speedup, "set by hand")
                best = state.strong_baseline = recipe
            break


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
