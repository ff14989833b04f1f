"""The rows of the frontier and the evidence levels, as the terminal and the report show them."""

from hasten.core.recipe import Recipe
from hasten.reporting import formatting
from hasten.reporting.result_parts import EVIDENCE_LEVELS
from hasten.reporting.view_model import Json, gain_of


def evidence_text(level: str) -> str:
    """An evidence level with its meaning: ``exact (bit-exact or the same formula, checked on this task)``."""
    return f"{level} ({EVIDENCE_LEVELS[level]})" if level in EVIDENCE_LEVELS else level


def frontier_rows(result: Json) -> list[Json]:
    """The recipes of the frontier, baseline and slowest first.

    Returns:
        The keys of ``FrontierRecipe``, with the gain as ``speedup``; ``number`` counts from 1, ``change`` and
        ``change_interval`` are the quality as texts, ``height`` is its mean: 0 for the baseline and for exact recipes
        without a measurement, else None if it is unknown.
    """
    known = [recipe | {"speedup": gain_of(recipe)} for recipe in result["frontier"] if recipe["speedup"]["median"]]
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
