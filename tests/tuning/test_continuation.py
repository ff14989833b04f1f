"""A search that continues: it is refused beside another one, and proves first what is nearly proven."""

import fcntl
import math
import re
import time

import pytest

from hasten.benchmarking.ratio import Ratio
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.tuning import continuation, systems_stage, training_stage
from hasten.tuning.budget import Budget, OutOfBudgetError
from hasten.tuning.confirmation import Confirmation
from hasten.tuning.continuation import earlier_findings, finish_earlier, keep_measured
from hasten.tuning.finding import ESTIMATED, EXACT, PROVEN, Finding, recommended, to_be_sure
from hasten.tuning.gate import not_passed
from hasten.tuning.result import SearchState
from hasten.tuning.trial_store import LOCK, TrialStore
from hasten.tuning.tune import tune
from hasten.utils.durations import parse_budget
from helpers.planted_study import MARGIN, Planted, baseline_of
from helpers.process import start_process

PLAN = {"samples_per_epoch": 100, "epochs": 1}
LONG_PLAN = PLAN | {"step": 0.01, "start": 0.1, "evaluation": 0.0, "sync_period": 1, "samples_per_step": 1}


def row(text: str, evidence: str, median: float = 2.0) -> dict:
    speedup = {"median": median, "low": 0.9 * median, "high": 1.1 * median}
    methods = Recipe.parse(text).methods if text else {}
    return {"recipe": methods, "evidence": evidence, "speedup": speedup, "why": "", "quality": None}


def test_earlier_answer_stays_an_answer():
    rows = [row("fused_optimizer", EXACT), row("znorm", ESTIMATED, 5.0), row("", "", 1.0)]
    found = earlier_findings({"frontier": rows})
    assert [each.recipe for each in found] == [Recipe.parse("fused_optimizer"), Recipe.parse("znorm")]
    assert recommended(found) is found[0]


def test_recipe_that_is_proven_already_keeps_what_was_measured_of_it():
    recipe = Recipe.parse("ema").methods
    measured = {
        "time_to_target": {"tuned": 1.0},
        "metric": {"target": 0.9},
        "quality": {"passed": True},
        "step_profile": {"baseline": {"forward": 2.0}, "tuned": {"forward": 1.0}},
        "effects": {"ema": "the step changed the averages"},
        "peak_memory_bytes": {"baseline": [{"resident": 3}], "tuned": [{"resident": 4}]},
    }
    result = {"recipe": recipe, "evidence": PROVEN, "time_to_target": None, "quality": {"passed": True, "tuned": None}}
    result |= {"step_profile": {}, "effects": {}, "peak_memory_bytes": {"baseline": [{"resident": 3}]}}
    result["metric"] = {"target": None}
    earlier = {"recipe": recipe, "evidence": PROVEN, **measured}
    keep_measured(result, earlier)
    assert result == earlier
    other = {"recipe": {}, "evidence": "", "time_to_target": None}
    keep_measured(other, earlier)
    assert other["time_to_target"] is None
    keep_measured(other, {})


def test_recipe_that_a_continued_search_refutes_is_no_answer_any_more(monkeypatch):
    rows, state = (
        [row("znorm", ESTIMATED, 5.0), row("fused_optimizer", ESTIMATED)],
        SearchState(run_seconds=1.0, plan=PLAN),
    )
    state.findings = earlier_findings({"frontier": rows})
    study = Planted(refuted=("fused_optimizer",))
    monkeypatch.setattr(continuation, "prove", lambda *_: None)
    finish_earlier(study, state, {"frontier": rows}, True)
    assert [one.recipe for one in state.findings] == [Recipe.parse("znorm")]


def test_what_a_continued_search_has_settled_is_not_reopened_by_the_stored_comparison():
    class LongerIsSure(Planted):
        def _compare(self, a, b, salt):
            self.doubt = 0.1 if salt == "confirmation" else 0.02
            return super()._compare(a, b, salt)

    recipe, study = Recipe.parse("fused_optimizer"), LongerIsSure(faster={"fused_optimizer": 1.09})
    study.budget.wall = 100.0
    rows = [row("fused_optimizer", EXACT, 1.09) | {"to_prove": "a longer comparison"}]
    state = SearchState(run_seconds=1.0, plan=LONG_PLAN, comparison_seconds=1.0, save=lambda: None)
    state.findings = earlier_findings({"frontier": rows})
    finish_earlier(study, state, {"frontier": rows}, False)
    assert state.chosen
    systems_stage._confirm(study, state, [recipe], is_last=False)
    assert state.chosen and state.chosen.recipe == recipe


def test_recipe_that_an_earlier_search_has_proven_is_measured_to_the_end():
    recipe, study = Recipe.parse("ema"), Planted(faster={"ema": 2.0, "fused_optimizer": 1.1})
    known = Finding(recipe, PROVEN, Ratio(2.0, 1.8, 2.2), "")
    state = SearchState(run_seconds=1.0, plan=PLAN, save=lambda: None, findings=[known])
    state.strong_baseline = Recipe.parse("fused_optimizer")
    state.incumbents.push(recipe)
    training_stage._confirm_found(study, state, [], baseline_of(study), True)
    assert state.winner is not None and state.winner.over_strong_baseline is not None


@pytest.mark.parametrize(("is_whole", "better", "stays"), [(False, 0.0, True), (True, -3 * MARGIN, False)])
def test_proven_recipe_gives_way_to_whole_trainings_only(is_whole, better, stays):
    recipe, study = Recipe.parse("ema"), Planted(faster={"ema": 2.0}, better={"ema": better})
    study.horizon = 1.0 if is_whole else 0.25
    known = Finding(recipe, PROVEN, Ratio(2.0, 1.8, 2.2), "")
    state = SearchState(run_seconds=1.0, plan=PLAN, save=lambda: None, findings=[known])
    state.incumbents.push(recipe)
    training_stage._confirm_found(study, state, [], baseline_of(study), is_whole)
    assert (state.chosen is not None) is stays


def test_shorter_trainings_do_not_follow_a_proof(monkeypatch):
    study, state = Planted(faster={"ema": 2.0}), SearchState(run_seconds=1.0, plan=PLAN, save=lambda: None)
    training_stage._confirm(study, state, baseline_of(study), [Recipe.parse("ema")], is_whole=True)
    monkeypatch.setattr(training_stage, "_horizon", lambda *_: 0.25)
    monkeypatch.setattr(training_stage, "run_baseline", lambda *_: pytest.fail("it would set another target"))
    training_stage.find_training(study, state)
    assert state.winner and study.horizon == 1.0


def test_budget_of_a_continued_search_ends_after_what_was_added():
    budget = Budget(100.0, clock=lambda: 0.0)
    budget.wall = 40.0
    assert budget.deadline() == 40.0 and budget.left() == 100.0, "earlier trials are still to be charged"
    with budget.part(0.5), budget.reserve(30.0):
        assert budget.reserved == 10.0, "half of the half that this part may take"
        assert budget.deadline() == 30.0
    budget.clock = lambda: 41.0
    with pytest.raises(OutOfBudgetError):
        budget.check()


def test_finish_earlier_proves_before_anything_new(monkeypatch):
    asked: list = []
    monkeypatch.setattr(continuation, "confirm_speed", lambda study, recipes, *_: asked.append(recipes))
    monkeypatch.setattr(continuation, "prove", lambda study, state, recipes: asked.append(recipes))
    rows = [row("znorm", ESTIMATED, 5.0), row("ema", ESTIMATED, 3.0), row("fused_optimizer", ESTIMATED)]
    state = SearchState(run_seconds=1.0, plan=PLAN)
    study = Planted()
    study.budget.wall = math.inf
    finish_earlier(study, state, {"frontier": rows}, True)
    assert asked == [[Recipe.parse("fused_optimizer")], [Recipe.parse("ema"), Recipe.parse("znorm")]]


def hold(path, ready):
    with path.open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        ready.touch()
        time.sleep(60)


def test_second_search_in_a_directory_is_refused(tmp_path):
    process = start_process(hold, tmp_path / LOCK, tmp_path / "ready")
    try:
        while not (tmp_path / "ready").exists():
            assert process.is_alive()
        with pytest.raises(ConfigurationError, match="another search is running"):
            TrialStore(tmp_path, {})
    finally:
        process.kill()
        process.join()
    TrialStore(tmp_path, {})


def is_free(lock) -> None:
    with lock.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_search_locks_its_directory_before_the_task_runs_and_leaves_nothing_if_it_is_refused(tmp_path, monkeypatch):
    def refused(*_, **__):
        process = start_process(is_free, tmp_path / "runs/search" / LOCK)
        process.join()
        assert process.exitcode == 1, "the directory is not locked"
        raise ConfigurationError("the task is refused")

    monkeypatch.setattr("hasten.tuning.tune._describe", refused)
    with pytest.raises(ConfigurationError, match="the task is refused"):
        tune("digits", out=tmp_path / "runs/search")
    assert list(tmp_path.iterdir()) == []


def test_refused_search_keeps_the_files_of_an_earlier_one(tmp_path):
    TrialStore(tmp_path, {}).trial("run", {}, dict)
    TrialStore(tmp_path, {}).leave()
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, "trials.jsonl"}


def test_estimate_stays_an_answer_while_another_recipe_is_confirmed(monkeypatch):
    """Only the attempts of a confirmation replace what was known of their recipes."""
    before, now = Recipe.parse("znorm"), Recipe.parse("ema")
    estimates = [Finding(recipe, ESTIMATED, Ratio(2.0, 1.8, 2.2), "") for recipe in (before, now)]
    state = SearchState(run_seconds=1.0, plan=PLAN, findings=estimates, tested=[before], save=lambda: None)
    attempt = Confirmation(now, not_passed("it ended worse", 0.1), looks=1, over=True)
    monkeypatch.setattr(training_stage, "confirm", lambda *_: [attempt])
    study = Planted()
    training_stage._confirm(study, state, baseline_of(study), [now], is_whole=True)
    assert [found.recipe for found in state.findings] == [before] and state.tested == [before, now]


def test_estimate_of_a_recipe_whose_confirmation_ends_before_two_pairs_stays_and_counts_as_not_tested(monkeypatch):
    recipe = Recipe.parse("ema")
    estimate = Finding(recipe, ESTIMATED, Ratio(2.0, 1.8, 2.2), "")
    state = SearchState(run_seconds=1.0, plan=PLAN, findings=[estimate], save=lambda: None)
    attempt = Confirmation(recipe, not_passed("no seed was run", 0.1), looks=1)
    monkeypatch.setattr(training_stage, "confirm", lambda *_: [attempt])
    study = Planted()
    training_stage._confirm(study, state, baseline_of(study), [recipe], is_whole=True)
    assert state.findings == [estimate] and state.tested == []


def test_phases_of_the_baseline_are_known_though_the_budget_ends_before_the_strong_baseline():
    """They are those of the diagnosis, at the pace of the confirmation: no measurement is needed."""

    class Ending(Planted):
        def compare_speed(self, a, b, **how):
            if a:
                raise OutOfBudgetError
            return super().compare_speed(a, b, **how)

    recipe = Recipe.parse("ema")
    study = Ending(faster={"ema": 2.0})
    state = SearchState(run_seconds=1.0, plan=PLAN, save=lambda: None, diagnosis={"phases": {"forward": 0.4}})
    state.strong_baseline = Recipe.parse("fused_optimizer")
    training_stage._confirm(study, state, baseline_of(study), [recipe], is_whole=True)
    assert state.winner is not None and state.winner.over_strong_baseline is None
    pace = state.winner.comparison["seconds_per_1000_samples"]["a"]
    assert state.step_profiles == {"baseline": {"forward": 0.4 * pace}}


def test_recipe_whose_speed_is_open_is_compared_for_longer(monkeypatch):
    """Exact, and 1.11x (1.00 to 1.23): what it would take is said, and a continued search does it first."""
    ratio = Ratio(1.11, 1.0, 1.23)
    text = to_be_sure(ratio, 40.0)
    found = re.search(r"about (\d+) s: --budget \+(\S+)", text)
    assert found and int(found[1]) == pytest.approx(
        1.2 * 40 * (math.log(1.23 / 1.11) / math.log(1.11 / 1.01)) ** 2, abs=1
    )
    assert parse_budget(found[2]) >= 2 * int(found[1])
    assert not to_be_sure(Ratio(1.2, 1.1, 1.3), 40.0), "it is sure"
    assert not to_be_sure(Ratio(1.02, 0.9, 1.16), 40.0), "a hundred times as long"
    assert not to_be_sure(Ratio(1.0, 0.9, 1.1), 40.0)

    asked = []
    longer = Finding(Recipe.parse("fused_optimizer"), EXACT, Ratio(1.1, 1.06, 1.14), "")

    def confirm(study, recipes, samples, seconds):
        asked.append((recipes, seconds))
        return longer

    monkeypatch.setattr(continuation, "confirm_speed", confirm)
    rows = [row("fused_optimizer", EXACT) | {"speedup": ratio.to_json(), "to_prove": text}, row("malloc_tuning", EXACT)]
    state = SearchState(run_seconds=1.0, plan=PLAN, findings=earlier_findings({"frontier": rows}))
    study = Planted()
    study.budget.wall = 100.0
    finish_earlier(study, state, {"frontier": rows}, True)
    assert asked == [([Recipe.parse("fused_optimizer")], 50.0)]
    assert [one.recipe for one in state.findings] == [Recipe.parse("malloc_tuning"), longer.recipe]
    assert state.findings[1] is longer
