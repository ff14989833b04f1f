"""A search that continues (``--budget +10m``) first finishes what the earlier one left unproven."""

from collections.abc import Mapping
from typing import Any

from hasten.benchmarking.ratio import Ratio
from hasten.core.card import Exactness
from hasten.core.errors import RunError
from hasten.core.recipe import Recipe
from hasten.reporting.view_model import gain_of
from hasten.tuning.finding import ESTIMATED, EXACT, PRECISION, PROVEN, Finding
from hasten.tuning.result import SearchState
from hasten.tuning.study import Study
from hasten.tuning.systems import confirm_speed, loosest_exactness
from hasten.tuning.systems_stage import samples_of
from hasten.tuning.training_stage import prove


def earlier_findings(earlier: Mapping[str, Any]) -> list[Finding]:
    """What the ``earlier`` result is sure of: its answer cannot get lost."""
    rows = [
        row for row in earlier.get("frontier", ()) if row["recipe"] and row["evidence"] in (EXACT, PRECISION, PROVEN)
    ]
    return [
        Finding(
            Recipe(row["recipe"]),
            row["evidence"],
            Ratio(**row["speedup"]),
            row["why"],
            Ratio(**row["training_speedup"]) if row.get("training_speedup") else None,
            row["quality"],
        )
        for row in rows
    ]


def finish_earlier(
    study: Study,
    state: SearchState,
    plan: dict[str, Any],
    margin: float | None,
    earlier: Mapping[str, Any],
    has_training_stage: bool,
) -> None:
    """Confirms the recipes that the ``earlier`` result lists as estimated, the slowest first.

    Recipes that keep the training need a comparison only; the others are trained on the next seeds, as far as whole
    trainings fit into the budget that was added.
    """
    rows = [row for row in earlier.get("frontier", ()) if row["evidence"] == ESTIMATED and row["recipe"]]
    rows.sort(key=lambda row: gain_of(row)["median"] or 0.0)
    recipes = [Recipe(row["recipe"]) for row in rows]
    with study.budget.part(1.0):
        systems = [recipe for recipe in recipes if not _changes_training(recipe)]
        found = confirm_speed(study, systems, samples_of(plan), state.comparison_seconds) if systems else None
        state.findings += [found] if found else []
    others = [recipe for recipe in recipes if _changes_training(recipe)]
    if not others or not has_training_stage or state.run_seconds is None:
        return
    if 2 * state.run_seconds > study.budget.wall:
        return study.note(str(others[-1]), "confirmation", "not tried", "no whole training fits into what was added")
    try:
        with study.budget.part(1.0):
            prove(study, state, margin, others)
    except RunError as error:  # the task's own training failed; exact recipes need none
        study.note(str(others[-1]), "confirmation", "failed", str(error))


def _changes_training(recipe: Recipe) -> bool:
    return loosest_exactness(recipe) is Exactness.CHANGES_TRAINING
