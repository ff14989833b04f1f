"""Looks for the fastest recipe: greedily, cheapest proofs first, every step measured against the best so far.

First what leaves the numbers alone (judged by pace, proven by running), then fewer bits, then other
mathematics (judged by time to the target on the search's seeds). Nothing found here is reported as a gain: the
confirmation measures the winner anew, on seeds that the search has not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, stdev

from hasten.benchmarking.ratio import FASTER, SAME, UNSURE
from hasten.core.card import Card, Exactness
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.registry import make_methods, method_class
from hasten.tuning.study import Study

EXACT = (Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH)
WORTH_IT = 1.02  # a time to the target that is not 2 % better is no better
PROMISING, LONGER = (
    1.05,
    3,
)  # times faster in the middle, but not for sure: then it is compared once more, for so many times as long
AS_MANY = 0.99  # of the samples: then only the pace can make it faster, and the stopwatch of single runs is too noisy for that
AS_SOON = (
    0.95  # of the time: then a clearly better end is worth more, since the confirmation has to find the recipe as good
)
SYSTEMS_LOSSES, TRAINING_LOSSES = 2, 3  # settings grow bolder; so many in a row that lost say enough
AFFORDABLE = 0.15  # of what is left, for the further seeds of a recipe that the first seed speaks for
ENOUGH_LOOKS = 3  # that see the same, for two runs to be the same and not alike by chance
NOTHING_TO_DO = "has nothing to act on"


@dataclass(frozen=True)
class Candidate:
    """A method with the settings worth trying, mildest first, and the most it could give."""

    name: str
    card: Card
    presets: tuple[dict, ...]
    bound: float | None = None
    offered: bool = False  # by the user, from outside: its card is a claim, so its proof comes first


@dataclass
class Baseline:
    """What the task's own training does, over the search's seeds."""

    seeds: list[int]
    runs: list[dict]
    target: float
    margin: float
    higher_is_better: bool

    @property
    def metric(self) -> float:
        return fmean(run["metric"] for run in self.runs)

    def samples_to_target(self) -> float:
        """The middle seed's."""
        known = sorted(run["samples_to_target"] or run["samples"] for run in self.runs)
        return known[len(known) // 2]

    def as_good(self, metrics: list[float]) -> bool:
        """Good enough to go on with, given what so few seeds can tell; the gate will judge with more."""
        worse = self.metric - fmean(metrics) if self.higher_is_better else fmean(metrics) - self.metric
        doubt = stdev(run["metric"] for run in self.runs) / math.sqrt(len(metrics))
        return worse <= self.margin + doubt


@dataclass
class Incumbents:
    """The recipes found, each faster than the one before, or as fast and better; the confirmation climbs down if the top does not hold."""

    recipes: list[Recipe] = field(default_factory=lambda: [Recipe()])

    @property
    def best(self) -> Recipe:
        return self.recipes[-1]

    def push(self, recipe: Recipe) -> None:
        self.recipes.append(recipe)


def conflict_reason(recipe: Recipe) -> str | None:
    """Why the methods of a recipe cannot go together, or None."""
    try:
        check_conflicts(sort_methods(make_methods(recipe)))
    except ConfigurationError as refusal:
        return str(refusal)
    return None


def search_systems(
    study: Study, ladder: Incumbents, candidates: list[Candidate], samples: float, seconds: float
) -> None:
    """Methods that only change how fast the same steps go: kept when surely faster, worth their start, and proven.

    Args:
        samples: that a run sees until its target; what a method's start costs is spread over them.
        seconds: for each comparison.
    """
    for candidate in candidates:
        base, best = ladder.best, None
        losses = 0
        try:
            for settings in candidate.presets:
                found = _tried(study, base, candidate, settings, samples, seconds)
                if found and (best is None or found[1] > best[1]):
                    best, losses = found, 0
                elif (losses := losses + 1) == SYSTEMS_LOSSES:
                    break
        finally:
            if best:
                ladder.push(best[0])


def _tried(
    study: Study, base: Recipe, candidate: Candidate, settings: dict, samples: float, seconds: float
) -> tuple[Recipe, float] | None:
    """(recipe, gain) if the candidate is kept; the trial is noted either way."""
    stage = "precision" if candidate.card.exactness is Exactness.REDUCED_PRECISION else "systems"
    text = str(Recipe({candidate.name: settings}))
    recipe = in_place(base, candidate.name, settings)
    spent, ratio = 0.0, None

    def note(verdict: str, why: str) -> None:
        study.note(text, stage, verdict, why, ratio=ratio, seconds=spent)

    if isinstance(recipe, str):
        return note("not tried", recipe)
    if candidate.offered:  # its card is a claim: the proof comes first
        proof = study.proof(base, recipe, candidate.card.exactness)
        spent += proof["trial_seconds"]
        if not proof.get("passed"):
            return note(*_unproven(proof))
    outcome = study.compare_speed(base, recipe, seconds=seconds)
    spent += outcome["trial_seconds"]
    if outcome.get("verdict") == UNSURE and outcome["ratio"]["median"] > PROMISING:
        outcome = study.compare_speed(base, recipe, seconds=LONGER * seconds, salt="longer")
        spent += outcome["trial_seconds"]
    if "failed" in outcome:
        return note("no effect" if NOTHING_TO_DO in outcome["failed"] else "failed", outcome["failed"])
    ratio = outcome["ratio"]
    if outcome["verdict"] != FASTER:
        return note("no gain" if outcome["verdict"] == SAME else outcome["verdict"], outcome["why"])
    gain = gain_of_a_run(outcome, samples)
    if gain < WORTH_IT:
        start = outcome["start_seconds"]
        return note(
            "no gain",
            f"its start takes {start['b'] - start['a']:.1f} s, which a run does not earn back ({gain:.2f}x in all)",
        )
    proof = study.proof(base, recipe, candidate.card.exactness)
    spent += 0.0 if candidate.offered else proof["trial_seconds"]
    if not proof.get("passed"):
        return note(*_unproven(proof))
    note("kept", f"{outcome['why']}; {proof['why']}")
    return recipe, gain


def _unproven(proof: dict) -> tuple[str, str]:
    """(verdict, why) of a proof that has not passed, or has come to no end."""
    return ("failed", proof["failed"]) if "failed" in proof else ("refused", proof["why"])


def gain_of_a_run(outcome: dict, samples: float, samples_of_a: float | None = None) -> float:
    """How much shorter a whole run gets: the pace over so many samples, of a over others where they are given, and what starting costs."""
    pace, start = outcome["seconds_per_1000_samples"], outcome["start_seconds"]
    a = start["a"] + (samples if samples_of_a is None else samples_of_a) / 1000 * pace["a"]
    return a / (start["b"] + samples / 1000 * pace["a"] / outcome["ratio"]["median"])


def in_place(base: Recipe, name: str, settings: dict) -> Recipe | str:
    """The recipe with a method more, in the place of one that it cannot go with; or why there is no such recipe."""
    whole = base.with_method(name, **settings)
    if (conflict := conflict_reason(whole)) is None:
        return whole
    return next(
        (instead for member in base.methods if conflict_reason(instead := whole.drop(member)) is None), conflict
    )


def search_training(study: Study, ladder: Incumbents, candidates: list[Candidate], baseline: Baseline) -> None:
    """Methods that change the training: kept when they reach the target sooner and end as well, on the seeds of the search."""
    best = Outcome("kept", "", (study.run(ladder.best, baseline.seeds[0]),))
    for candidate in candidates:
        base, losses, has_effect, seen = ladder.best, 0, False, []
        for settings in candidate.presets:
            recipe = in_place(base, candidate.name, settings)
            text = str(Recipe({candidate.name: settings}))
            if isinstance(recipe, str):
                study.note(text, "training", "not tried", recipe)
                continue
            if not has_effect:
                proof = study.proof(base, recipe, candidate.card.exactness)
                if not proof.get("passed"):
                    study.note(text, "training", *_unproven(proof), seconds=proof["trial_seconds"])
                    break
                has_effect = True
            outcome = _trained(study, recipe, best, baseline, seen)
            if outcome.verdict == "kept" and not outcome.needs_fewer(best) and not outcome.ends_better(best, baseline):
                outcome = _by_pace(study, ladder.best, recipe, outcome)
            gain = outcome.gain_over(best)
            ratio = {"median": gain, "low": None, "high": None} if gain else None
            study.note(text, "training", outcome.verdict, outcome.why, ratio=ratio, seconds=outcome.spent)
            if outcome.verdict == "kept":
                ladder.push(recipe)
                best, losses = outcome.after(best), 0
            elif (losses := losses + 1) == TRAINING_LOSSES:
                break


@dataclass(frozen=True)
class Outcome:
    """What became of a recipe on the search's seeds, the first of them first."""

    verdict: str
    why: str
    runs: tuple[dict, ...]
    soonest: Outcome | None = None  # one kept earlier that was there sooner, and ended worse

    @property
    def spent(self) -> float:
        return sum(run["trial_seconds"] for run in self.runs)

    def to_target(self, what: str, seeds: int | None = None) -> float | None:
        """The "seconds" or the "samples", the mean of so many seeds; None where one of them never got there."""
        values = [run.get(f"{what}_to_target") for run in self.runs[:seeds]]
        return None if None in values else fmean(values)

    def gain_over(self, best: Outcome) -> float | None:
        """How many times sooner it was there, by the stopwatch, on the seeds that both were run on."""
        seconds, to_beat = self.to_target("seconds", len(best.runs)), best.to_target("seconds", len(self.runs))
        return to_beat / seconds if seconds and to_beat else None

    def needs_fewer(self, best: Outcome) -> bool:
        """Whether it took fewer samples to get there, on the seeds that both were run on."""
        most = best.to_target("samples", len(self.runs))
        return most is None or self.to_target("samples", len(best.runs)) < AS_MANY * most

    def ends_better(self, best: Outcome, baseline: Baseline) -> bool:
        """Whether it is there nearly as soon as any was, and ends surely better by a margin, on the seeds that both were run on."""
        both, gain = min(len(self.runs), len(best.runs)), self.gain_over(best.soonest or best)
        ends, to_beat = (fmean(run["metric"] for run in each.runs[:both]) for each in (self, best))
        better = ends - to_beat if baseline.higher_is_better else to_beat - ends
        doubt = stdev(run["metric"] for run in baseline.runs) * math.sqrt(2 / both)
        return gain is not None and gain >= AS_SOON and better >= baseline.margin + doubt > 0

    def after(self, best: Outcome) -> Outcome:
        """The same, now the best; remembers who was there sooner, so that many that are nearly as soon do not add up."""
        soonest = best.soonest or best
        return self if (self.gain_over(soonest) or 1.0) >= 1.0 else replace(self, soonest=soonest)

    @staticmethod
    def of(runs: list[dict], baseline: Baseline, best: Outcome) -> Outcome:
        """Judges runs, the last of which is the newest; the earlier ones have been found good enough."""
        run, told = runs[-1], partial(Outcome, runs=tuple(runs))
        if "failed" in run:
            return told("no effect" if NOTHING_TO_DO in run["failed"] else "failed", run["failed"])
        if run["gave_up"]:
            return told(
                "no gain",
                f"had not reached the target after {best.to_target('seconds', 1) / AS_SOON:.1f} s, so it could no longer win",
            )
        if run["seconds_to_target"] is None:
            return told("refused", f"never reached the target {baseline.target:g}: it ended at {run['metric']:.4g}")
        metric, outcome = fmean(each["metric"] for each in runs), told("kept", "")
        if not baseline.as_good([each["metric"] for each in runs]):
            why = f"ended at {metric:.4g}; the original ends at {baseline.metric:.4g}, and the margin is {baseline.margin:.3g}"
            return told("refused", why)
        if (
            (gain := outcome.gain_over(best)) is not None
            and gain < WORTH_IT
            and not outcome.ends_better(best, baseline)
        ):
            seconds = outcome.to_target("seconds", len(best.runs))
            return told(
                "no gain", f"reached the target in {seconds:.2f} s; the best so far takes {gain * seconds:.2f} s"
            )
        return told(
            "kept",
            f"reached the target in {outcome.to_target('seconds'):.2f} s and ended at {metric:.4g}, over {len(runs)} seeds",
        )


def _trained(study: Study, recipe: Recipe, best: Outcome, baseline: Baseline, seen: list) -> Outcome:
    """One seed after the other, as long as the recipe can still be kept and more seeds can be afforded.

    ``seen``: what the looks of the other settings saw on the first seed; this one's are added. A setting may change nothing in a
    run of this length, and the stopwatch alone shall not choose between two that are the same.
    """
    runs, to_beat = [], best.to_target("seconds", 1)
    chance = to_beat and round(to_beat / AS_SOON, 2)
    for seed in baseline.seeds:
        runs.append(study.run(recipe, seed, give_up_after=None if runs else chance))
        looks = [(look["samples"], look["metric"]) for look in runs[0].get("evaluations", ())]
        if len(runs) == 1 and len(looks) >= ENOUGH_LOOKS:
            if looks in seen:
                return Outcome("no gain", "trains exactly as a setting that was tried before", tuple(runs))
            seen.append(looks)
        outcome = Outcome.of(runs, baseline, best)
        more = (len(baseline.seeds) - 1) * runs[0]["trial_seconds"]
        if outcome.verdict != "kept" or more > AFFORDABLE * study.budget.left():
            break
    return outcome


def _by_pace(study: Study, best: Recipe, recipe: Recipe, outcome: Outcome) -> Outcome:
    """The same outcome, or none: it takes as many samples to the target as the best so far, so its pace has to be surely faster."""
    pace = study.compare_speed(best, recipe)
    if pace.get("verdict") == FASTER:
        return outcome
    told = pace.get("why") or pace["failed"]
    return replace(
        outcome,
        verdict="no gain",
        why=f"takes as many samples to the target as the best so far, and a step is not faster: {told}",
    )


def candidate(name: str, bound: float | None = None, settings: dict | None = None, offered: bool = False) -> Candidate:
    """A candidate from its card; settings that the user gave are the only ones tried."""
    card = method_class(name).card
    return Candidate(name, card, (settings,) if settings else card.presets, bound, offered)
