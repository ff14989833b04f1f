"""The rules of the search: when a method is dropped, and what becomes an incumbent. Measurements are planted."""

from dataclasses import replace

import pytest

from hasten.core.recipe import Recipe
from hasten.tuning import systems, training
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.systems import Incumbents, candidate, confirm_speed, search_systems
from hasten.tuning.training import first_outcome, run_seeds, search_training
from hasten.tuning.training_stage import BASELINE_SEEDS
from helpers.planted_study import (
    CLIPPING,
    MARGIN,
    SAMPLES,
    THREADS,
    TRIAL,
    Planted,
    baseline_of,
    clipping,
    frozen,
    searched_systems,
    searched_training,
    threads,
)

# ── system methods ───────────────────────────────────────────────────────────────────────────────


def test_system_method_is_dropped_after_max_losses():
    study = Planted(faster={threads(systems.MAX_LOSSES + 1): 2.0})
    assert searched_systems(study).recipes == [Recipe()]
    assert study.noted("systems") == [threads(count + 1) for count in range(systems.MAX_LOSSES)]


def test_system_method_with_a_gain_restarts_the_count():
    study = Planted(faster={threads(2): 1.5, threads(4): 2.0, threads(4 + systems.MAX_LOSSES): 1.8})
    incumbents = searched_systems(study)
    assert [str(recipe) for recipe in incumbents.recipes] == ["baseline", threads(4)]
    assert study.noted("systems") == [threads(count + 1) for count in range(4 + systems.MAX_LOSSES)]


def test_system_method_at_the_end_of_the_budget_keeps_its_best_setting():
    # one speed comparison and one exactness check
    study = Planted(faster={threads(1): 1.5, threads(2): 2.0}, budget=frozen(2 * TRIAL))
    incumbents = Incumbents()
    with pytest.raises(OutOfBudgetError):
        search_systems(study, incumbents, [THREADS], SAMPLES, 5.0)
    assert str(incumbents.best) == threads(1)


def test_start_up_that_a_run_does_not_repay_is_no_gain():
    study = Planted(faster={threads(1): 1.5}, start={threads(1): 5.0})  # saves 3.3 of 10 seconds
    assert searched_systems(study, replace(THREADS, presets=({"count": 1},))).recipes == [Recipe()]
    assert study.trials[0]["verdict"] == "no gain"
    assert not study.kinds("exactness")


def test_method_of_the_user_is_checked_first():
    offered = replace(THREADS, presets=({"count": 1},), offered=True)
    refuted = Planted(faster={threads(1): 2.0}, refuted=(threads(1),))
    assert searched_systems(refuted, offered).recipes == [Recipe()]
    assert [kind for kind, _ in refuted.asked] == ["exactness"]
    honest = Planted(faster={threads(1): 2.0})
    assert str(searched_systems(honest, offered).best) == threads(1)
    assert [kind for kind, _ in honest.asked] == ["exactness", "speed"]
    assert honest.trials[0]["seconds"] == 2 * TRIAL, "the proof is paid for once"


def test_trial_of_a_method_whose_effect_is_not_checked_says_so():
    class Unchecked(Planted):
        def compare_speed(self, a, b, **options):
            effects = {"a": {}, "b": {"num_threads": "effect not checked", "ema": "the step changed the averages"}}
            return super().compare_speed(a, b, **options) | {"effects": effects}

    study = Unchecked()
    searched_systems(study, replace(THREADS, presets=({"count": 1},)))
    [trial] = study.trials
    assert trial["why"].endswith("; num_threads: effect not checked") and "ema" not in trial["why"]


# ── training methods ─────────────────────────────────────────────────────────────────────────────


def test_training_method_is_dropped_after_max_losses():
    study = Planted(samples={clipping(training.MAX_LOSSES + 1): 0.5})
    assert searched_training(study).recipes == [Recipe()]
    assert study.noted("training") == [clipping(norm + 1) for norm in range(training.MAX_LOSSES)]


def test_training_method_makes_an_incumbent_of_every_gain():
    study = Planted(samples={clipping(2): 0.8, clipping(4): 0.5})
    incumbents = searched_training(study)
    assert [str(recipe) for recipe in incumbents.recipes] == ["baseline", clipping(2), clipping(4)]
    assert study.noted("training") == [clipping(norm + 1) for norm in range(4 + training.MAX_LOSSES)]


@pytest.mark.parametrize(
    ("samples", "faster", "accepted"), [(1.0, 1.0, False), (0.995, 1.0, False), (1.0, 1.3, True), (0.9, 1.0, True)]
)
def test_recipes_of_equal_samples_are_compared_by_speed_not_run_time(samples, faster, accepted):
    study = Planted(samples={clipping(1): samples}, faster={clipping(1): faster}, luck={clipping(1): 1.1})
    incumbents = searched_training(study, replace(CLIPPING, presets=CLIPPING.presets[:1]))
    assert (str(incumbents.best) == clipping(1)) is accepted
    assert bool(study.kinds("speed")) is (samples > 0.99)


@pytest.mark.parametrize(("better", "luck", "accepted"), [(1.5, 0.98, True), (0.5, 0.98, False), (1.5, 0.9, False)])
def test_recipes_of_equal_time_are_compared_by_final_metric(better, luck, accepted):
    study = Planted(
        samples={clipping(1): 0.5, clipping(2): 0.5}, better={clipping(2): better * MARGIN}, luck={clipping(2): luck}
    )
    incumbents = searched_training(study, replace(CLIPPING, presets=CLIPPING.presets[:2]))
    assert (str(incumbents.best) == clipping(2)) is accepted


def test_recipes_that_are_slightly_slower_do_not_accumulate():
    """A better final metric may cost 5 % of the time once, not again for each further improvement."""
    presets = CLIPPING.presets[:7]
    study = Planted(
        samples={clipping(norm): 0.5 for norm in range(1, 8)},
        better={clipping(norm): 2 * norm * MARGIN for norm in range(1, 8)},
        luck={clipping(norm): 0.97 ** (norm - 1) for norm in range(1, 8)},
    )
    assert str(searched_training(study, replace(CLIPPING, presets=presets)).best) == clipping(2)


def test_setting_without_effect_is_not_accepted_by_luck():
    study = Planted(samples={clipping(2): 0.9, clipping(3): 0.9}, faster={clipping(3): 1.3}, spread=0.0)
    incumbents = searched_training(study, replace(CLIPPING, presets=CLIPPING.presets[:3]))
    assert str(incumbents.best) == clipping(2)
    assert study.trials[-1]["why"] == "trains exactly as a setting that was tried before"
    assert len([what for what in study.kinds("run") if what.startswith(clipping(3))]) == 1


def test_setting_that_the_best_recipe_has_is_not_trained_again():
    """Whether its options are given or left at their defaults."""
    muon, ema = Recipe({"muon": {"momentum": 0.95}}), candidate("ema")
    study = Planted(samples={"muon:momentum=0.95": 0.5})
    incumbents = Incumbents([Recipe(), muon])
    best = run_seeds(study, muon, first_outcome(baseline_of(study)), baseline_of(study), [])
    search_training(study, incumbents, [candidate("muon"), replace(ema, presets=({},))], baseline_of(study), best)
    assert study.noted("training") == ["ema"]


@pytest.mark.parametrize("offered", [True, False])
def test_method_of_a_user_without_its_claimed_effect_is_dropped_before_it_trains(offered):
    """Of hasten's own methods the training itself shows it, and no check is paid for."""
    study = Planted(samples={clipping(1): 0.5, clipping(2): 0.5}, refuted=(clipping(1),) if offered else ())
    found = searched_training(study, replace(CLIPPING, offered=offered))
    assert bool(found.best) != offered and len(study.kinds("exactness")) == offered
    assert not offered or study.noted("training") == [clipping(1)]


@pytest.mark.parametrize(("budget", "seeds"), [(1e6, BASELINE_SEEDS), (20 * TRIAL, BASELINE_SEEDS), (12 * TRIAL, 1)])
def test_further_seeds_are_run_within_the_budget(budget, seeds):
    study = Planted(samples={clipping(1): 0.5}, budget=frozen(budget))
    searched_training(study, replace(CLIPPING, presets=CLIPPING.presets[:1]))
    assert sum(what.startswith(clipping(1)) for what in study.kinds("run")) == seeds


def test_promising_recipe_is_compared_longer_on_a_noisy_machine():
    study, incumbents = Planted(faster={threads(2): 1.2, threads(3): 1.03}, restless=True), Incumbents()
    search_systems(study, incumbents, [replace(THREADS, presets=({"count": 2}, {"count": 3}))], SAMPLES, 5.0)
    assert str(incumbents.best) == threads(2)
    assert study.kinds("speed") == [
        f"{threads(2)} against baseline",
        f"{threads(2)} against baseline, longer",
        f"{threads(3)} against baseline",
    ]


def test_faster_recipe_for_whose_check_the_budget_is_too_short_goes_to_the_confirmation():
    """Which begins with that check, and for which seconds are reserved."""

    class Unchecked(Planted):
        def check_exactness(self, base, recipe, exactness):
            raise OutOfBudgetError

    study, incumbents = Unchecked(faster={threads(2): 2.0}), Incumbents()
    search_systems(study, incumbents, [replace(THREADS, presets=({"count": 2},))], SAMPLES, 5.0)
    assert incumbents.best == Recipe.parse(threads(2))
    assert "the confirmation checks whether" in study.trials[-1]["why"]


@pytest.mark.parametrize(("start", "step"), [(5.0, 0.0), (0.0, 0.2)], ids=["slow start", "long steps"])
def test_promising_recipe_that_starts_slowly_is_not_compared_in_a_single_round_again(start, step):
    """A round of steps of 0.2 s takes 12 s: 15 steps of each arm to warm up, and 3 blocks of 5."""
    study = Planted(faster={threads(2): 1.2}, restless=True, start={threads(2): start}, step_seconds=step)
    search_systems(study, Incumbents(), [replace(THREADS, presets=({"count": 2},))], SAMPLES, 5.0)
    assert study.kinds("speed") == [f"{threads(2)} against baseline"]


@pytest.mark.parametrize(("name", "is_kept"), [("fused_optimizer", True), ("bfloat16", False)])
def test_probable_gain_is_enough_for_an_exact_method_only(name, is_kept):
    """4 % known to 5 %: above 1 with a certainty of 90 %. Lower precision costs quality, and has to be sure."""
    study, incumbents = Planted(faster={name: 1.04}, doubt=0.05), Incumbents()
    search_systems(study, incumbents, [candidate(name)], SAMPLES, 5.0)
    assert bool(incumbents.best) == is_kept


@pytest.mark.parametrize(
    ("disturbances", "evidence", "comparisons"),
    [([], "exact", 1), ([12.0, 1.1], "exact", 2), ([12.0, 9.0], "estimated", 2)],
)
def test_speed_beside_other_programs_is_measured_again_or_an_estimate(disturbances, evidence, comparisons):
    """The task ran 12 times slower than before, beside programs that used 40 % of the processors."""
    study = Planted(faster={"fused_optimizer": 16.0}, disturbances=disturbances)
    found = confirm_speed(study, [Recipe.parse("fused_optimizer")], SAMPLES, 10.0)
    assert found is not None and found.evidence == evidence and len(study.kinds("speed")) == comparisons
    assert ("9.0 times slower than before" in found.why) == (evidence == "estimated") == bool(found.to_prove)


@pytest.mark.parametrize(("disturbances", "is_mentioned"), [([3.0, 1.1], False), ([3.0, 3.0], True)])
def test_comparison_beside_other_programs_is_repeated_and_its_trial_mentions_them(disturbances, is_mentioned):
    study, incumbents = Planted(faster={"fused_optimizer": 3.0}, disturbances=disturbances), Incumbents()
    search_systems(study, incumbents, [candidate("fused_optimizer")], SAMPLES, 5.0)
    assert incumbents.best and len(study.kinds("speed")) == 2
    assert ("3.0 times slower than before" in study.trials[-1]["why"]) == is_mentioned


class BudgetOfOneComparison(Planted):
    """Ends in the repetition of a comparison."""

    def compare_speed(self, a, b, *, salt="", **how):
        if salt:
            raise OutOfBudgetError
        return super().compare_speed(a, b, salt=salt, **how)


def test_faster_recipe_is_kept_though_the_budget_ends_in_its_repetition():
    study, incumbents = BudgetOfOneComparison(faster={"fused_optimizer": 3.0}, disturbances=[3.0]), Incumbents()
    search_systems(study, incumbents, [candidate("fused_optimizer")], SAMPLES, 5.0)
    assert incumbents.best == Recipe.parse("fused_optimizer")
    assert "the budget ended before more was measured" in study.trials[-1]["why"]


def test_recipe_that_turns_out_slower_gives_way_to_the_one_before_it():
    good, bad = Recipe.parse("fused_optimizer"), Recipe.parse(["fused_optimizer", threads(2)])
    study = Planted(faster={"fused_optimizer": 1.5, threads(2): 0.5})
    found = confirm_speed(study, [Recipe(), good, bad], SAMPLES, 10.0)
    assert found is not None and found.recipe == good and found.speedup.median == pytest.approx(1.5)
    slow = confirm_speed(Planted(faster={"fused_optimizer": 0.9, threads(2): 0.9}), [good, bad], SAMPLES, 10.0)
    assert slow is not None and slow.recipe == good, "of two slower ones the faster"


@pytest.mark.parametrize(("is_last", "comparisons"), [(True, 2), (False, 1)])
def test_comparison_that_leaves_a_gain_open_is_made_longer_if_nothing_else_needs_the_budget(is_last, comparisons):
    study = Planted(faster={"fused_optimizer": 1.04}, doubt=0.05)
    confirm_speed(study, [Recipe.parse("fused_optimizer")], SAMPLES, TRIAL, is_last)
    asked = study.kinds("speed")
    assert len(asked) == comparisons and all("confirmation" in what for what in asked)
