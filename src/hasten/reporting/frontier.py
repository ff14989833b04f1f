"""The rows of the frontier and the evidence levels, as the terminal and the report show them."""

from hasten.core.recipe import Recipe
from hasten.reporting import formatting, view_model
from hasten.reporting.result_schema import EVIDENCE_LEVELS
from hasten.reporting.view_model import Json


def evidence_text(level: str) -> str:
    """An evidence level with its meaning: ``exact (bit-exact or the same formula, checked on this task)``."""
    return f"{level} ({EVIDENCE_LEVELS[level]})" if level in EVIDENCE_LEVELS else level


def frontier_rows(result: Json) -> list[Json]:
    """The recipes of the frontier, baseline and slowest first; those of an older result are made from its speed-ups.

    Returns:
        The keys of ``FrontierRecipe``; ``number`` counts from 1, ``change`` and ``change_interval`` are the quality as
        texts, ``height`` is its mean: 0 for the baseline and for exact recipes without a measurement, else None if it
        is unknown.
    """
    recipes = result["frontier"] or _frontier_of_older(result)
    known = [recipe for recipe in recipes if recipe["speedup"]["median"]]
    ordered = sorted(known, key=lambda recipe: (recipe["role"] != "baseline", recipe["speedup"]["median"]))
    return [recipe | _shown(recipe, result["metric"]["unit"]) | {"number": n} for n, recipe in enumerate(ordered, 1)]


def _shown(recipe: Json, unit: str) -> Json:
    quality, is_baseline = recipe["quality"], recipe["role"] == "baseline"
    is_unchanged = quality["mean"] is None and (is_baseline or recipe["evidence"] == "exact")
    change = formatting.metric(quality["mean"], unit, signed=True)
    text = recipe["text"] or str(Recipe(recipe["recipe"]))
    return {
        "text": "the task as it is" if is_baseline and not recipe["recipe"] else text,
        "change": "unchanged" if is_unchanged and not is_baseline else change,
        "change_interval": formatting.differences_between(quality["low"], quality["high"]),
        "height": 0.0 if is_unchanged else quality["mean"],
        "speedup": recipe["speedup"] | ({"low": None, "high": None} if is_baseline else {}),
    }


def _frontier_of_older(result: Json) -> list[Json]:
    if not view_model.is_recommended(result):
        return []
    speedup, over_strong = result["speedup"], result["speedup_over_strong_baseline"]["median"]
    none: Json = {"median": 1.0, "low": None, "high": None}
    unknown: Json = {"mean": None, "low": None, "high": None}

    def row(role: str, methods: Json, speedup: Json, evidence: str = "", quality: Json = unknown) -> Json:
        texts = {"text": "", "why": "", "to_prove": ""}
        return {"recipe": methods, "role": role, "speedup": speedup, "evidence": evidence, "quality": quality} | texts

    rows = [row("baseline", {}, none)]
    if over_strong and result["strong_baseline_recipe"]:
        strong = none | {"median": speedup["median"] / over_strong}
        rows.append(row("strong baseline", result["strong_baseline_recipe"], strong))
    return [*rows, row("recommended", result["recipe"], speedup, "proven", result["quality"]["difference"])]
