"""Recipes that made similar tasks faster before: the first candidates of a search.

``experience.toml`` holds them by facts of the task. ``benchmarks/make_experience.py`` writes it from the records.
"""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hasten.core.card import FACTS
from hasten.core.recipe import Recipe
from hasten.engine.registry import DISTRIBUTED, cards_that_state, method_class
from hasten.tuning.study import EXACT_CLASSES, exactness_of

TABLE = Path(__file__).with_name("experience.toml")
LARGE_SHARE = 0.15  # of the time of a step, from which a phase counts as large
LARGE_PHASES = {"input": "large_input_share", "optimizer_step": "large_optimizer_share"}  # the latter: short steps
COMPARED = ("cpu", "cuda", DISTRIBUTED, "convolutions", "repeated_blocks", "indexed_samples", *LARGE_PHASES.values())


def compositions(facts: Iterable[str], phases: Mapping[str, float], device: str) -> list[Recipe]:
    """Recipes that made similar tasks faster, most similar task first; between equally similar ones the faster first.

    Only recipes of methods that apply to the task, none twice. ``facts`` are keys of ``hasten.core.card.FACTS``,
    ``phases`` maps a phase to its share of the step (0 to 1), as ``diagnose`` measures it, and may be empty.
    """
    holds = frozenset(facts) | {device.partition(":")[0]}
    words = compared_words(holds, phases)
    rows = [row for row in _rows() if (DISTRIBUTED in row["facts"]) == (DISTRIBUTED in words)]
    rows.sort(key=lambda row: (len(words ^ frozenset(row["facts"])), -row["speedup"]))
    return distinct(_applicable(Recipe.parse(row["recipe"]), holds) for row in rows)


def distinct(recipes: Iterable[Recipe]) -> list[Recipe]:
    """The recipes that have methods, none twice."""
    found: list[Recipe] = []
    for recipe in recipes:
        found += [recipe] if recipe and recipe not in found else []
    return found


def gpu_compositions(facts: Iterable[str]) -> list[Recipe]:
    """Recipes of the methods that gain more together than separately on an NVIDIA GPU; [] where the run is not on one.

    First all of these methods, then those that need no recorded step (CUDA graph), since not every step can be
    recorded. In the float32 of most tasks fused kernels and CUDA graphs gain little: the matrix products take the time.
    In bfloat16 the products are short, and launching kernels takes it.
    """
    cards = cards_that_state("on_gpu") if "cuda" in facts else {}
    together = {name: card for name, card in cards.items() if card.on_gpu.get("composition")}
    eager = {name: card for name, card in together.items() if "python_between_kernels" not in card.invalidates}
    recipes = (_applicable(Recipe({name: {} for name in chosen}), frozenset(facts)) for chosen in (together, eager))
    return [recipe for recipe in recipes if recipe]


def is_exact(recipe: Recipe) -> bool:
    """Whether every method of the recipe is bit-exact or computes the same formula."""
    return exact_part(recipe) == recipe


def exact_part(recipe: Recipe) -> Recipe:
    """The recipe without the methods that change the numbers more than by rounding."""
    return recipe.drop(*(name for name in recipe.methods if exactness_of(name) not in EXACT_CLASSES))


def compared_words(facts: Iterable[str], phases: Mapping[str, float]) -> frozenset[str]:
    """What two tasks are compared by: the facts among COMPARED, and the phases that take a large part of the step."""
    large = {word for phase, word in LARGE_PHASES.items() if (phases.get(phase) or 0.0) >= LARGE_SHARE}
    return frozenset(facts) & frozenset(COMPARED) | large


def _applicable(recipe: Recipe, facts: frozenset[str]) -> Recipe:
    """The recipe without methods whose card asks for facts that do not hold."""
    return recipe.drop(*(name for name in recipe.methods if method_class(name).card.applies_to & FACTS.keys() - facts))


@cache
def _rows() -> list[Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))["composition"]
