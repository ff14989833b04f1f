"""Leave-one-out ablation: the contribution of each member of a recipe, as the recipe without it against the recipe."""

import math
from contextlib import suppress
from statistics import fmean
from typing import Any

from hasten.benchmarking.measurement import NARROW
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.finding import surest
from hasten.tuning.study import EXACT_CLASSES, SHORT_COMPARISON_SECONDS, Study, changes_training, exactness_of
from hasten.tuning.systems import (
    LONGER,
    LONGER_COMPARISON,
    MIN_GAIN,
    Incumbents,
    may_be_settled_by_more,
    probably_faster,
    whole_run_ratio,
)
from hasten.tuning.time_to_target import Counts, samples_since_last_evaluation, time_to_target
from hasten.tuning.training import FEWER_SAMPLES, Baseline, length_option, seconds_of

MIN_SEEDS, LONGEST = 2, 3.0  # seeds that decide; a recipe without the member is stopped after so many times its seconds


def leave_one_out(study: Study, incumbents: Incumbents, samples: float, baseline: Baseline | None = None) -> list[dict]:
    """Pushes the best recipe without its methods of unproven contribution; returns ``contributions`` of the rest.

    The method of least contribution is removed first, and the others are measured again. A method stays if the recipe
    is surely faster with it, or ends better by the margin. Of an exact method, which costs no quality, it is enough
    that the recipe is probably faster with it: what that saves may be less than one comparison can prove. ``samples``:
    training samples of the task's own run; the runs of a recipe that changes the training show how many that recipe
    needs. ``baseline``: None if all methods are exact.
    """
    found: list[dict] = []
    while len(incumbents.best.methods) > 1 and (measured := contributions(study, incumbents.best, samples, baseline)):
        found = measured
        unproven = [row for row in found if _is_unproven(row["speedup"], exactness_of(row["method"]) in EXACT_CLASSES)]
        unproven = [row for row in unproven if not _ends_better(study, incumbents.best, row["method"], baseline)]
        if not unproven:
            break
        worst = min(unproven, key=lambda row: row["speedup"]["median"])
        share = worst["speedup"]
        why = f"no proven share: with it {share['median']:.3f}x ({share['low']:.2f} to {share['high']:.2f})"
        study.note(worst["method"], "composition", "left out", why, ratio=share)
        incumbents.push(incumbents.best.drop(worst["method"]))
    return [row for row in found if row["method"] in incumbents.best.methods]


def _is_unproven(share: dict[str, Any], is_exact: bool) -> bool:
    """Whether the speed-up ``share`` (median, low, high) of a method is too uncertain to justify it.

    False without an interval, as after a single timed run. With ``is_exact`` a likely gain is enough: one of a narrow
    interval, or one that the method has with a certainty of 90 % or more.
    """
    if share["low"] is None or share["low"] > 1:
        return False
    is_narrow = share["high"] / share["low"] <= NARROW and share["median"] >= MIN_GAIN
    return not (is_exact and (is_narrow or probably_faster(share)))


def contributions(study: Study, recipe: Recipe, samples: float, baseline: Baseline | None = None) -> list[dict]:
    """``[{"method", "speedup": {"median", "low", "high"}}]``: the recipe over the recipe without the method.

    Of as many of the recipe's methods as can be measured before the budget ends.
    """
    rows = []
    with suppress(OutOfBudgetError):
        for name in recipe.methods:
            if speedup := _contribution(study, recipe, name, samples, baseline):
                rows.append({"method": name, "speedup": speedup})
    return rows


def _contribution(study: Study, recipe: Recipe, name: str, samples: float, baseline: Baseline | None) -> Any:
    """``{"median", "low", "high"}``: speed-up of the recipe over the recipe without ``name``; None if it is unknown.

    Of the whole training; or, if that is surer, to the target, where ``name`` changes the training but not the number
    of its samples. ``low`` and ``high`` are None where fewer than MIN_SEEDS seeds were run.
    """
    without = recipe.drop(name)
    counts, equal_samples = Counts([], []), None
    if exactness_of(name) is Exactness.CHANGES_TRAINING:
        counts, equal_samples = _samples_on_seeds(study, recipe, without, baseline)
        if not counts.tuned:
            return None
    elif changes_training(recipe):
        run = study.known_run(recipe, study.seed)
        samples = run.get("samples_to_target") or run.get("samples") or samples
    outcome = study.compare_speed(without, recipe)
    if may_be_settled_by_more(study, outcome, LONGER * SHORT_COMPARISON_SECONDS):
        outcome = study.compare_speed(without, recipe, seconds=LONGER * SHORT_COMPARISON_SECONDS, **LONGER_COMPARISON)
    if "failed" in outcome:
        return None
    if not counts.tuned:
        return whole_run_ratio(outcome, samples).to_json()
    ratio = time_to_target(outcome, counts)[0]
    if equal_samples:  # then the whole training is faster by the pace of its steps, wherever the target is reached
        ratio = surest(ratio, whole_run_ratio(outcome, equal_samples))
    has_interval = len(counts.tuned) >= MIN_SEEDS
    return ratio.to_json() if has_interval else {"median": ratio.median, "low": None, "high": None}


def _samples_on_seeds(
    study: Study, recipe: Recipe, without: Recipe, baseline: Baseline | None
) -> tuple[Counts, float | None]:
    """(training samples without the method (``baseline``) and with it (``tuned``), a row per seed; mean of whole runs).

    Of a method that only sets the length, the samples without it are those of the task's own training, which is not
    repeated. The rows count samples to the target if both recipes train equally many in all (within 1 %), or if the run
    without the method was stopped: after LONGEST times the seconds of the other one. Else they count the whole runs.
    The second result is None unless both train equally many on every seed.
    """
    counts, equal, seeds = Counts([], []), list[float](), baseline.search_seeds if baseline else [study.seed]
    (name,) = recipe.methods.keys() - without.methods.keys()
    if baseline and length_option(name) and "failed" not in (full := study.known_run(recipe, seeds[0])):
        whole, shorter = baseline.runs[0]["samples"], full["samples"]
        return Counts([(whole, 0)] * MIN_SEEDS, [(shorter, 0)] * MIN_SEEDS), None
    for seed in seeds:
        try:
            full = study.run(recipe, seed)
            if "failed" in full:
                break
            reduced = study.run(without, seed, time_limit=round(LONGEST * seconds_of(full), 2))
        except OutOfBudgetError:
            break
        if "failed" in reduced or not reduced["evaluations"]:  # stopped before its first evaluation
            break
        as_many = FEWER_SAMPLES < full["samples"] / reduced["samples"] < 1 / FEWER_SAMPLES
        equal += [full["samples"]] if as_many and not reduced["pruned"] else []
        if reduced["pruned"] or as_many:
            if full["samples_to_target"] is None:
                break
            end = reduced.get("samples_to_target") or reduced["evaluations"][-1]["samples"]
            ends = end, full["samples_to_target"]
            rows = [(at, samples_since_last_evaluation(run, at)) for run, at in zip((reduced, full), ends, strict=True)]
        else:
            rows = [(run["samples"], 0) for run in (reduced, full)]
        for arm, row in zip((counts.baseline, counts.tuned), rows, strict=True):
            arm.append(row)
    return counts, fmean(equal) if equal and len(equal) == len(counts.tuned) else None


def _ends_better(study: Study, recipe: Recipe, name: str, baseline: Baseline | None) -> bool:
    """Whether the final metric, a mean over the search's seeds, is better by the margin with ``name`` than without it.

    False for a method that does not change the training; True if the budget ends before the answer is known.
    """
    if baseline is None or exactness_of(name) is not Exactness.CHANGES_TRAINING:
        return False
    with suppress(OutOfBudgetError):
        arms = [[study.run(each, seed) for seed in baseline.search_seeds] for each in (recipe, recipe.drop(name))]
        full, reduced = (fmean(run.get("metric", math.nan) for run in runs) for runs in arms)
        return (full - reduced if baseline.higher_is_better else reduced - full) >= baseline.margin
    return True  # unknown
