"""What a search tells: the verdict, the evidence, and what it cost. The content of result.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hasten.benchmarking.ratio import Ratio
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.engine.environment import environment
from hasten.engine.registry import drop_distributed
from hasten.engine.run_dir import atomic_write
from hasten.reporting.result_schema import Curve, Offered, Point, TuneResult
from hasten.tuning.candidates import Candidates
from hasten.tuning.confirm import SURELY_FASTER, Confirmation
from hasten.tuning.search import Baseline, Incumbents
from hasten.tuning.study import Study, exactness_of


@dataclass
class Found:
    """What the search has found so far, chapter by chapter."""

    story: dict = field(default_factory=dict)  # the diagnosis
    candidates: Candidates = field(default_factory=Candidates)
    baseline: Baseline | None = None
    one_process: Ratio | None = None  # how many times as fast the task's own training is in one process as in the job
    winner_alone: Ratio | None = (
        None  # how many times as fast as the winner what one process can take of its recipe is there
    )
    pace_seconds: float = 0.0  # for a comparison of the confirmation
    competent: Recipe = field(default_factory=Recipe)
    ladder: Incumbents = field(default_factory=Incumbents)
    top: Recipe = field(default_factory=Recipe)  # to which the shares belong: the best of the search, or the winner
    shares: list[dict] = field(default_factory=list)
    anatomy: dict[str, dict] = field(default_factory=dict)
    confirmed: Confirmation | None = None

    @property
    def won(self) -> bool:
        return self.confirmed is not None and self.confirmed.passed

    @property
    def better_alone(self) -> bool:
        """Whether one process is surely faster than the job, whatever was found for that: as the task is, or with the same recipe."""
        best = self.confirmed.speedup.high if self.won else SURELY_FASTER
        as_it_is = self.one_process is not None and self.one_process.low > max(SURELY_FASTER, best)
        return as_it_is or self.better_with_the_same

    @property
    def better_with_the_same(self) -> bool:
        """Whether one process with the winner's recipe is: of one that trains otherwise without the strategy, nobody has looked at the quality."""
        if self.winner_alone is None or self.winner_alone.low <= SURELY_FASTER:
            return False
        there = drop_distributed(self.confirmed.recipe).methods
        return all(
            exactness_of(name) is not Exactness.CHANGES_TRAINING
            for name in self.confirmed.recipe.methods
            if name not in there
        )


def result_of(study: Study, found: Found, *, metric: str, offered: Recipe) -> TuneResult:
    """Everything as plain data. Speed-up and quality come from the confirmation alone."""
    confirmed, baseline, won = found.confirmed, found.baseline, found.won and not found.better_alone
    recipe = confirmed.recipe if won else Recipe()
    seconds = confirmed.seconds if won else None
    saved = seconds["baseline"] - seconds["tuned"] if won else 0.0
    untried = {"baseline": baseline.metric, "tuned": None, "margin": baseline.margin, "passed": False}
    return {
        "kind": "tune",
        "task": str(study.task),
        "processes": study.processes,
        "verdict": "faster" if won else "one process is faster" if found.better_alone else "no improvement",
        "why": _why_alone(study, found)
        or _why(confirmed, won, stopped=any(trial["verdict"] == "stopped" for trial in study.trials)),
        "one_process": found.one_process and found.one_process.to_json(),
        "winner_in_one_process": found.winner_alone and found.winner_alone.to_json(),
        "recipe": recipe.methods,
        "metric": {"name": metric, "higher_is_better": study.higher_is_better, "target": study.target},
        "speedup": confirmed.speedup.to_json() if won else None,
        "speedup_over_strong_baseline": confirmed.over_competent.to_json()
        if won and confirmed.over_competent
        else None,
        "stopwatch": confirmed.stopwatch.to_json() if won and confirmed.stopwatch else None,
        "time_to_target": seconds,
        "samples_compared": confirmed.samples if won else None,
        "quality": confirmed.gate.to_json() if confirmed else untried,
        **_runs(found),
        "strong_baseline_recipe": found.competent.methods,
        "shares": found.shares if won and recipe == found.top else [],
        "anatomy": found.anatomy,
        "offered": [_fate(name, study.trials, recipe) for name in offered.methods],
        "trials": study.trials,
        **{key: found.story.get(key) for key in ("phases", "headroom", "facts")},
        **surroundings(study.device),
        "system_noise": (confirmed.pace.get("system_noise") if confirmed else None) or found.story.get("system_noise"),
        "budget_seconds": study.budget.total,
        "search_seconds": study.budget.spent,
        "break_even_runs": study.budget.spent / saved if saved > 0 else None,
        "remembered_trials": study.ledger.found,
        "seed": study.seed,
    }


def write(folder: Path, result: dict) -> None:
    """recipe.toml and result.json.

    Raises:
        Failure: the folder cannot be written.
    """
    result["recipe_file"] = str(folder / "recipe.toml")
    texts = {
        "recipe.toml": Recipe(result["recipe"]).to_toml(),
        "result.json": json.dumps(result, indent=1, allow_nan=False),
    }
    for name, text in texts.items():
        atomic_write(folder / name, lambda file, text=text: file.write(text.encode()))


def surroundings(device: str) -> dict:
    """The machine and the versions, without which no number means anything."""
    facts = environment(device)
    machine = {key: facts.get(key) for key in ("cpu", "cores", "threads", "device", "gpu")}
    machine |= {"os": facts["system"], "memory_gb": round(psutil.virtual_memory().total / 2**30, 1)}
    return {"machine": machine, "versions": {key: facts[key] for key in ("hasten", "python", "torch", "numpy")}}


def _why(confirmed: Confirmation | None, won: bool, stopped: bool) -> str:
    if confirmed is None and stopped:
        return "what was left of the budget was too little for the next trial, and nothing was surely faster by then; give it a larger --budget"
    if confirmed is None:
        return "no method that was tried is surely faster; see the trials"
    if won:
        return f"{confirmed.speedup.median:.1f} times faster to the target; {confirmed.why}"
    return confirmed.why


def _why_alone(study: Study, found: Found) -> str | None:
    """What is to be said where one process is surely faster."""
    if not found.better_alone:
        return None
    if found.better_with_the_same:
        there = drop_distributed(found.confirmed.recipe)
        return (
            f"one process with {there} is {found.winner_alone} as fast as {study.processes} with the best recipe found for them, "
            f"{found.confirmed.recipe}; leave --processes out"
        )
    best = f", and the best recipe found for these {found.confirmed.speedup}" if found.won else ""
    return f"one process with all cores, or OMP_NUM_THREADS, is {found.one_process} as fast as {study.processes} as they are{best}; leave --processes out"


def _runs(found: Found) -> dict:
    """Of both arms: samples and seconds to the target on the paired seeds, and the metric on the way on every seed."""
    baseline, confirmed = found.baseline, found.confirmed
    of_search = {"baseline": dict(zip(baseline.seeds, baseline.runs, strict=True)), "tuned": {}}
    arms = {"baseline": confirmed.baseline_runs, "tuned": confirmed.tuned_runs} if confirmed else of_search
    seeds = (
        {"baseline": confirmed.paired, "tuned": confirmed.paired}
        if confirmed
        else {arm: list(runs) for arm, runs in arms.items()}
    )
    to_target = {
        f"{name}_to_target": {
            arm: [runs[seed].get(f"{what}_to_target") for seed in seeds[arm]] for arm, runs in arms.items()
        }
        for name, what in {"samples": "samples", "stopwatch": "seconds"}.items()
    }
    return to_target | {
        "curves": {
            arm: [_curve(seed, run) for seed, run in runs.items() if "evaluations" in run] for arm, runs in arms.items()
        }
    }


def _curve(seed: int, run: dict) -> Curve:
    evaluations = run["evaluations"]
    points = [Point(seconds=each["seconds"], samples=each["samples"], metric=each["metric"]) for each in evaluations]
    return {"seed": seed, "points": points}


def _fate(name: str, trials: list[dict], recipe: Recipe) -> Offered:
    """What became of a method that the user offered."""
    told = [trial for trial in trials if name in trial["what"]]
    return {
        "method": name,
        "accepted": name in recipe.methods,
        "why": told[-1]["why"] if told else "the budget ended before it was tried",
    }
