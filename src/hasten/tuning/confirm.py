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
from hasten.tuning.gate import LOOKS, Gate, confidence_of, proven, quality_gate
from hasten.tuning.search import EXACT, Baseline, Ladder
from hasten.tuning.study import OutOfBudget, Study, exactness_of

FIRST_FRESH_SEED, SEED_STEP = 100_000, 1000
MOST_ATTEMPTS = 3  # recipes that may be confirmed; each further one has to pass a stricter gate
AGREEMENT = 0.9  # of the modelled speed-up, which the stopwatch must confirm
ERROR = 0.05


@dataclass
class Confirmed:
    """What fresh seeds say about a recipe."""

    recipe: Recipe
    gate: Gate
    speedup: Ratio | None = None
    stopwatch: Ratio | None = None  # the same by the paired runs' own seconds
    over_competent: Ratio | None = None
    baseline_runs: dict[int, dict] = field(default_factory=dict)
    tuned_runs: dict[int, dict] = field(default_factory=dict)
    pace: dict = field(default_factory=dict)
    samples: list[tuple[int, int]] = field(default_factory=list)  # to the target, baseline and tuned, a pair a seed
    seconds: dict[str, float] = field(default_factory=dict)  # time to the target: baseline, competent, tuned
    why: str = ""

    @property
    def held(self) -> bool:
        """As good for certain, and faster for certain."""
        return self.gate.passed and self.speedup is not None and self.speedup.low > 1.01


def confirm(study: Study, ladder: Ladder, competent: Recipe, baseline: Baseline, pace_seconds: float) -> Confirmed | None:
    """The fastest recipe of the ladder that holds; else the last that was attempted, or None. Every attempt is noted."""
    last = None
    for attempt in range(MOST_ATTEMPTS):
        if not ladder.best:
            break
        last = _attempt(study, ladder.best, competent, baseline, pace_seconds, attempt)
        study.note(
            str(last.recipe), "confirmation", "won" if last.held else "refused", last.why, ratio=last.speedup and last.speedup.to_json()
        )
        if last.held:
            return last
        ladder.rungs.pop()
    return last


def _attempt(study: Study, recipe: Recipe, competent: Recipe, baseline: Baseline, pace_seconds: float, attempt: int) -> Confirmed:
    done = Confirmed(recipe, Gate(None, None, baseline.margin, None, [], False, False, "no seed was run"))
    try:
        done.pace = study.pace(Recipe(), recipe, looks=PACE_LOOKS, seconds=pace_seconds, salt="confirmation")
        if why := done.pace.get("failed"):
            return _with(done, why)
        proof = _proof(study, recipe)
        for count in LOOKS:
            for seed in fresh_seeds(study.seed, count):
                if seed in done.tuned_runs:
                    continue
                if why := _paired_run(study, done, seed, baseline):
                    return _with(done, why)
            done.gate = _gate(done, baseline, attempt)
            if proof.get("passed"):
                done.gate = proven(done.gate, proof)
            if done.gate.settled:
                break
    except OutOfBudget:
        if done.baseline_runs:
            done.gate = _gate(done, baseline, attempt)
        if not done.gate.passed:
            return _with(done, f"the budget ended before the quality was proven: {done.gate.why}")
    done.why = done.gate.why
    if done.gate.passed:
        _clock(study, done, competent, pace_seconds)
    return done


def fresh_seeds(seed: int, count: int) -> list[int]:
    """Seeds that the search has not seen, far enough apart that their shuffles (seed + epoch) never coincide."""
    return [seed + FIRST_FRESH_SEED + SEED_STEP * number for number in range(count)]


def _paired_run(study: Study, done: Confirmed, seed: int, baseline: Baseline) -> str | None:
    """Both arms on one seed, in turns which goes first; why the recipe is out, or None."""
    arms = [(done.recipe, done.tuned_runs), (Recipe(), done.baseline_runs)]
    for recipe, runs in arms if len(done.tuned_runs) % 2 == 0 else reversed(arms):
        runs[seed] = run = study.run(recipe, seed)
        if "failed" in run:
            return f"seed {seed}: {run['failed']}"
    tuned, original = done.tuned_runs[seed], done.baseline_runs[seed]
    if tuned["seconds_to_target"] is None:
        return f"seed {seed} never reached the target {baseline.target:g}: it ended at {tuned['metric']:.4g}"
    if study.device == "cpu" and _exactness_of(done.recipe) is Exactness.BIT_EXACT and _metrics(tuned) != _metrics(original):
        return f"seed {seed} is not the original's run, though every member claims the same bits"
    return None


def _metrics(run: dict) -> list[float]:
    return [look["metric"] for look in run["evaluations"]]


def _with(done: Confirmed, why: str) -> Confirmed:
    done.why = why
    return done


def _proof(study: Study, recipe: Recipe) -> dict:
    """That the whole recipe is exact, where every member is ours and says so: then the seeds need only not contradict."""
    exactness = _exactness_of(recipe)
    return study.proof(Recipe(), recipe, exactness) if exactness in EXACT and not any(":" in name for name in recipe.methods) else {}


def _gate(done: Confirmed, baseline: Baseline, attempt: int) -> Gate:
    return quality_gate(
        {seed: run["metric"] for seed, run in done.baseline_runs.items()},
        {seed: run["metric"] for seed, run in done.tuned_runs.items()},
        margin=baseline.margin,
        higher_is_better=baseline.higher_is_better,
        more_baseline=[run["metric"] for run in baseline.runs],
        confidence=confidence_of(attempt),
    )


def _exactness_of(recipe: Recipe) -> Exactness:
    """The loosest class among the members: what the whole may promise."""
    return max((exactness_of(name) for name in recipe.methods), key=list(Exactness).index)


def _clock(study: Study, done: Confirmed, competent: Recipe, pace_seconds: float) -> None:
    """Times to the target: samples from the paired runs, seconds a sample from the interleaved comparison."""
    seeds = sorted(done.baseline_runs.keys() & done.tuned_runs.keys())
    done.samples = [_samples(done.baseline_runs[seed], done.tuned_runs[seed]) for seed in seeds]
    done.speedup, done.seconds["baseline"], done.seconds["tuned"] = time_to_target(done.pace, done.samples)
    done.over_competent, done.seconds["competent"] = done.speedup, done.seconds["baseline"]
    _check_by_stopwatch(done, seeds)
    if competent:
        pace = study.pace(competent, done.recipe, looks=PACE_LOOKS, seconds=pace_seconds, salt="confirmation", last=True)
        done.over_competent = None
        if "failed" not in pace:
            done.over_competent, done.seconds["competent"], _ = time_to_target(pace, done.samples)


def _check_by_stopwatch(done: Confirmed, seeds: list[int]) -> None:
    """Holds the model (start + samples x pace) against the seconds that the paired runs really took.

    Where the stopwatch saw clearly less, something is paid for inside a run that no block showed (a first pass
    that fills a cache, a late compilation): then the stopwatch is what is reported.
    """
    pairs = [(done.baseline_runs[seed]["seconds_to_target"], done.tuned_runs[seed]["seconds_to_target"]) for seed in seeds]
    logs = [math.log(before / after) for before, after in pairs if before]
    if len(logs) < 2:
        return
    seen, reach = fmean(logs), float(stdtrit(len(logs) - 1, 1 - ERROR / 2)) * stdev(logs) / math.sqrt(len(logs))
    done.stopwatch = Ratio(math.exp(seen), math.exp(seen - reach), math.exp(seen + reach))
    if done.stopwatch.median < AGREEMENT * done.speedup.median and done.stopwatch.high < done.speedup.median:
        done.why += f"; the blocks promised {done.speedup.median:.2f}x, the stopwatch saw less and is what counts"
        done.speedup = done.stopwatch


def _samples(original: dict, tuned: dict) -> tuple[int, int]:
    """Samples to the target of both arms; an original that never got there took at least all of its own.

    A run that crosses the target at its last look cannot show that it holds: then the original need not either.
    """
    last_look = tuned["samples_to_target"] == tuned["evaluations"][-1]["samples"]
    of_original = original["first_samples"] if last_look else original["samples_to_target"]
    return of_original or original["evaluations"][-1]["samples"], tuned["samples_to_target"]


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
