"""The largest batch that only a saving of memory makes possible, as one composition with what saves it.

Methods that save memory make a step slower, and a batch that does not fit fails: each alone is refused. Together they
may be faster than the task. How large the batch may be follows from the memory of a few steps.
"""

import math
from collections.abc import Iterable, Sequence

from hasten.core.card import FACTS, Exactness
from hasten.core.recipe import Recipe
from hasten.engine.effects import NO_EFFECT
from hasten.engine.memory import MemoryPeak, largest_batch
from hasten.engine.registry import cards_that_state
from hasten.tuning.experience import distinct
from hasten.tuning.study import Study
from hasten.tuning.systems import Candidate, merge
from hasten.utils.search_range import SearchRange


def largest_batch_compositions(
    study: Study, base: Recipe, items: Iterable[Candidate], facts: frozenset[str], samples: float
) -> list[Recipe]:
    """Recipes of a larger batch and methods that save memory, to try on top of ``base``; [] on the CPU.

    ``base`` trains with the task's own batch size. ``items`` are the candidates of the search, ``samples`` the number
    of training samples in an epoch.
    """
    larger, savers = next((item for item in items if item.card.ceiling == "larger_batch"), None), memory_savers(facts)
    if larger is None or not savers or "cuda" not in facts:
        return []
    savers, with_savers = _with_effect(study, base, savers)
    plans = study.memory_plan(base), with_savers
    if any("failed" in plan for plan in plans):
        return []
    factors = [fitting_factor(plan["batch_size"], plan["peak_memory"], samples) for plan in plans]
    return larger_batch_recipes(larger, savers, *factors)


def _with_effect(study: Study, base: Recipe, savers: Recipe) -> tuple[Recipe, dict]:
    """(the savers without those that have no effect here, ``Study.memory_plan`` of ``base`` with these savers)."""
    plan = study.memory_plan(merge(base, savers))
    without_effect = [name for name in savers.methods if f"{name} {NO_EFFECT}" in plan.get("failed", "")]
    return _with_effect(study, base, savers.drop(*without_effect)) if without_effect else (savers, plan)


def memory_savers(facts: frozenset[str]) -> Recipe:
    """A recipe of all bit-exact methods whose cards name them a remedy for "out_of_memory" (with the options given
    there) and that apply to a run with these facts.
    """
    cards = cards_that_state("remedy_for")
    return Recipe(
        {
            name: dict(card.remedy_for["out_of_memory"])
            for name, card in cards.items()
            if "out_of_memory" in card.remedy_for
            and card.exactness is Exactness.BIT_EXACT
            and not card.applies_to & FACTS.keys() - facts
        }
    )


def fitting_factor(batch_size: int, peaks: Sequence[MemoryPeak], samples: float) -> int:
    """The largest power of two by which the batch can be multiplied: it fits into memory, and the data fill it.

    ``batch_size`` and ``peaks`` (of each rank) are those of the run that was measured; on the CPU, where nothing is
    known, the factor is 1. ``samples`` are those of an epoch; infinite if unknown.
    """
    largest = min(largest_batch(batch_size, peaks) or batch_size, samples)
    return 2 ** int(math.log2(max(1.0, largest / batch_size)))


def larger_batch_recipes(larger: Candidate, savers: Recipe, without: int, with_savers: int) -> list[Recipe]:
    """The savers with a batch ``with_savers`` times the task's, a recipe for each way to scale the learning rate.

    [] if a batch of the same factor fits into memory ``without`` the savers: then larger batches are tried by
    themselves.
    """
    if with_savers <= without:
        return []
    ranges = larger.card.search_space.items()
    factor = next(name for name, value in ranges if isinstance(value, SearchRange) and value.powers_of_two)
    return distinct(savers.with_method(larger.name, **{**preset, factor: with_savers}) for preset in larger.presets)
