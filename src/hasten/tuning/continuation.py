"""A search that continues (``--budget +10m``) first finishes what the earlier one left unproven."""

from collections.abc import Mapping
from typing import Any

from hasten.benchmarking.ratio import Ratio
from hasten.core.errors import RunError
from hasten.core.recipe import Recipe
from hasten.reporting.view_model import gain_of
from hasten.tuning.finding import CONTINUED_SHARE, ESTIMATED, EXACT, PRECISION, PROVEN, Finding
from hasten.tuning.result import SearchState
from hasten.tuning.study import Study, changes_training
from hasten.tuning.systems import confirm_speed
from hasten.tuning.training_stage import prove

OF_WINNER = (  # keys of the result that only a confirmation sets
    *("speedup_over_strong_baseline", "measured_speedup", "time_to_target", "samples_compared", "samples_to_target"),
    *("seconds_to_target", "curves", "quality", "training_seconds", "training_measured", "contributions", "margin_why"),
    *("start_seconds", "step_profile", "effects", "peak_memory_bytes", "metric"),
)


def earlier_findings(earlier: Mapping[str, Any]) -> list[Finding]:
    """The frontier of the ``earlier`` result.json without the baselines, so that its answer cannot get lost."""
    levels = (EXACT, PRECISION, PROVEN, ESTIMATED)
    rows = [row for row in earlier.get("frontier", ()) if row["recipe"] and row["evidence"] in levels]
    return [
        Finding(
            Recipe(row["recipe"]),
            row["evidence"],
            Ratio(**row["speedup"]),
            row["why"],
            Ratio(**row["training_speedup"]) if row.get("training_speedup") else None,
            row["quality"],
            to_prove=row.get("to_prove", ""),
        )
        for row in rows
    ]


def keep_measured(result: Any, earlier: Mapping[str, Any]) -> None:
    """Copies the keys OF_WINNER from the ``earlier`` result into ``result``, if this search did not measure them again.

    Only where both recommend the same recipe, proven.
    """
    is_same = result["recipe"] == earlier.get("recipe") and result["evidence"] == earlier.get("evidence") == PROVEN
    if is_same and result["time_to_target"] is None:
        result |= {key: earlier[key] for key in OF_WINNER if key in earlier}


def finish_earlier(study: Study, state: SearchState, earlier: Mapping[str, Any], has_training_stage: bool) -> None:
    """Confirms the recipes that the ``earlier`` result lists as estimated, or as exact and perhaps faster, the fastest
    first; drops refuted findings.

    Recipes that keep the training need a comparison only; the others are trained on the next seeds, as far as whole
    trainings fit into the budget that was added.
    """
    open_rows = (row for row in earlier.get("frontier", ()) if row["evidence"] == ESTIMATED or row.get("to_prove"))
    rows = [row for row in open_rows if row["recipe"]]
    rows.sort(key=lambda row: gain_of(row)["median"] or 0.0)
    recipes = [Recipe(row["recipe"]) for row in rows]
    with study.budget.part(1.0):
        systems = [recipe for recipe in recipes if not changes_training(recipe)]
        seconds = max(state.comparison_seconds, CONTINUED_SHARE * min(study.budget.left(), study.budget.wall))
        if found := confirm_speed(study, systems, state.samples, seconds) if systems else None:
            state.findings = [*(one for one in state.findings if one.recipe != found.recipe), found]
    confirmations = [trial for trial in study.trials if trial["stage"] == "confirmation"]
    refuted = {trial["what"] for trial in confirmations if trial["verdict"] != "passed"}
    settled = [one for one in state.findings if one.evidence != ESTIMATED and not one.to_prove]
    state.findings = [one for one in state.findings if one in settled or str(one.recipe) not in refuted]
    others = [recipe for recipe in recipes if changes_training(recipe)]
    if not others or not has_training_stage or state.run_seconds is None:
        return
    if 2 * state.run_seconds > study.budget.wall:
        return study.note(str(others[-1]), "confirmation", "not tried", "no whole training fits into what was added")
    try:
        with study.budget.part(1.0):
            prove(study, state, others)
    except RunError as error:  # the task's own training failed; exact recipes need none
        study.note(str(others[-1]), "confirmation", "failed", str(error))
