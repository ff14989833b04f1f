"""The rules of the search: when a method is dropped, and what becomes an incumbent. Measurements are planted."""

from dataclasses import replace

import pytest

from hasten.core.recipe import Recipe
from hasten.tuning.search import SYSTEMS_LOSSES, TRAINING_LOSSES, Incumbents, search_systems
from hasten.tuning.study import Budget, OutOfBudgetError
from hasten.tuning.tune import BASELINE_SEEDS
from helpers.planted_study import (
    CLIPPING,
    MARGIN,
    SAMPLES,
    THREADS,
    TRIAL,
    Planted,
    clipping,
    searched_systems,
    searched_training,
    threads,
)

# ── system methods ───────────────────────────────────────────────────────────────────────────────


def test_settings_of_a_systems_method_end_after_so_many_losses():
    study = Planted(faster={threads(SYSTEMS_LOSSES + 1): 2.0})
    assert searched_systems(study).recipes == [Recipe()]
    assert study.noted("systems") == [threads(count + 1) for count in range(SYSTEMS_LOSSES)]


def test_a_gain_begins_the_count_anew_and_the_best_setting_is_one_rung():
    study = Planted(faster={threads(2): 1.5, threads(4): 2.0, threads(4 + SYSTEMS_LOSSES): 1.8})
    incumbents = searched_systems(study)
    assert [str(recipe) for recipe in incumbents.recipes] == ["baseline", threads(4)]
    assert study.noted("systems") == [threads(count + 1) for count in range(4 + SYSTEMS_LOSSES)]


def test_where_the_budget_ends_the_best_setting_so_far_is_kept():
    # one speed comparison and one exactness check
    study = Planted(faster={threads(1): 1.5, threads(2): 2.0}, budget=Budget(2 * TRIAL))
    incumbents = Incumbents()
    with pytest.raises(OutOfBudgetError):
        search_systems(study, incumbents, [THREADS], SAMPLES, 5.0)
    assert str(incumbents.best) == threads(1)


def test_a_start_that_a_run_does_not_earn_back_is_no_gain():
    study = Planted(faster={threads(1): 1.5}, start={threads(1): 5.0})  # saves 3.3 of 10 seconds
    assert searched_systems(study, replace(THREADS, presets=({"count": 1},))).recipes == [Recipe()]
    assert study.trials[0]["verdict"] == "no gain"
    assert not study.kinds("exactness")


def test_what_is_offered_is_proven_first():
    offered = replace(THREADS, presets=({"count": 1},), offered=True)
    refuted = Planted(faster={threads(1): 2.0}, refuted=(threads(1),))
    assert searched_systems(refuted, offered).recipes == [Recipe()]
    assert [kind for kind, _ in refuted.asked] == ["exactness"]
    kept = Planted(faster={threads(1): 2.0})
    assert str(searched_systems(kept, offered).best) == threads(1)
    assert [kind for kind, _ in kept.asked] == ["exactness", "speed"]
    assert kept.trials[0]["seconds"] == 2 * TRIAL, "the proof is paid for once"


# ── training methods ─────────────────────────────────────────────────────────────────────────────


def test_settings_of_a_training_method_end_after_so_many_losses():
    study = Planted(samples={clipping(TRAINING_LOSSES + 1): 0.5})
    assert searched_training(study).recipes == [Recipe()]
    assert study.noted("training") == [clipping(norm + 1) for norm in range(TRAINING_LOSSES)]


def test_every_gain_of_a_training_method_is_a_rung():
    study = Planted(samples={clipping(2): 0.8, clipping(4): 0.5})
    incumbents = searched_training(study)
    assert [str(recipe) for recipe in incumbents.recipes] == ["baseline", clipping(2), clipping(4)]
    assert study.noted("training") == [clipping(norm + 1) for norm in range(4 + TRAINING_LOSSES)]


@pytest.mark.parametrize(
    ("samples", "faster", "kept"), [(1.0, 1.0, False), (0.995, 1.0, False), (1.0, 1.3, True), (0.9, 1.0, True)]
)
def test_as_many_samples_have_to_be_faster_by_pace_not_by_the_luck_of_a_stopwatch(samples, faster, kept):
    study = Planted(samples={clipping(1): samples}, faster={clipping(1): faster}, luck={clipping(1): 1.1})
    incumbents = searched_training(study, replace(CLIPPING, presets=CLIPPING.presets[:1]))
    assert (str(incumbents.best) == clipping(1)) is kept
    assert bool(study.kinds("speed")) is (samples > 0.99)


@pytest.mark.parametrize(("better", "luck", "kept"), [(1.5, 0.98, True), (0.5, 0.98, False), (1.5, 0.9, False)])
def test_of_two_that_are_there_as_soon_the_one_that_ends_better_is_kept(better, luck, kept):
    study = Planted(
        samples={clipping(1): 0.5, clipping(2): 0.5}, better={clipping(2): better * MARGIN}, luck={clipping(2): luck}
    )
    incumbents = searched_training(study, replace(CLIPPING, presets=CLIPPING.presets[:2]))
    assert (str(incumbents.best) == clipping(2)) is kept


def test_many_that_are_nearly_as_soon_do_not_add_up():
    """A better final metric may cost 5 % of the time once, not again for each further improvement."""
    presets = CLIPPING.presets[:7]
    study = Planted(
        samples={clipping(norm): 0.5 for norm in range(1, 8)},
        better={clipping(norm): 2 * norm * MARGIN for norm in range(1, 8)},
        luck={clipping(norm): 0.97 ** (norm - 1) for norm in range(1, 8)},
    )
    assert str(searched_training(study, replace(CLIPPING, presets=presets)).best) == clipping(2)


def test_a_setting_that_changes_nothing_is_not_kept_for_being_lucky():
    study = Planted(samples={clipping(2): 0.9, clipping(3): 0.9}, faster={clipping(3): 1.3}, spread=0.0)
    incumbents = searched_training(study, replace(CLIPPING, presets=CLIPPING.presets[:3]))
    assert str(incumbents.best) == clipping(2)
    assert study.trials[-1]["why"] == "trains exactly as a setting that was tried before"
    assert len([what for what in study.kinds("run") if what.startswith(clipping(3))]) == 1


def test_a_training_method_without_its_promised_effect_is_out_at_once():
    study = Planted(samples={clipping(1): 0.5, clipping(2): 0.5}, refuted=(clipping(1),))
    assert searched_training(study).recipes == [Recipe()]
    assert study.noted("training") == [clipping(1)]


@pytest.mark.parametrize(("budget", "seeds"), [(1e6, BASELINE_SEEDS), (20 * TRIAL, BASELINE_SEEDS), (12 * TRIAL, 1)])
def test_further_seeds_are_run_where_they_can_be_afforded(budget, seeds):
    study = Planted(samples={clipping(1): 0.5}, budget=Budget(budget))
    searched_training(study, replace(CLIPPING, presets=CLIPPING.presets[:1]))
    assert sum(what.startswith(clipping(1)) for what in study.kinds("run")) == seeds


def test_what_may_be_faster_is_compared_for_longer_on_a_restless_machine():
    study, incumbents = Planted(faster={threads(2): 1.2, threads(3): 1.03}, restless=True), Incumbents()
    search_systems(study, incumbents, [replace(THREADS, presets=({"count": 2}, {"count": 3}))], SAMPLES, 5.0)
    assert str(incumbents.best) == threads(2)
    assert study.kinds("speed") == [
        f"{threads(2)} against baseline",
        f"{threads(2)} against baseline, longer",
        f"{threads(3)} against baseline",
    ]
