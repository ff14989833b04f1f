"""The cost of a search: its budget and reserve, the runs it compares with, and trials that are charged once."""

import math
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from hasten.benchmarking.ratio import Ratio
from hasten.core.errors import ConfigurationError, ProgressWarning
from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.engine.environment import cores
from hasten.engine.tasks import TaskRef
from hasten.tuning import systems_stage, training_stage, tune
from hasten.tuning.budget import Budget, OutOfBudgetError
from hasten.tuning.candidates import Candidates, MethodSelection, candidates_for, strong_baselines
from hasten.tuning.finding import ESTIMATED, EXACT, PRECISION, PROVEN, Finding, frontier, gain_of, recommended
from hasten.tuning.result import SearchState
from hasten.tuning.study import Study
from hasten.tuning.systems import Incumbents, candidate, confirm_speed, try_compositions
from hasten.tuning.systems_stage import comparison_seconds, find_strong_baseline
from hasten.tuning.training import Baseline
from hasten.tuning.training_stage import _save_unconfirmed
from hasten.tuning.trial_store import TrialStore
from hasten.tuning.tune import (
    BUDGET_RUNS,
    _correct_estimate,
    _start_of_comparisons,
    _takes_the_place_of_a_comparison,
)
from helpers import averaging as averaging_helper
from helpers.planted_study import MARGIN, SAMPLES, TARGET, Planted, baseline_of, frozen

PLAN = {
    **{"samples_per_epoch": 100, "epochs": 1, "step": 0.01, "start": 0.1, "evaluation": 0.0},
    **{"sync_period": 1, "samples_per_step": 1},
}


def test_budget_ends_trials_that_would_reach_its_reserve():
    budget = frozen(100.0)
    with budget.reserve(30.0):
        assert budget.left() == 70.0 and budget.deadline() == 70.0
        budget.check(expected=70.0)
        with pytest.raises(OutOfBudgetError):
            budget.check(expected=71.0)
    assert budget.left() == 100.0
    with budget.reserve(500.0):
        assert budget.left() == 50.0, "at most half is reserved"


def test_budget_part_withholds_the_rest_but_lets_a_trial_finish():
    budget = frozen(100.0)
    with budget.part(0.4):
        assert budget.left() == pytest.approx(40.0) and budget.deadline() == 100.0
        budget.charged += 40.0
        budget.check()
    assert budget.exhausted and budget.left() == 60.0


def test_default_budget_follows_the_estimate_of_the_diagnosis():
    """The first steps of a task may be disturbed: a training of 80 s was once taken for one of 45 min."""
    study, state = SimpleNamespace(budget=Budget(2400.0)), SearchState(level=PROVEN, run_seconds=2700.0)
    state.diagnosis = {"seconds_per_run": 80.0}
    with pytest.warns(ProgressWarning, match="about 80 s; the search may take 16 min"):
        _correct_estimate(study, state, None, None)
    assert state.run_seconds == 80.0 and study.budget.total == BUDGET_RUNS * 80.0
    state.diagnosis = {"seconds_per_run": 75.0}
    _correct_estimate(study, state, None, None)
    assert state.run_seconds == 80.0, "two estimates that nearly agree: the budget announced stays"
    state.diagnosis, study.budget = {"seconds_per_run": 10.0}, Budget(300.0)
    with pytest.warns(ProgressWarning, match="may take 5 min"):
        _correct_estimate(study, state, 300.0, None)
    assert study.budget.total == 300.0, "a budget that the user gives"


def test_recipe_whose_whole_training_surely_takes_longer_is_not_faster():
    """It reaches the target sooner, and trains on as long as before in slower steps."""
    sooner = Ratio(1.33, 1.07, 1.63)
    assert gain_of(sooner, Ratio(0.71, 0.62, 0.81)).high < 1
    assert gain_of(sooner, Ratio(0.97, 0.9, 1.05)) == sooner, "not surely"
    assert gain_of(sooner, Ratio(2.0, 1.8, 2.2)).median == 2.0


def test_findings_recommend_the_fastest_with_enough_evidence():
    def found(text, evidence, median, mean=None):
        quality = None if mean is None else {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}
        ratio = Ratio(median, 0.9 * median, 1.1 * median)
        return Finding(Recipe.parse(text), evidence, ratio, "planted", quality=quality)

    exact, proven = found("fused_optimizer", EXACT, 1.5), found("ema", PROVEN, 3.0, 0.01)
    estimated, slow = found("znorm", ESTIMATED, 5.0, -0.01), found("num_threads", PROVEN, 1.2, -0.01)
    everything = [exact, proven, estimated, slow]
    assert recommended(everything) is proven
    assert recommended(everything, EXACT) is exact
    assert recommended(everything, ESTIMATED) is estimated
    assert recommended([estimated]) is None, "an estimate is shown, not recommended"
    assert recommended([found("ema", EXACT, 1.05)]) is None, "not surely faster"
    assert frontier(everything) == [estimated, proven, exact]
    again = found("znorm", PROVEN, 4.0, 0.0)
    assert [each.evidence for each in frontier([estimated, again])] == [PROVEN], "one row for a recipe"


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
    state = SearchState()
    find_strong_baseline(Planted(faster=faster, without_effect=no_effect), state, SAMPLES, 5.0)
    assert str(state.strong_baseline) == best
    gain = math.prod(value for name, value in faster.items() if name in best)
    assert (state.strong_finding.speedup.median if state.strong_finding else 1.0) == pytest.approx(gain)


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
    assert 1 <= len(seconds) <= 2 and study.budget.left() <= 0
    study.measure_once("number 0", "", measure)
    assert study.budget.charged == 0.0, "the clock has counted it"
    study.budget.reserved = 0.0
    study.measure_once("of the confirmation", "", measure)

    later = Study(TaskRef("planted"), "cpu", TrialStore(tmp_path, {}), Budget(0.0), no_progress)
    later.measure_once("number 0", "", measure)
    assert later.budget.charged == pytest.approx(seconds[0]), "and counts again in the search that remembers it"


class Recorded(Study):
    """A Study with recorded runs: metrics 0.8, 0.92 and 0.95 after one second each."""

    trained = 0

    def _in_worker(self, recipe, seed, method, on_progress, **limits) -> dict:
        self.trained += 1
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
    assert study.known_run(Recipe(), 7)["samples_to_target"] == 200, "a run on another seed is as long"
    assert study.trained == 2
    study.store.leave()

    later = Recorded(TaskRef("planted"), "cpu", TrialStore(tmp_path, {}), Budget(10.0), no_progress, target=TARGET)
    assert not later.run(Recipe(), 0, time_limit=0.5)["pruned"], "an ended run counts for any later limit"
    assert later.trained == 0


def test_search_with_exposed_communication_tries_communication_methods_first():
    """It makes every later trial shorter. With little communication, exact methods are tried first."""
    for bound, first in ((3.0, ["local_sgd", "powersgd"]), (1.2, [])):
        advice = [{"method": name, "bound": bound} for name in ("ddp", "powersgd", "budgeted_schedule", "local_sgd")]
        found = candidates_for({"advice": advice}, MethodSelection(None, Recipe()))
        assert [each.name for each in found.communication] == first
        assert {each.name for each in found.training} == {"budgeted_schedule", "powersgd", "local_sgd"} - set(first)
        assert [each.name for each in found.systems] == ["ddp"]


def test_threads_for_idle_cores_are_tried_first_with_their_number_and_together_with_methods_without_options(
    monkeypatch,
):
    monkeypatch.setattr("hasten.profiling.advise.available_cores", lambda: 12)
    advice = [{"method": name, "bound": 2.0} for name in ("flush_denormals", "fused_optimizer", "num_threads")]
    diagnosis = {"advice": advice, "facts": ["cpu", "idle_cores"]}
    found = candidates_for(diagnosis, MethodSelection(None, Recipe()))
    remedy = found.systems[0]
    assert (remedy.name, remedy.presets) == ("num_threads", ({"count": 12}, {"count": 6}, {"count": 3}))
    state = SearchState(run_seconds=8.0, plan=PLAN, comparison_seconds=5.0, candidates=found)
    (together,) = systems_stage._together(state, found.systems)
    assert together.methods["num_threads"] == {"count": 12} and len(together.methods) == 3

    for options, presets in (({"count": 1}, ({"count": 1},)), ({}, remedy.presets)):
        named = candidates_for(diagnosis, MethodSelection(Recipe({"num_threads": options}), Recipe()))
        assert named.systems[0].presets == presets, "a number of the user's is the only one"
    ranks = candidates_for(diagnosis, MethodSelection(None, Recipe()), processes=6)
    assert ranks.systems[0].presets == ({"count": 2},)


def test_find_systems_confirms_what_it_found_before_a_trial_overran_the_share_of_the_stage(monkeypatch):
    now, found = [0.0], Finding(Recipe({"in_memory_batches": {}}), EXACT, Ratio(1.5, 1.4, 1.6), "")
    budget = Budget(100.0, clock=lambda: now[0])
    study = SimpleNamespace(budget=budget, processes=1, device="cpu", refusal=lambda recipe: "", trials=[])
    state = SearchState(run_seconds=8.0, plan=PLAN, comparison_seconds=5.0, candidates=Candidates(is_restricted=True))

    def search(_, incumbents, *__):
        incumbents.push(found.recipe, found.speedup)
        now[0] = 60.0  # 35 s are the share
        raise OutOfBudgetError

    def confirm(study, recipes, *_):
        study.budget.check()
        return found if recipes[-1] == found.recipe else None

    monkeypatch.setattr(systems_stage, "search_systems", search)
    monkeypatch.setattr(systems_stage, "confirm_speed", confirm)
    systems_stage.find_systems(study, state, True)
    assert state.findings == [found] and state.unconfirmed is None


def test_search_of_trainings_that_is_interrupted_shows_its_best_recipe_as_estimated():
    recipe, state = Recipe({"ema": {"decay": 0.9}}), SearchState()
    study: Any = SimpleNamespace(horizon=1.0, complete={(str(recipe), 0, 1.0): {"seconds": 5.0}})
    baseline = Baseline([0, 1000], [{"seconds": 10.0}, {"seconds": 10.0}], TARGET, MARGIN, True, [7, 8])
    with suppress(KeyboardInterrupt), state.incumbents.calling(lambda: _save_unconfirmed(study, state, baseline)):
        state.incumbents.push(recipe)
        assert state.unconfirmed, "it is saved at once, before the search can be killed"
        raise KeyboardInterrupt
    assert state.unconfirmed and state.unconfirmed.recipe == recipe and state.unconfirmed.evidence == ESTIMATED
    assert state.unconfirmed.speedup.median == 2.0 and "on 1 seed in" in state.unconfirmed.why


def test_confirm_speed_checks_exactness_first_since_a_check_that_the_budget_ends_says_nothing():
    study, recipe = Planted(faster={"num_threads:count=2": 2.0}), Recipe({"num_threads": {"count": 2}})
    found = confirm_speed(study, [Recipe(), recipe], SAMPLES, 5.0)
    assert found and found.recipe == recipe and found.evidence == EXACT
    assert [kind for kind, _ in study.asked] == ["exactness", "speed"]
    refuted = Planted(refuted=("num_threads:count=2",))
    assert confirm_speed(refuted, [Recipe(), recipe], SAMPLES, 5.0) is None
    assert [kind for kind, _ in refuted.asked] == ["exactness"]


def test_confirm_speed_repeats_a_stored_comparison_that_a_smaller_budget_left_unsure():
    study, recipe = Planted(faster={"num_threads:count=2": 1.04}, doubt=0.09), Recipe({"num_threads": {"count": 2}})
    confirm_speed(study, [recipe], SAMPLES, 1.0)
    assert len(study.kinds("speed")) == 1
    confirm_speed(study, [recipe], SAMPLES, 30.0)
    assert study.kinds("speed")[1:] == ["num_threads:count=2 against baseline, confirmation of 30 s"]
    study.faster, study.compared = {"num_threads:count=2": 2.0}, {}
    confirm_speed(study, [recipe], SAMPLES, 40.0)
    assert len(study.kinds("speed")) == 2, "a comparison that is sure stands"


@pytest.mark.parametrize(("level", "stages"), [(EXACT, 1), (PRECISION, 2)])
def test_find_systems_leaves_no_time_for_lower_precision_that_the_level_excludes(monkeypatch, level, stages):
    candidates = Candidates(systems=[candidate("fused_optimizer"), candidate("bfloat16")], is_restricted=True)
    state = SearchState(level=level, run_seconds=8.0, plan=PLAN, comparison_seconds=5.0, candidates=candidates)
    study, left, searched = Planted(budget=frozen(100.0)), [], []

    def search(study, _, items, *__):
        left.append(study.budget.left())
        searched.extend(item.name for item in items)

    monkeypatch.setattr(systems_stage, "search_systems", search)
    systems_stage.find_systems(study, state, False)  # type: ignore[arg-type]
    assert searched == ["fused_optimizer", "bfloat16"][:stages]
    reserved = 5.0 + systems_stage._confirmation_overhead(PLAN)
    share = 1.0 if level == EXACT else systems_stage.EXACT_SHARE
    assert left[0] == pytest.approx(share * (100.0 - reserved))


def test_estimate_of_a_check_counts_all_runs_of_a_script():
    of_task = comparison_seconds(PLAN | {"start": 2.0})
    plan = PLAN | {"start": 2.0, "check_seconds": [10.0, 5.0]}
    assert comparison_seconds(plan) == pytest.approx(of_task, abs=1.0)
    assert comparison_seconds(plan, is_first=True) == pytest.approx(of_task + 5.0, abs=1.0), "four starts, not two"
    slow = PLAN | {"step": 40.0}
    assert comparison_seconds(slow) > 3.6 * 40.0, "a check with long steps takes as long as three of each arm"


@pytest.mark.parametrize(("left", "expected"), [(40.0, False), (55.0, True), (80.0, False)])
def test_diagnosis_gives_way_to_a_comparison(left, expected):
    """Of a script that starts in 9 s; with too little for either, the diagnosis is made."""
    plan = PLAN | {"start": 9.0, "check_seconds": [25.0, 15.0]}
    assert _takes_the_place_of_a_comparison(plan, 12.0, left) is expected
    assert not _takes_the_place_of_a_comparison(PLAN | {"start": 9.0}, 12.0, left), "a task"


def test_guess_that_the_budget_ends_tells_which_budget_would_do(monkeypatch):
    study, state = Planted(budget=frozen(60.0)), SearchState(plan=PLAN, comparison_seconds=5.0, candidates=Candidates())
    state.candidates.systems = [candidate("in_memory_batches"), candidate("fused_optimizer")]

    def confirm(*_):
        raise OutOfBudgetError

    monkeypatch.setattr(systems_stage, "confirm_speed", confirm)
    systems_stage.confirm_best_guess(study, state)  # type: ignore[arg-type]
    assert "give about --budget" in state.too_small and study.noted("systems")


def test_guesses_leave_out_methods_that_had_no_effect_in_an_earlier_one(monkeypatch):
    study, state = Planted(without_effect=("fused_optimizer",)), SearchState(plan=PLAN, comparison_seconds=5.0)
    state.candidates = Candidates(systems=[candidate("fused_optimizer"), candidate("in_memory_batches")])
    systems_stage.confirm_best_guess(study, state)  # type: ignore[arg-type]
    tried = [what.partition(" against")[0] for what in study.kinds("speed")]
    assert tried[:2] == ["fused_optimizer + in_memory_batches", "in_memory_batches"]
    assert len(tried) == len(set(tried)) and not any("fused_optimizer" in what for what in tried[1:])


@pytest.mark.parametrize(("threads", "expected"), [(1.5, True), (1.02, False)])
def test_faster_guess_is_extended_by_methods_whose_options_have_to_be_chosen(threads, expected):
    faster = {"fused_optimizer": 1.3, "in_memory_batches": 1.2, "num_threads:count=1": threads}
    study, state = Planted(faster=faster), SearchState(plan=PLAN, comparison_seconds=5.0)
    names = ("fused_optimizer", "in_memory_batches", "num_threads")
    state.candidates = Candidates(systems=[candidate(name) for name in names])
    systems_stage.confirm_best_guess(study, state)  # type: ignore[arg-type]
    best = recommended(state.findings)
    assert best is not None and ("num_threads" in best.recipe.methods) is expected
    assert {"fused_optimizer", "in_memory_batches"} <= best.recipe.methods.keys()


def test_compositions_leave_out_methods_that_had_no_effect_in_an_earlier_one():
    study = Planted(faster={"num_threads:count=2": 2.0, "flush_denormals": 1.5}, without_effect=("fused_optimizer",))
    both = [Recipe.parse("fused_optimizer+num_threads:count=2"), Recipe.parse("flush_denormals+fused_optimizer")]
    try_compositions(study, incumbents := Incumbents(), both, SAMPLES, 5.0)
    assert str(incumbents.best) == "flush_denormals + num_threads:count=2"
    assert [what for what in study.kinds("speed") if "fused_optimizer" in what] == [
        "fused_optimizer + num_threads:count=2 against baseline"
    ]


@pytest.mark.parametrize(
    ("slow_from", "steps", "step", "begins"),
    [
        (830, 20_000, 0.003, 830),
        (830, 10_000, 0.003, 0),  # a twelfth of the training is not slow
        (830, 20_000, 0.03, 0),  # each comparison would train 50 s to get there
        (830, None, 0.003, 0),
        (None, 20_000, 0.003, 0),
    ],
)
def test_start_of_comparisons_is_where_steps_get_slower_if_that_is_early_and_near(slow_from, steps, step, begins):
    plan = PLAN | {"steps": steps, "step": step}
    assert _start_of_comparisons({"drift": {"rows": [], "slow_from": slow_from}}, plan, 600.0) == begins
    assert _start_of_comparisons({}, plan, 600.0) == 0


def test_compare_speed_begins_at_the_start_step_for_recipes_that_keep_the_training(tmp_path, monkeypatch):
    begun, seconds_of_a = [], iter([300.0, 300.0, 300.0, 450.0, 800.0])

    def run_interleaved(*_, start_step, **__):
        begun.append(start_step)
        first = SimpleNamespace(seconds_per_sample=lambda: [0.1, 0.3, 0.3], plan={"samples_per_step": 2})
        paces = {"a": next(seconds_of_a), "b": 200.0}
        return SimpleNamespace(to_json=lambda: {"seconds_per_1000_samples": paces}, a=first)

    monkeypatch.setattr("hasten.tuning.study.run_interleaved", run_interleaved)
    study = Study(TaskRef("planted"), "cpu", TrialStore(tmp_path, {}), Budget(60.0), no_progress)
    study.step_seconds, flush = 0.2, Recipe.parse("flush_denormals")
    outcomes = []
    for study.start_step in (0, 830):  # two trials, not one
        outcomes.append(study.compare_speed(Recipe(), flush))
    study.compare_speed(Recipe(), Recipe.parse("batch_size:factor=4"))
    assert begun == [0, 830, 0]
    outcomes.append(study.compare_speed(Recipe(), flush, salt="again"))
    outcomes.append(study.compare_speed(flush, flush | Recipe.parse("fused_optimizer")))
    slowdowns = [outcome["slowdown"] for outcome in outcomes]
    assert slowdowns[0] == pytest.approx(3.0), "steps of 0.6 s, and 0.2 s at first"
    assert slowdowns[1] is None, "a training that gets slower by itself says nothing about other programs"
    assert slowdowns[2:] == [pytest.approx(1.5), pytest.approx(4.0)], "compared with its own pace before, at that step"


@pytest.mark.parametrize("methods", [["znorm", "Averaging"], "znorm"])
def test_selection_with_an_offered_class_among_the_methods_tries_both(methods):
    averaging = f"{averaging_helper.__file__}:Averaging"
    selection = MethodSelection.of(methods, [averaging])
    assert selection.only == Recipe({"znorm": {}}) and list(selection.offered.methods) == [averaging]


def test_selection_of_an_unknown_class_is_refused():
    with pytest.raises(ConfigurationError, match="Averaging"):
        MethodSelection.of(["Averaging"], [])


@pytest.mark.parametrize(("total", "is_settled"), [(1e6, True), (0.0, False)])
def test_what_is_left_of_the_budget_settles_an_exact_recipe_that_may_be_faster(total, is_settled):
    """It was measured in a part of the budget, and methods that change the training brought nothing."""
    study = Planted(faster={"fused_optimizer": 1.05}, doubt=0.005, budget=frozen(total))
    recipe, open_ratio = Recipe.parse("fused_optimizer"), Ratio(1.05, 0.99, 1.11)
    found = Finding(recipe, EXACT, open_ratio, "", to_prove="a longer comparison")
    state = SearchState(plan=PLAN, comparison_seconds=5.0, findings=[found])
    systems_stage.settle_open(study, state)
    assert (state.chosen is not None) is is_settled and [one.recipe for one in state.findings] == [recipe]


def test_rest_of_the_budget_does_not_recommend_what_whole_trainings_have_refuted(monkeypatch):
    monkeypatch.setattr("hasten.tuning.systems._compare_losses", lambda *_: ("passed", ""))
    study = Planted(faster={"bfloat16": 2.0}, better={"bfloat16": -3 * MARGIN}, spread=0.1 * MARGIN)
    found = Finding(Recipe.parse("bfloat16"), PRECISION, Ratio(2.0, 1.9, 2.1), "")
    state = SearchState(plan=PLAN, comparison_seconds=5.0, findings=[found], save=lambda: None)
    assert not training_stage._keeps_quality(study, state, baseline_of(study), found)
    systems_stage.settle_open(study, state)
    assert state.chosen is None


@pytest.mark.parametrize("has_validation", [False, True])
def test_rest_of_the_budget_settles_open_recipes_with_and_without_trainings(monkeypatch, has_validation):
    asked = []
    monkeypatch.setattr(tune, "find_systems", lambda *_: None)
    monkeypatch.setattr(tune, "find_training", lambda *_: None)
    monkeypatch.setattr(tune, "settle_open", lambda *_: asked.append(1))
    tune._run_stages(Planted(), SearchState(), {}, has_validation)
    assert asked


def test_every_recipe_of_lower_precision_has_to_keep_the_quality(monkeypatch):
    texts = ("bfloat16 + channels_last", "bfloat16")
    found = [
        Finding(Recipe.parse(text), PRECISION, Ratio(m, m - 0.1, m + 0.1), "")
        for text, m in zip(texts, (2.0, 1.8), strict=True)
    ]
    study = Planted(better={"bfloat16": -3 * MARGIN}, spread=0.1 * MARGIN)
    state = SearchState(plan=PLAN, findings=found, save=lambda: None)
    stages = {"_horizon": 1.0, "run_baseline": baseline_of(study), "_search": None, "_never_moves": False}
    for name, value in stages.items():
        monkeypatch.setattr(training_stage, name, lambda *_, value=value: value)
    training_stage.find_training(study, state)
    assert state.chosen is None


def test_rest_of_the_budget_does_not_bring_back_a_shorter_comparison():
    class Longer(Planted):
        def _compare(self, a, b, salt):
            self.doubt, seconds = (0.1, 2.0) if salt == "confirmation" else (0.045, 30.0)
            return super()._compare(a, b, salt) | {"seconds": seconds}

    study, state = Longer(faster={"fused_optimizer": 1.05}), SearchState(plan=PLAN, comparison_seconds=5.0)
    state.save = lambda: None
    systems_stage._confirm(study, state, [Recipe.parse("fused_optimizer")], is_last=True)
    study.budget.charged = study.budget.total - 10
    systems_stage.settle_open(study, state)
    assert state.chosen is None and state.findings[0].gain.low > 1
