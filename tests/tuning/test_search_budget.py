"""The cost of a search: its budget and reserve, the runs it compares with, and trials that are charged once."""

import time

import pytest

from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.engine.environment import cores
from hasten.engine.tasks import TaskRef
from hasten.tuning.ablation import leave_one_out
from hasten.tuning.candidates import Candidates, MethodSelection, candidates_for, strong_baselines
from hasten.tuning.gate import MIN_SEEDS
from hasten.tuning.result import SearchState
from hasten.tuning.search import Incumbents
from hasten.tuning.study import Budget, OutOfBudgetError, Study
from hasten.tuning.trial_store import TrialStore
from hasten.tuning.tune import RESERVED_RUNS, _confirm, _find_strong_baseline, _measure_baseline, _search
from helpers.planted_study import CLIPPING, TARGET, THREADS, TRIAL, Planted, baseline_of, clipping, threads


@pytest.mark.parametrize(
    ("total", "reserved"), [(1800.0, RESERVED_RUNS * TRIAL + 60.0), (54.0, RESERVED_RUNS * TRIAL + 10.0), (30.0, 15.0)]
)
def test_search_reserves_budget_for_the_confirmation(total, reserved):
    study, found = Planted(budget=Budget(total)), SearchState()
    _measure_baseline(study, found, MethodSelection(None, Recipe()), None)
    assert study.budget.reserved == pytest.approx(reserved)


def measured_study(total: float) -> tuple[Planted, SearchState]:
    """A study that has measured its baseline, and its findings so far."""
    effects = {threads(count): 1 + count / 10 for count in range(1, 9)} | {"fused_optimizer": 1.1}
    study = Planted(faster=effects, samples={clipping(norm): 0.9**norm for norm in range(1, 9)}, budget=Budget(total))
    found = SearchState(
        baseline=baseline_of(study), candidates=Candidates([THREADS], [CLIPPING]), comparison_seconds=TRIAL
    )
    study.budget.reserved = min(total / 2, 9 * TRIAL)
    return study, found


@pytest.mark.parametrize("total", [26.0, 29.0, 31.0, 43.0, 64.0, 101.0, 200.0])
def test_search_exceeds_its_budget_by_at_most_one_trial(total):
    study, found = measured_study(total)
    reserve = study.budget.reserved
    _search(study, found)
    for_exact, reserve = study.budget.reserved - reserve, study.budget.reserved
    assert (0.0 if total < 40.0 else 1e-9) <= for_exact <= (MIN_SEEDS + 1) * TRIAL
    assert total < 200.0 or for_exact == (MIN_SEEDS + 1) * TRIAL
    assert study.budget.spent <= total - reserve + TRIAL
    ample, everything = measured_study(1e6)
    _search(ample, everything)
    untried = set(ample.asked) - set(study.asked)
    assert bool(study.noted("search")) is bool(untried), "the early end is noted"
    _confirm(study, found)
    assert study.budget.spent <= total + TRIAL
    assert found.winner or total < 40.0
    assert total < 100.0 or found.confirmation.over_strong_baseline is not None


def test_ablation_at_the_end_of_the_budget_keeps_its_measurements():
    recipe = Recipe.coerce(f"{threads(2)} + {clipping(1)} + fused_optimizer")
    study = Planted(
        faster={threads(2): 1.5, "fused_optimizer": 1.2}, samples={clipping(1): 0.5}, budget=Budget(3 * TRIAL)
    )
    measured = [share["method"] for share in leave_one_out(study, Incumbents([Recipe(), recipe]))]
    assert 0 < len(measured) < 3
    ample = Planted(faster=study.faster, samples=study.samples)
    assert {
        share["method"]: round(share["speedup"]["median"], 1)
        for share in leave_one_out(ample, Incumbents([Recipe(), recipe]))
    } == {"num_threads": 1.5, "fused_optimizer": 1.2, "gradient_clipping": 2.0}


def test_ablation_removes_members_without_a_gain():
    recipe = Recipe.coerce(f"{threads(2)} + fused_optimizer")
    study, incumbents = Planted(faster={threads(2): 1.5}), Incumbents([Recipe(), recipe])
    assert [share["method"] for share in leave_one_out(study, incumbents)] == ["num_threads"]
    assert str(incumbents.best) == threads(2)
    assert study.trials[-1]["verdict"] == "left out"


def test_ablation_keeps_members_that_gain_by_step_time_only():
    """As DiLoCo does: equally many samples, a slightly worse final metric, and much faster steps."""
    recipe = Recipe.coerce(f"{threads(2)} + {clipping(1)}")
    study = Planted(faster={threads(2): 1.5, clipping(1): 3.0}, better={clipping(1): -0.01})
    incumbents = Incumbents([Recipe(), recipe])
    speedups = {share["method"]: share["speedup"] for share in leave_one_out(study, incumbents)}
    assert incumbents.best == recipe
    assert (
        speedups["gradient_clipping"]["median"] == pytest.approx(3.0)
        and speedups["gradient_clipping"]["low"] is not None
    )
    study = Planted(faster={threads(2): 1.5}, better={clipping(1): -0.01})
    leave_one_out(study, incumbents)
    assert str(incumbents.best) == threads(2)


def test_setting_with_faster_but_more_steps_is_judged_by_total_time():
    """1.5 times the speed, and 1.5 times as many samples."""
    recipe = Recipe.coerce(f"{threads(2)} + {clipping(1)}")
    study = Planted(faster={threads(2): 1.5, clipping(1): 1.5}, samples={clipping(1): 1.5}, better={clipping(1): -0.01})
    incumbents = Incumbents([Recipe(), recipe])
    leave_one_out(study, incumbents)
    assert str(incumbents.best) == threads(2)


# ── the strong baseline ──────────────────────────────────────────────────────────────────────────

WORKERS = str(strong_baselines("cpu", cores())[-1].drop("fused_optimizer"))


@pytest.mark.parametrize(
    ("faster", "no_effect", "best"),
    [
        ({"fused_optimizer": 1.2}, (), "fused_optimizer"),
        ({"fused_optimizer": 1.2, WORKERS: 1.3}, (), f"fused_optimizer + {WORKERS}"),
        ({WORKERS: 1.3}, ("fused_optimizer",), WORKERS),
        ({"fused_optimizer": 1.2}, (WORKERS,), "fused_optimizer"),
        ({}, (), "baseline"),
        ({WORKERS: 0.8}, ("fused_optimizer",), "baseline"),
    ],
)
def test_strong_baseline_keeps_clear_gains_and_drops_methods_without_effect(faster, no_effect, best):
    assert str(_find_strong_baseline(Planted(faster=faster, without_effect=no_effect), 5.0)) == best


# ── the measurements: their cost, and what they store ────────────────────────────────────────────


def test_trial_starts_while_budget_is_left_and_stored_trials_are_free(tmp_path):
    study = Study(TaskRef("planted"), "cpu", TrialStore(tmp_path, {}), Budget(10.0, reserved=9.98), no_progress)

    def measure(_) -> dict:
        time.sleep(0.01)
        return {}

    with pytest.raises(OutOfBudgetError):
        for number in range(100):
            study.measure_once(f"number {number}", "", measure)
    seconds = [entry["trial_seconds"] for entry in study.store.outcomes.values()]
    assert study.budget.spent == pytest.approx(sum(seconds))
    assert sum(seconds[:-1]) < 0.02 <= study.budget.spent
    study.measure_once("number 0", "", measure)
    assert study.budget.spent == pytest.approx(sum(seconds)), "a trial is paid for once"
    study.budget.reserved = 0.0
    study.measure_once("of the confirmation", "", measure)

    later = Study(TaskRef("planted"), "cpu", TrialStore(tmp_path, {}), Budget(0.0), no_progress)
    later.measure_once("number 0", "", measure)
    assert later.budget.spent == pytest.approx(seconds[0]), "and counts again in the search that remembers it"


class Recorded(Study):
    """A Study with recorded runs: metrics 0.8, 0.92 and 0.95 after one second each."""

    def _in_worker(self, recipe, seed, method, watch, **limits) -> dict:
        looks = [
            {"samples": 100 * n, "seconds": float(n), "metric": metric} for n, metric in enumerate((0.8, 0.92, 0.95), 1)
        ]
        return {"metric": 0.95, "evaluations": looks, "pruned": limits.get("time_limit", 9.0) < 2.0}


def test_target_set_after_the_first_runs_applies_to_them(tmp_path):
    study = Recorded(TaskRef("planted"), "cpu", TrialStore(tmp_path, {}), Budget(10.0), no_progress)
    assert study.run(Recipe(), 0)["seconds_to_target"] is None
    study.target = TARGET
    assert study.run(Recipe(), 0)["seconds_to_target"] == 2.0


def test_stored_run_is_reused_if_finished_but_not_if_pruned(tmp_path):
    study = Recorded(TaskRef("planted"), "cpu", TrialStore(tmp_path, {}), Budget(10.0), no_progress, target=TARGET)
    assert study.run(Recipe(), 0, time_limit=1.0)["pruned"]
    assert not study.run(Recipe(), 0, time_limit=5.0)["pruned"]
    assert study.run(Recipe(), 0)["samples_to_target"] == 200
    assert len(study.store.outcomes) == 2


def test_search_with_exposed_communication_tries_communication_methods_first():
    """It makes every later trial shorter. With little communication, exact methods are tried first."""
    for bound, first in ((3.0, ["local_sgd", "powersgd"]), (1.2, [])):
        advice = [{"method": name, "bound": bound} for name in ("ddp", "powersgd", "budgeted_schedule", "local_sgd")]
        found = candidates_for({"advice": advice}, MethodSelection(None, Recipe()))
        assert [each.name for each in found.communication] == first
        assert {each.name for each in found.training} == {"budgeted_schedule", "powersgd", "local_sgd"} - set(first)
        assert [each.name for each in found.systems] == ["ddp"]


def test_search_first_incumbent_is_the_communication_method():
    study, found = measured_study(1e6)
    found.candidates.communication, found.candidates.training = found.candidates.training, []
    _search(study, found)
    assert study.noted("training") and found.incumbents.recipes[1] == Recipe.parse(clipping(1))
