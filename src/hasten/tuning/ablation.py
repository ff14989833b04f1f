"""Leave-one-out ablation: the contribution of each member of a recipe, as the recipe without it against the recipe."""

from contextlib import suppress

from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.study import Study, exactness_of
from hasten.tuning.systems import Incumbents, run_speedup

MIN_CONTRIBUTION = 1.01  # a member with a lower speed-up leaves the recipe


def leave_one_out(study: Study, incumbents: Incumbents, samples: float) -> list[dict]:
    """Removes members without a contribution from the best recipe, one at a time: [{method, speedup}] of the rest.

    ``samples`` are those that a recipe trains which needs as many as the task; of others, runs show how many.
    """
    found: list[dict] = []
    while len(incumbents.best.methods) > 1 and (measured := contributions(study, incumbents.best, samples)):
        found = measured
        # a single timed run has no interval, and is not enough to decide
        useless = [row for row in found if row["speedup"]["low"] and row["speedup"]["median"] < MIN_CONTRIBUTION]
        if not useless:
            break
        worst = min(useless, key=lambda row: row["speedup"]["median"])
        why = f"without it the recipe is as fast ({worst['speedup']['median']:.3f}x)"
        study.note(worst["method"], "composition", "left out", why, ratio=worst["speedup"])
        incumbents.push(incumbents.best.drop(worst["method"]))
    return [row for row in found if row["method"] in incumbents.best.methods]


def contributions(study: Study, recipe: Recipe, samples: float) -> list[dict]:
    """``[{method, speedup}]`` of the recipe's methods, as many as can be measured before the budget ends."""
    rows = []
    with suppress(OutOfBudgetError):
        for name in recipe.methods:
            if speedup := _contribution(study, recipe, name, samples):
                rows.append({"method": name, "speedup": speedup})
    return rows


def _contribution(study: Study, recipe: Recipe, name: str, samples: float) -> dict | None:
    """Speed-up of the recipe to the target over the recipe without ``name``; None if it cannot be measured."""
    without, samples_without = recipe.drop(name), None
    if exactness_of(name) is Exactness.CHANGES_TRAINING:
        full, reduced = study.run(recipe, study.seed), study.run(without, study.seed)
        seconds, seconds_without = full.get("seconds_to_target"), reduced.get("seconds_to_target")
        if seconds is None or seconds_without is None:
            return None
        if _trains_better(study, full, reduced):
            return {"median": seconds_without / seconds, "low": None, "high": None}
        samples_without = reduced["samples_to_target"]
    outcome = study.compare_speed(without, recipe)
    if "failed" in outcome:
        return None
    if any(exactness_of(member) is Exactness.CHANGES_TRAINING for member in recipe.methods):
        samples = study.run(recipe, study.seed).get("samples_to_target") or samples
    scale = run_speedup(outcome, samples, samples_without) / outcome["ratio"]["median"]
    return {key: value * scale for key, value in outcome["ratio"].items()}


def _trains_better(study: Study, full: dict, reduced: dict) -> bool:
    """Whether the run ``full`` needs fewer samples to the target than ``reduced``, or ends with a better metric."""
    better = full["metric"] > reduced["metric"] if study.higher_is_better else full["metric"] < reduced["metric"]
    return better or full["samples_to_target"] < reduced["samples_to_target"]
