"""Comparison of runs on the same seeds, by seconds and by samples. Outcomes are planted."""

import math
from dataclasses import replace
from typing import Any

import pytest

from hasten.benchmarking.compare import Comparison
from hasten.benchmarking.measurement import ArmSamples
from hasten.benchmarking.ratio import Ratio
from hasten.core.recipe import Recipe
from hasten.tuning.finding import ESTIMATED, PRECISION, Finding, recommended
from hasten.tuning.result import SearchState
from hasten.tuning.study import is_in
from hasten.tuning.systems import _compare_losses, check_verdict
from hasten.tuning.training import Baseline, Outcome, first_outcome, seconds_of
from hasten.tuning.training_stage import _keeps_quality, run_baseline
from hasten.utils.targets import first_sustained_target
from helpers.planted_study import MARGIN, METRIC, SAMPLES, TARGET, TRIAL, Planted, baseline_of, outcome


def test_comparison_uses_only_seeds_of_both_recipes():
    once, thrice = outcome(10.0), outcome(8.0, 20.0, 20.0)
    assert thrice.gain_over(once) == pytest.approx(1.25)
    assert once.gain_over(thrice) == pytest.approx(0.8)
    assert outcome(8.0, None).gain_over(once) == pytest.approx(1.25)
    assert outcome(8.0, None).gain_over(outcome(10.0, 10.0)) == pytest.approx(1.0), "that of the whole training"


def test_time_to_beat_is_that_of_the_median_run():
    """Another program slowed the first one."""
    runs = [{**outcome(seconds).runs[0], "seconds": 2 * seconds} for seconds in (20.0, 10.0, 10.2)]
    baseline = replace(baseline_of(Planted()), runs=runs)
    assert first_outcome(baseline, 2.0).to_target("seconds") == pytest.approx(5.1)


def test_samples_are_compared_on_the_same_seeds():
    one, three = outcome(10.0, samples=(1000,)), outcome(10.0, 10.0, 10.0, samples=(1000, 1000, 1000))
    fewer_later = outcome(10.0, 10.0, 10.0, samples=(1000, 500, 500))
    assert not fewer_later.needs_fewer(one)
    assert fewer_later.needs_fewer(three)
    assert not outcome(10.0, samples=(995,)).needs_fewer(one)
    assert outcome(10.0, samples=(500,)).needs_fewer(outcome(None, samples=(None,)))


@pytest.mark.parametrize(("higher_is_better", "target"), [(True, METRIC - 0.02), (False, METRIC + 0.02)])
def test_target_of_a_task_without_one_is_what_every_seed_reaches_less_the_margin(higher_is_better, target):
    study: Any = Planted(target=None, higher_is_better=higher_is_better, spread=0)
    assert run_baseline(study, 0.02).target == pytest.approx(target)
    study.target = TARGET
    assert run_baseline(study, 0.02).target == TARGET, "which the task has"


class Peaked(Planted):
    """Every run ends worse than its best evaluation, which it has not held."""

    def run(self, recipe, seed, time_limit=None):
        result = super().run(recipe, seed, time_limit)
        curve = 0.70, 0.92, 0.85
        looks = [{**look, "metric": metric} for look, metric in zip(result["evaluations"], curve, strict=False)]
        found = first_sustained_target(curve, self.target, True)
        reached = None if found is None else looks[found]["seconds"]
        return {**result, "metric": 0.85, "best_metric": 0.92, "evaluations": looks, "seconds_to_target": reached}


def test_target_of_a_task_without_one_is_one_that_its_runs_have_held():
    study: Any = Peaked(target=None)
    baseline = run_baseline(study, 0.02)
    assert baseline.target == pytest.approx(0.83) and all(run["seconds_to_target"] for run in baseline.runs)


def test_recipes_of_other_lengths_are_compared_by_the_whole_training():
    long, short = outcome(10.0, whole=20_000), outcome(9.5, whole=8_000)
    assert short.gain_over(long) == pytest.approx(2.5), "not 10 / 9.5, the time to the target"
    assert short.needs_fewer(long) and not long.needs_fewer(short)


@pytest.mark.parametrize("end", [{"failed": "out of memory"}, {"pruned": True, "samples": 100, "evaluations": []}])
def test_recipe_whose_run_did_not_end_has_no_gain(end):
    assert Outcome("failed", "", (end,)).gain_over(outcome(10.0)) is None


def test_seconds_of_a_run_with_a_passing_disturbance_are_those_of_its_median_pace():
    rows = [{"samples": 100 * n, "seconds": 5.0 + n + (8.0 if n > 3 else 0.0)} for n in range(1, 11)]
    assert seconds_of({"evaluations": rows, "seconds": 23.0, "samples": 1000}) == pytest.approx(15.0)
    assert seconds_of({"evaluations": rows, "seconds": 24.0, "samples": 1100}) == pytest.approx(16.0)
    assert seconds_of({"evaluations": rows[:1], "seconds": 6.0, "samples": 100}) == 6.0
    assert seconds_of({"evaluations": [rows[0], rows[0]], "seconds": 6.0, "samples": 100}) == 6.0, "the same test twice"


def test_slower_recipe_is_described_in_seconds_of_the_common_seeds():
    runs = [{**run, "pruned": False} for run in outcome(9.9, 30.0, 30.0).runs]
    judged = Outcome.of(runs, baseline_of(Planted()), outcome(10.0))
    assert judged.verdict == "no gain"
    assert judged.why == "reached the target in 9.90 s; the best so far takes 10.00 s"


@pytest.mark.parametrize(
    ("run", "verdict", "message"),
    [
        ({"failed": "ema has no effect: no weights"}, "no effect", "no weights"),
        ({"failed": "ran out of memory"}, "failed", "memory"),
        ({"pruned": True, "evaluations": [{"seconds": 8.2}]}, "no gain", "stopped after 8.2 s at 0.95"),
        ({"pruned": True, "evaluations": [], "metric": None, "seconds": 9.0}, "no gain", "stopped after 9.0 s: it"),
        ({"pruned": True, "evaluations": [{"seconds": 8.2}], "metric": None}, "no gain", "stopped after 8.2 s: it"),
        ({"seconds_to_target": None}, "refused", "never reached the target 0.9"),
        ({"metric": METRIC - 3 * MARGIN}, "refused", "the margin is 0.01"),
        ({"seconds_to_target": 9.9}, "no gain", "9.90 s"),
        ({"seconds_to_target": 5.0}, "kept", "trained in 20.00 s"),
    ],
)
def test_run_outcomes_are_classified(run, verdict, message):
    usual = {
        "pruned": False,
        "seconds_to_target": 5.0,
        "samples_to_target": SAMPLES,
        "metric": METRIC,
        "samples": 2 * SAMPLES,
        "seconds": 2 * SAMPLES / 1000,
        "trial_seconds": TRIAL,
    }
    judged = Outcome.of([usual | run], baseline_of(Planted()), outcome(10.0))
    assert judged.verdict == verdict
    assert message in judged.why


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        ({"passed": False, "why": "3 of 4 weights differ"}, "refused"),
        ({"passed": False, "why": "ema has no effect: no weights"}, "no effect"),
        ({"failed": "ema has no effect: no weights"}, "no effect"),
        ({"failed": "ran out of memory"}, "failed"),
    ],
)
def test_exactness_check_of_a_method_without_effect_is_no_refusal(check, verdict):
    assert check_verdict(check) == (verdict, check.get("why") or check.get("failed"))


@pytest.mark.parametrize(
    ("seconds", "better", "verdict"),
    [
        (10.2, 2 * MARGIN, "kept"),
        (10.2, MARGIN, "no gain"),
        (10.2, MARGIN / 2, "no gain"),
        (12.0, 2 * MARGIN, "no gain"),
    ],
)
def test_clearly_better_metric_compensates_no_gain_but_not_a_loss(seconds, better, verdict):
    baseline, best = baseline_of(Planted()), outcome(10.0)
    (run,) = outcome(seconds, metric=METRIC + better).runs
    assert Outcome.of([{**run, "pruned": False}], baseline, best).verdict == verdict


@pytest.mark.parametrize("higher", [True, False])
def test_equal_quality_follows_the_metric_direction(higher):
    baseline = Baseline([0, 1], [{"metric": 1.0}, {"metric": 1.0}], TARGET, MARGIN, higher, [7, 8])
    better = 1 if higher else -1
    assert baseline.as_good([1.0 + better * 5 * MARGIN])
    assert baseline.as_good([1.0 - better * MARGIN / 2])
    assert not baseline.as_good([1.0 - better * 2 * MARGIN])


def test_metric_near_the_margin_may_be_as_good_but_is_not_surely():
    baseline = Baseline([0], [{"metric": 0.9}, {"metric": 0.904}], TARGET, MARGIN, True, [7, 8])
    near = baseline.metric - 0.9 * MARGIN
    assert baseline.as_good([near]) and not baseline.as_good([near], surely=True)
    assert baseline.as_good([baseline.metric], surely=True)
    assert baseline.as_good([near + 0.004] * 9, surely=True), "more seeds leave less doubt"


@pytest.mark.parametrize(("what", "expected"), [("x.py:Slow", True), ("ema + x.py:Slow:size=2", True), ("ema", False)])
def test_method_is_found_in_the_text_of_a_recipe_by_its_whole_name(what, expected):
    assert is_in("x.py:Slow", what) is expected
    assert not is_in("x.py:Slow", what.replace("Slow", "Slower"))


@pytest.mark.parametrize(
    ("after", "verdict"), [([1.0] * 6, "passed"), ([1.0] * 5 + [None], "refused"), ([1.1] * 6, "refused")]
)
def test_lower_precision_whose_losses_are_higher_or_not_finite_is_refused(after, verdict):
    assert _compare_losses({"losses": {"a": [1.0] * 6, "b": after}}, "checked")[0] == verdict


def test_block_with_a_loss_that_is_not_finite_can_be_stored():
    """A script that is run as it is may print such a loss, or have none."""
    arms = [ArmSamples(Recipe(), blocks=[{"round": 1, "loss": loss, "position": 8}]) for loss in (math.nan, 2.0)]
    comparison = Comparison("unsure", Ratio(1.0, 0.9, 1.1), *arms, why="", seconds=1.0, noise={})
    assert comparison.losses() == {"samples": [8], "a": [None], "b": [2.0]}


@pytest.mark.parametrize(("change", "keeps"), [(0.0, True), (-0.5 * MARGIN, True), (-3 * MARGIN, False)])
def test_whole_trainings_contradict_lower_precision_that_surely_ends_worse_by_the_margin(change, keeps):
    recipe = Recipe.parse("bfloat16")
    study = Planted(faster={"bfloat16": 2.0}, better={"bfloat16": change}, spread=0.1 * MARGIN)
    found = Finding(recipe, PRECISION, Ratio(2.0, 1.9, 2.1), "gradients as expected")
    state = SearchState(findings=[found], save=lambda: None)
    assert _keeps_quality(study, state, baseline_of(study), found) == keeps
    assert found.evidence == (PRECISION if keeps else ESTIMATED) and "over 3 paired seeds" in found.why
    assert recommended(state.findings) == (found if keeps else None)


def test_lower_precision_whose_training_fails_is_not_trained_on_further_seeds():
    class Failing(Planted):
        def run(self, recipe, seed, *limits, **more):
            run = super().run(recipe, seed, *limits, **more)
            return {"failed": "the loss is not finite", "trial_seconds": TRIAL} if recipe else run

    recipe, study = Recipe.parse("bfloat16"), Failing(faster={"bfloat16": 2.0})
    found = Finding(recipe, PRECISION, Ratio(2.0, 1.9, 2.1), "gradients as expected")
    assert not _keeps_quality(study, SearchState(findings=[found], save=lambda: None), baseline_of(study), found)
    assert found.evidence == ESTIMATED and len([what for what in study.kinds("run") if "bfloat16" in what]) == 1
