"""Measures the winner anew: fresh seeds, a fresh comparison, both baselines. Only this is reported.

The search picked its winner partly by luck; whatever it saw is not repeated here. Recipes that do not
hold are climbed down from, rung by rung.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

from scipy.special import stdtrit

from hasten.contract.card import Exactness
from hasten.contract.recipe import Recipe
from hasten.measure.ratio import LOOKS as PACE_LOOKS
from hasten.measure.ratio import Ratio
from hasten.tuning.gate import LOOKS, Gate, proven, quality_gate
from hasten.tuning.search import EXACT, Baseline, Ladder
from hasten.tuning.study import OutOfBudget, Study, exactness_of

FIRST_FRESH_SEED = 100
ERROR = 0.05


@dataclass
class Confirmed:
    """What fresh seeds say about a recipe."""

    recipe: Recipe
    gate: Gate
    speedup: Ratio | None = None
    over_competent: Ratio | None = None
    baseline_runs: dict[int, dict] = field(default_factory=dict)
    tuned_runs: dict[int, dict] = field(default_factory=dict)
    pace: dict = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # time to the target: baseline, competent, tuned
    why: str = ""


def confirm(study: Study, ladder: Ladder, competent: Recipe, baseline: Baseline, pace_seconds: float) -> Confirmed | None:
    """The fastest recipe of the ladder that holds, or None; each attempt is noted among the trials."""
    last = None
    while ladder.best:
        last = _attempt(study, ladder.best, competent, baseline, pace_seconds)
        held = last.gate.passed and last.speedup is not None and last.speedup.low > 1.01
        study.note(str(last.recipe), "confirmation", "won" if held else "refused", last.why, ratio=last.speedup and last.speedup.to_json())
        if held:
            return last
        ladder.rungs.pop()
    return last


def _attempt(study: Study, recipe: Recipe, competent: Recipe, baseline: Baseline, pace_seconds: float) -> Confirmed:
    done = Confirmed(recipe, Gate(None, None, baseline.margin, None, [], False, False, "no seed was run"))
    try:
        done.pace = study.pace(Recipe(), recipe, looks=PACE_LOOKS, seconds=pace_seconds, salt="confirmation")
        if "failed" in done.pace:
            done.why = done.pace["failed"]
            return done
        exact = _exactness_of(recipe)
        proof = study.proof(Recipe(), recipe, exact) if exact in EXACT else {}
        for count in LOOKS:
            for seed in range(study.seed + FIRST_FRESH_SEED, study.seed + FIRST_FRESH_SEED + count):
                if seed in done.tuned_runs:
                    continue
                done.tuned_runs[seed] = tuned = study.run(recipe, seed)
                if why := tuned.get("failed") or _missed(tuned, seed, baseline):
                    done.why = why
                    return done
                done.baseline_runs[seed] = study.run(Recipe(), seed)
            done.gate = proven(_gate(done, baseline), proof) if proof.get("passed") else _gate(done, baseline)
            if done.gate.settled:
                break
    except OutOfBudget:
        done.gate = _gate(done, baseline) if done.baseline_runs else done.gate
        if not done.gate.passed:
            done.why = f"the budget ended before the quality was proven: {done.gate.why}"
            return done
    done.why = done.gate.why
    if done.gate.passed:
        _clock(study, done, competent, pace_seconds)
    return done


def _gate(done: Confirmed, baseline: Baseline) -> Gate:
    return quality_gate(
        {seed: run["metric"] for seed, run in done.baseline_runs.items() if "failed" not in run},
        {seed: run["metric"] for seed, run in done.tuned_runs.items()},
        margin=baseline.margin,
        higher_is_better=baseline.higher_is_better,
        more_baseline=[run["metric"] for run in baseline.runs],
    )


def _exactness_of(recipe: Recipe) -> Exactness:
    """The loosest class among the members: what the whole may promise."""
    return max((exactness_of(name) for name in recipe.methods), key=list(Exactness).index)


def _missed(run: dict, seed: int, baseline: Baseline) -> str | None:
    if run["seconds_to_target"] is None:
        return f"seed {seed} never reached the target {baseline.target:g}: it ended at {run['metric']:.4g}"
    return None


def _clock(study: Study, done: Confirmed, competent: Recipe, pace_seconds: float) -> None:
    """Times to the target: samples from the paired runs, seconds a sample from the interleaved comparison."""
    seeds = sorted(done.baseline_runs.keys() & done.tuned_runs.keys())
    samples = [(_samples(done.baseline_runs[seed]), _samples(done.tuned_runs[seed])) for seed in seeds]
    done.speedup, done.seconds["baseline"], done.seconds["tuned"] = time_to_target(done.pace, samples)
    if not competent:
        done.over_competent, done.seconds["competent"] = done.speedup, done.seconds["baseline"]
        return
    pace = study.pace(competent, done.recipe, looks=PACE_LOOKS, seconds=pace_seconds, salt="confirmation", last=True)
    if "failed" not in pace:
        done.over_competent, done.seconds["competent"], _ = time_to_target(pace, samples)


def _samples(run: dict) -> int:
    """Samples to the target; a run that never got there took at least all of its own."""
    return run["samples_to_target"] or run["evaluations"][-1]["samples"]


def time_to_target(pace: dict, samples: list[tuple[int, int]]) -> tuple[Ratio, float, float]:
    """(speed-up to the target, seconds of a, seconds of b) of two recipes.

    Args:
        pace: an interleaved comparison of the two.
        samples: (of a, of b) until the target, one pair a seed.

    The seconds of a run are start + samples x seconds a sample (its evaluations included). The interval of the
    speed-up adds the spread over the seeds and the interval of the pace, as independent errors of a logarithm.
    """
    a = pace["seconds_per_1000_samples"]["a"] / 1000
    ratio, start = pace["ratio"], pace["start_seconds"]
    b = a / ratio["median"]
    times = [(start["a"] + x * a, start["b"] + y * b) for x, y in samples]
    logs = [math.log(x / y) for x, y in times]
    of_seeds = float(stdtrit(len(logs) - 1, 1 - ERROR / 2)) * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    of_pace = (math.log(ratio["high"]) - math.log(ratio["low"])) / 2
    centre, reach = fmean(logs), math.hypot(of_seeds, of_pace)
    return (
        Ratio(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)),
        fmean(x for x, _ in times),
        fmean(y for _, y in times),
    )
