"""What result.json states about the length of a training."""

import pytest

from hasten.benchmarking.ratio import Ratio
from hasten.core.recipe import Recipe
from hasten.tuning.confirmation import Confirmation
from hasten.tuning.finding import ESTIMATED, EXACT, PROVEN, Finding
from hasten.tuning.gate import not_passed
from hasten.tuning.result import SearchState, _quality, _training_seconds, _why_nothing_is_faster
from hasten.tuning.training import Baseline


def state_of(run_seconds: float | None, *measured: float) -> SearchState:
    runs = [{"metric": 0.9, "seconds": seconds} for seconds in measured]
    baseline = Baseline([0], runs, 0.9, 0.01, True, [1]) if runs else None
    return SearchState(run_seconds=run_seconds, baseline=baseline)


@pytest.mark.parametrize(
    ("measured", "horizon", "expected"), [((98.0, 94.0, 100.0), 1.0, 98.0), ((9.0, 9.0), 0.1, 120.0), ((), 1.0, 120.0)]
)
def test_training_seconds_are_those_of_whole_runs_where_there_are_any(measured, horizon, expected):
    found = Finding(Recipe({"ema": {}}), PROVEN, Ratio(2.0, 1.5, 3.0), "", training_speedup=Ratio(4.0, 2.0, 8.0))
    seconds = _training_seconds(state_of(120.0, *measured), found, horizon)
    assert seconds == {"baseline": expected, "tuned": expected / 4, "low": expected / 8, "high": expected / 2}
    assert _training_seconds(state_of(None), found, 1.0) is None


@pytest.mark.parametrize(
    ("evidence", "asked", "passed"), [(ESTIMATED, True, False), (ESTIMATED, False, None), (EXACT, True, True)]
)
def test_quality_of_a_recipe_without_a_passed_gate(evidence, asked, passed):
    recipe, state = Recipe({"ema": {}}), state_of(120.0, 98.0)
    state.confirmation = Confirmation(recipe, not_passed("planted", 0.01)) if asked else None
    assert _quality(state, Finding(recipe, evidence, Ratio(2.0, 1.5, 3.0), ""), None)["passed"] is passed


LEFT_OUT = {"what": "methods that change", "verdict": "not tried", "why": "--budget 4m lets it run", "ratio": None}


@pytest.mark.parametrize(
    ("trials", "why"),
    [
        ([], "no recipe could be compared; see the trials"),
        (
            [LEFT_OUT],
            "no recipe could be compared; see the trials; methods that change: not tried, --budget 4m lets it",
        ),
        (
            [{"verdict": "slower", "ratio": {"median": 0.9}}],
            "no method that was tried is surely faster; see the trials",
        ),
        ([{"verdict": "stopped"}], "nothing was surely faster by then; give it a larger --budget"),
        ([{"verdict": "stopped"}, LEFT_OUT], "by then; methods that change: not tried, --budget 4m lets it run"),
    ],
)
def test_reason_of_no_improvement_names_what_the_budget_has_left_out(trials, why):
    assert why in _why_nothing_is_faster(trials, is_partial=False)


def test_reason_of_a_search_that_has_not_ended_claims_no_result():
    assert "has not ended" in _why_nothing_is_faster([], is_partial=True)
