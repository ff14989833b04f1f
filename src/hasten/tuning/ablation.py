"""What each member of a recipe gives: the recipe without it, against the whole."""

from __future__ import annotations

from contextlib import suppress

from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.tuning.search import Incumbents, gain_of_a_run
from hasten.tuning.study import OutOfBudget, Study, exactness_of

NOTHING = 1.01  # a member whose share is below this leaves


def leave_one_out(study: Study, ladder: Incumbents) -> list[dict]:
    """[{method, speedup}] of the best recipe; members that give nothing leave it first, one at a time."""
    shares: list[dict] = []
    while len(ladder.best.methods) > 1 and (measured := contributions(study, ladder.best)):
        shares = measured
        idle = [share for share in shares if _gives_nothing(share)]
        if not idle:
            break
        worst = min(idle, key=lambda share: share["speedup"]["median"])
        why = f"without it the recipe is as fast ({worst['speedup']['median']:.3f}x)"
        study.note(worst["method"], "composition", "left out", why, ratio=worst["speedup"])
        ladder.push(ladder.best.drop(worst["method"]))
    return [share for share in shares if share["method"] in ladder.best.methods]


def _gives_nothing(share: dict) -> bool:
    """Whether a member may leave: by its pace. One run by the stopwatch tells nothing, and is only taken of what trains better."""
    return share["speedup"]["low"] is not None and share["speedup"]["median"] < NOTHING


def contributions(study: Study, recipe: Recipe) -> list[dict]:
    """[{method, speedup}] of the members whose share can be told before the budget ends."""
    shares = []
    with suppress(OutOfBudget):
        for name in recipe.methods:
            if share := _share(study, recipe, name):
                shares.append(share)
    return shares


def _share(study: Study, recipe: Recipe, name: str) -> dict | None:
    without, samples_without = recipe.drop(name), None
    if exactness_of(name) is Exactness.CHANGES_TRAINING:
        whole, part = study.run(recipe, study.seed), study.run(without, study.seed)
        times = [run.get("seconds_to_target") for run in (part, whole)]
        if None in times:
            return None
        if _trains_better(study, whole, part):
            return {"method": name, "speedup": {"median": times[0] / times[1], "low": None, "high": None}}
        samples_without = part["samples_to_target"]
    outcome = study.compare_speed(without, recipe)
    if "failed" in outcome:
        return None
    samples = study.run(recipe, study.seed).get("samples_to_target")
    scale = gain_of_a_run(outcome, samples, samples_without) / outcome["ratio"]["median"] if samples else 1.0
    return {"method": name, "speedup": {key: value * scale for key, value in outcome["ratio"].items()}}


def _trains_better(study: Study, whole: dict, part: dict) -> bool:
    """Whether the whole recipe is there after fewer samples or ends better; else all it can be is faster, as with DiLoCo."""
    better = whole["metric"] > part["metric"] if study.higher_is_better else whole["metric"] < part["metric"]
    return better or whole["samples_to_target"] < part["samples_to_target"]
