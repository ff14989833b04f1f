"""The result of a search, which ``tune`` returns and writes to result.json: verdict, evidence, cost."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hasten.benchmarking.ratio import Ratio
from hasten.core.recipe import Recipe
from hasten.engine.environment import machine_and_versions
from hasten.engine.registry import drop_distributed
from hasten.engine.run_dir import atomic_write
from hasten.reporting.result_schema import Curve, OfferedMethod, Point, TuneResult
from hasten.tuning.candidates import Candidates
from hasten.tuning.confirmation import SUBSTITUTED, Confirmation, misses_target
from hasten.tuning.finding import (
    DEFAULT_LEVEL,
    ESTIMATED,
    EXACT,
    PRECISION,
    SURELY_FASTER,
    Finding,
    frontier,
    frontier_rows,
    recommended,
)
from hasten.tuning.study import Study, changes_training, is_in
from hasten.tuning.systems import Incumbents
from hasten.tuning.training import Baseline
from hasten.tuning.trial_store import FREE_THE_DISK

WIDEST = 4.0  # ratio of the ends of an interval, above which it says nothing about a recipe


@dataclass
class SearchState:
    """What a search has found so far, for result.json."""

    run_seconds: float | None = None  # of the whole training as it is; None if its length is unknown
    plan: dict[str, Any] = field(default_factory=dict)  # of the task as it is, see ``Arm.build``
    margin: float | None = None  # as the user gave it
    save: Callable[[], Any] = lambda: None  # writes result.json
    level: str = DEFAULT_LEVEL  # weakest evidence of a recipe to recommend
    findings: list[Finding] = field(default_factory=list)
    strong_finding: Finding | None = None
    unconfirmed: Finding | None = None  # the best recipe of a search that was not confirmed yet
    too_small: str = ""  # why the budget allowed no comparison, and which would
    diagnosis: dict = field(default_factory=dict)  # as ``diagnose`` returned it
    candidates: Candidates = field(default_factory=Candidates)
    baseline: Baseline | None = None
    one_process: Ratio | None = None  # speed-up of the task's own training in one process over the job of several
    winner_in_one_process: Ratio | None = None  # the same of the winner, without its distributed methods
    length_arguments: list[str] = field(default_factory=list)  # of a script, which ``--vary`` could shorten
    start_seconds: float = 0.0  # until the task was known; a search that is continued takes them again
    comparison_seconds: float = 0.0  # budget of a comparison of the confirmation
    strong_baseline: Recipe = field(default_factory=Recipe)  # what an experienced user sets by hand
    incumbents: Incumbents = field(default_factory=Incumbents)
    ablated: Recipe = field(default_factory=Recipe)  # the recipe that the contributions belong to
    contributions: list[Any] = field(default_factory=list)
    step_profiles: dict[str, dict] = field(default_factory=dict)  # seconds of each phase per 1000 samples, by arm
    operations: dict | None = None  # of a step of the chosen recipe, if it lowers the precision
    confirmation: Confirmation | None = None
    tested: list[Recipe] = field(default_factory=list)  # as often as a confirmation with whole trainings looked at it

    @property
    def samples(self) -> float:
        """Samples that the whole training trains; infinite if unknown."""
        of_epoch = self.plan["samples_per_epoch"]
        return of_epoch * self.plan["epochs"] if of_epoch else float("inf")

    @property
    def chosen(self) -> Finding | None:
        """The finding to recommend; None if there is none with enough evidence."""
        return recommended(self.findings, self.level)

    @property
    def winner(self) -> Confirmation | None:
        """The confirmation of the winning recipe; None if no recipe passed."""
        return self.confirmation if self.confirmation is not None and self.confirmation.passed else None

    @property
    def one_process_is_faster(self) -> bool:
        """Whether one process is surely faster than several: with the task as it is, or with the winner's recipe."""
        found = [each.gain.high for each in (self.winner, self.chosen) if each and each.gain]
        best = max(found, default=SURELY_FASTER)
        as_it_is = self.one_process is not None and self.one_process.low > max(SURELY_FASTER, best)
        return as_it_is or self.winner_is_faster_in_one_process

    @property
    def winner_is_faster_in_one_process(self) -> bool:
        """Whether the winner's recipe is surely faster in one process.

        False if its distributed methods change the training: the quality without them has not been tested.
        """
        if self.winner is None or self.winner_in_one_process is None:
            return False
        recipe = self.winner.recipe
        dropped = recipe.drop(*drop_distributed(recipe).methods)
        return self.winner_in_one_process.low > SURELY_FASTER and not changes_training(dropped)


def result_of(
    study: Study,
    state: SearchState,
    *,
    metric: str,
    offered: Recipe,
    price_per_hour: float | None = None,
    is_partial: bool = False,
) -> TuneResult:
    """The content of result.json. Speed-up and quality come from confirmations alone.

    ``metric`` is the name of the task's metric, and ``offered`` holds the methods that the user offered.
    """
    confirmation, baseline = state.confirmation, state.baseline
    chosen = None if state.one_process_is_faster else state.chosen
    winner = state.winner if chosen and state.winner and state.winner.recipe == chosen.recipe else None
    recipe = chosen.recipe if chosen else Recipe()
    has_reached = winner and not any(map(misses_target, winner.tuned_runs.values()))
    findings = [*state.findings, *([state.unconfirmed] if state.unconfirmed else [])]
    comparison = chosen.comparison if chosen else confirmation.comparison if confirmation else {}
    starts = chosen.comparison.get("start_seconds") if chosen else None
    seconds = _training_seconds(state, chosen, study.horizon)
    saved = seconds["baseline"] - seconds["tuned"] if seconds and seconds["tuned"] else 0.0
    effects = (run.get("effects") for run in winner.tuned_runs.values()) if winner else ()
    measured = chosen and chosen.comparison.get("peak_memory_bytes")
    memory = {"baseline": state.plan.get("peak_memory", [])}
    if measured:
        memory = {"baseline": measured["a"], "tuned": measured["b"]}
    result: Any = {
        "kind": "tune",
        "task": study.task.argument,
        "command": study.task.command,
        "processes": study.processes,
        "verdict": "faster" if chosen else "one process is faster" if state.one_process_is_faster else "no improvement",
        "why": _why(study, state, is_partial),
        "evidence": chosen.evidence if chosen else "",
        "frontier": frontier_rows(frontier(findings), chosen, state.strong_finding),
        "training_seconds": seconds,
        "start_seconds": dict(zip(("baseline", "tuned"), map(starts.get, "ab"), strict=True)) if starts else {},
        "training_measured": winner.uses_measured if winner else not chosen and bool(baseline) and study.horizon >= 1,
        "price_per_hour": price_per_hour,
        "money": _money(seconds, price_per_hour),
        "is_partial": is_partial,
        "margin_why": baseline.margin_why if baseline else "",
        "one_process": _interval(state.one_process),
        "winner_in_one_process": _interval(state.winner_in_one_process),
        "recipe": recipe.methods,
        "metric": {"name": metric, "higher_is_better": study.higher_is_better, "target": study.target},
        "speedup": _interval(chosen and chosen.speedup),
        "speedup_over_strong_baseline": _interval(winner and winner.over_strong_baseline),
        "measured_speedup": _interval(winner and winner.measured_speedup),
        "time_to_target": winner.seconds if winner and has_reached else None,
        "samples_compared": winner.counts.to_json() if winner and winner.counts and has_reached else None,
        "quality": _quality(state, chosen, winner),
        **_runs(baseline, confirmation),
        "strong_baseline_recipe": state.strong_baseline.methods,
        "contributions": state.contributions if chosen and recipe == state.ablated else [],
        "effects": next(filter(None, effects), None) or (comparison.get("effects") or {}).get("b", {}),
        "step_profile": state.step_profiles,
        "operations": state.operations,
        "peak_memory_bytes": memory,
        "confirmed_recipes": [recipe.methods for recipe in state.tested],
        "offered": [_offered(name, study.trials, recipe) for name in offered.methods],
        "trials": study.trials,
        **{key: state.diagnosis.get(key) for key in ("phases", "ceilings", "facts")},
        **machine_and_versions(study.device),
        "system_noise": comparison.get("system_noise") or state.diagnosis.get("system_noise", {}),
        "budget_seconds": study.budget.total,
        "search_seconds": study.budget.spent,
        "break_even_runs": study.budget.spent / saved if saved > 0 else None,
        "baseline_seconds": state.run_seconds,
        "remembered_trials": study.store.reused,
        "seed": study.seed,
    }
    return result


def _training_seconds(state: SearchState, chosen: Finding | None, horizon: float) -> Any:
    """Seconds of the whole training as it is (``baseline``) and with the chosen recipe (``tuned``, ``low``, ``high``).

    None if its length is unknown. ``baseline``: the median of its runs if these are whole trainings (``horizon`` 1),
    else predicted from steps.
    """
    if state.run_seconds is None:
        return None
    before = median(run["seconds"] for run in state.baseline.runs) if state.baseline and horizon >= 1 else None
    seconds = before or state.run_seconds
    if not chosen:
        return {"baseline": seconds, "tuned": None, "low": None, "high": None}
    ratio = chosen.training_speedup or chosen.speedup
    return {
        "baseline": seconds,
        "tuned": seconds / ratio.median,
        "low": seconds / ratio.high,
        "high": seconds / ratio.low,
    }


def _money(seconds: Any, price_per_hour: float | None) -> Any:
    if price_per_hour is None or not seconds:
        return None
    return {arm: seconds[arm] and seconds[arm] / 3600 * price_per_hour for arm in ("baseline", "tuned")}


def _quality(state: SearchState, chosen: Finding | None, winner: Confirmation | None) -> Any:
    """``quality`` of result.json: the numbers of the gate; ``passed`` is true without them where the evidence needs no
    gate, and null where it was not asked about the chosen recipe.
    """
    confirmation, baseline = state.confirmation, state.baseline
    if chosen and not winner:
        is_estimated = chosen.evidence == ESTIMATED
        if is_estimated and confirmation and confirmation.recipe == chosen.recipe:
            return confirmation.gate.to_json()
        passed = None if is_estimated else True
        return {"baseline": baseline and baseline.metric, "tuned": None, "margin": None, "passed": passed}
    if confirmation:
        return confirmation.gate.to_json()
    metric, margin = (baseline.metric, baseline.margin) if baseline else (None, None)
    return {"baseline": metric, "tuned": None, "margin": margin, "passed": False}


def _interval(ratio: Ratio | None) -> Any:
    return ratio and ratio.to_json()


def write(directory: Path, result: Any) -> None:
    """Writes recipe.toml and result.json, and sets ``recipe_file`` in the result; RunError if it cannot write."""
    result["recipe_file"] = str(directory / "recipe.toml")
    toml, text = Recipe(result["recipe"]).to_toml(), json.dumps(result, indent=1, allow_nan=False)
    atomic_write(directory / "recipe.toml", lambda file: file.write(toml.encode()), FREE_THE_DISK)
    atomic_write(directory / "result.json", lambda file: file.write(text.encode()), FREE_THE_DISK)


def _why(study: Study, state: SearchState, is_partial: bool = False) -> str:
    confirmation, winner, chosen = state.confirmation, state.winner, state.chosen
    if winner and state.winner_is_faster_in_one_process:
        return (
            f"one process with {drop_distributed(winner.recipe)} is {state.winner_in_one_process} as fast as "
            f"{study.processes} with the best recipe found for them, {winner.recipe}; leave --processes out"
        )
    if state.one_process_is_faster:
        best = f", and the best recipe found for these {winner.gain}" if winner else ""
        return (
            f"one process with all cores, or OMP_NUM_THREADS, is {state.one_process} as fast as {study.processes} as "
            f"they are{best}; leave --processes out"
        )
    if chosen:
        is_whole = chosen.training_speedup is None or chosen.gain == chosen.training_speedup
        what = "faster" if is_whole else "faster to the target"
        if state.run_seconds is None:
            what = "faster in its steps and evaluations, without the start, since the length of the training is unknown"
        return f"{chosen.gain.median:.2f} times {what}; {chosen.why}"
    if confirmation is not None:
        return confirmation.why
    if state.too_small:
        return state.too_small
    perhaps = next((one for one in state.findings if _may_be_faster(one, state.level)), None)
    why = _why_nothing_is_faster(study.trials, is_partial)
    if perhaps is None or is_partial:
        return why
    return f"{perhaps.recipe} may be faster, {perhaps.gain}, which is not sure yet; {perhaps.to_prove}; {why}"


def _may_be_faster(found: Finding, level: str) -> bool:
    """Whether it is open that a recipe which keeps the training is faster, and could be known at the asked level."""
    is_narrow = found.gain.high < WIDEST * found.gain.low
    is_allowed = not changes_training(found.recipe) and (level != EXACT or found.evidence != PRECISION)
    return bool(found.to_prove) and is_narrow and is_allowed


def _why_nothing_is_faster(trials: Sequence[Mapping[str, Any]], is_partial: bool) -> str:
    """Why no recipe is recommended, in words, with the trials that the budget did not allow."""
    if is_partial:
        why = "the search has not ended, and nothing is surely faster so far"
    elif any(trial["verdict"] == "stopped" for trial in trials):
        why = "what was left of the budget was too little for the next trial, and nothing was surely faster by then"
    elif any(trial.get("ratio") for trial in trials):
        why = "no method that was tried is surely faster; see the trials"
    else:
        why = "no recipe could be compared; see the trials"
    left_out = [trial for trial in trials if trial["verdict"] == "not tried" and "--budget" in trial["why"]]
    what = "; ".join(f"{trial['what']}: not tried, {trial['why']}" for trial in left_out)
    return f"{why}; {what or 'give it a larger --budget'}" if what or "budget" in why else why


def _runs(baseline: Baseline | None, confirmation: Confirmation | None) -> Any:
    """``samples_to_target`` and ``seconds_to_target`` of the paired seeds, and ``curves`` of all seeds, each by arm.

    Without the seconds and curves of runs that a substitute of the original has made.
    """
    if confirmation and confirmation.baseline_runs:
        arms, paired = {"baseline": confirmation.baseline_runs, "tuned": confirmation.tuned_runs}, confirmation.paired
        seeds = {"baseline": paired, "tuned": paired}
    else:
        runs = baseline.by_seed if baseline else {}
        arms = {"baseline": runs, "tuned": {}}
        seeds = {arm: list(runs) for arm, runs in arms.items()}
    own = {arm: {seed: run for seed, run in runs.items() if SUBSTITUTED not in run} for arm, runs in arms.items()}
    return {
        "samples_to_target": {
            arm: [runs[seed].get("samples_to_target") for seed in seeds[arm]] for arm, runs in arms.items()
        },
        "seconds_to_target": {
            arm: [own[arm].get(seed, {}).get("seconds_to_target") for seed in seeds[arm]] for arm in arms
        },
        "curves": {arm: _curves(runs) for arm, runs in own.items()},
    }


def _curves(runs: dict[int, dict]) -> list[Curve]:
    rows = {seed: run["evaluations"] for seed, run in runs.items() if "evaluations" in run}
    keys = "seconds", "samples", "metric"
    return [
        Curve(seed=seed, points=[Point(**{key: row[key] for key in keys}) for row in evaluations])
        for seed, evaluations in rows.items()
    ]


def _offered(name: str, trials: list[dict], recipe: Recipe) -> OfferedMethod:
    """The outcome of the method ``name``, which the user offered, from its trials and the winning recipe."""
    reasons = [trial["why"] for trial in trials if is_in(name, trial["what"])]
    why = reasons[-1] if reasons else "the budget ended before it was tried"
    return {"method": name, "accepted": name in recipe.methods, "why": why}
