"""Leave-one-out ablation: which members stay in a recipe, and what each contributes. Measurements are planted."""

import pytest

from hasten.core.recipe import Recipe
from hasten.tuning.ablation import contributions, leave_one_out
from hasten.tuning.systems import Incumbents
from helpers.planted_study import MARGIN, SAMPLES, TRIAL, Planted, baseline_of, clipping, frozen, threads


def test_ablation_at_the_end_of_the_budget_keeps_its_measurements():
    recipe = Recipe.coerce(f"{threads(2)} + {clipping(1)} + fused_optimizer")
    study = Planted(
        faster={threads(2): 1.5, "fused_optimizer": 1.2}, samples={clipping(1): 0.5}, budget=frozen(3 * TRIAL)
    )
    measured = [share["method"] for share in leave_one_out(study, Incumbents([Recipe(), recipe]), SAMPLES)]
    assert 0 < len(measured) < 3
    ample = Planted(faster=study.faster, samples=study.samples)
    assert {
        share["method"]: round(share["speedup"]["median"], 1)
        for share in leave_one_out(ample, Incumbents([Recipe(), recipe]), SAMPLES)
    } == {"num_threads": 1.5, "fused_optimizer": 1.2, "gradient_clipping": 2.0}


def test_ablation_removes_members_without_a_gain():
    recipe = Recipe.coerce(f"{threads(2)} + fused_optimizer")
    study, incumbents = Planted(faster={threads(2): 1.5}), Incumbents([Recipe(), recipe])
    assert [share["method"] for share in leave_one_out(study, incumbents, SAMPLES)] == ["num_threads"]
    assert str(incumbents.best) == threads(2)
    assert study.trials[-1]["verdict"] == "left out"


def test_ablation_removes_members_whose_share_is_in_doubt():
    recipe = Recipe.coerce(f"{threads(2)} + fused_optimizer")
    study = Planted(faster={threads(2): 2.0, "fused_optimizer": 1.04}, restless=True)  # 1.04x (0.83 to 1.30)
    incumbents = Incumbents([Recipe(), recipe])
    assert [share["method"] for share in leave_one_out(study, incumbents, SAMPLES)] == ["num_threads"]
    assert "no proven share" in study.trials[-1]["why"]


@pytest.mark.parametrize(("step", "is_repeated"), [(0.05, True), (0.2, False)])
def test_ablation_repeats_a_comparison_only_if_several_rounds_fit(step, is_repeated):
    recipe = Recipe.coerce(f"{threads(2)} + fused_optimizer")
    study = Planted(faster={threads(2): 1.2, "fused_optimizer": 1.2}, restless=True, step_seconds=step)
    rows = contributions(study, recipe, SAMPLES)
    assert [what.endswith("longer") for what in study.kinds("speed")] == ([False, True] if is_repeated else [False]) * 2
    assert all((row["speedup"]["low"] > 1) == is_repeated for row in rows)


def test_ablation_keeps_exact_members_that_are_probably_faster_since_together_they_are():
    recipe = Recipe.coerce(f"{threads(2)} + fused_optimizer")
    faster = {threads(2): 2.0, "fused_optimizer": 1.04}
    study, incumbents = Planted(faster=faster, doubt=0.09), Incumbents([Recipe(), recipe])
    leave_one_out(study, incumbents, SAMPLES)
    assert incumbents.best == recipe
    little = Planted(faster=faster | {"fused_optimizer": 1.01}, doubt=0.09)
    leave_one_out(little, incumbents, SAMPLES)
    assert str(incumbents.best) == threads(2)


@pytest.mark.parametrize(("gain", "stays"), [(1.24, True), (1.1, False)])
def test_ablation_keeps_exact_members_in_a_wide_interval_that_lies_mostly_above_1(gain, stays):
    recipe = Recipe.coerce(f"{threads(2)} + fused_optimizer")
    study = Planted(faster={threads(2): 2.0, "fused_optimizer": gain}, doubt=0.25)
    incumbents = Incumbents([Recipe(), recipe])
    leave_one_out(study, incumbents, SAMPLES)
    assert (incumbents.best == recipe) is stays


def test_ablation_keeps_members_that_end_better_only():
    recipe = Recipe.coerce(f"{threads(2)} + {clipping(1)}")
    study = Planted(faster={threads(2): 1.5}, better={clipping(1): 2 * MARGIN})
    incumbents = Incumbents([Recipe(), recipe])
    leave_one_out(study, incumbents, SAMPLES, baseline_of(study))
    assert incumbents.best == recipe


def test_share_of_the_length_of_a_training_is_known_without_the_whole_training():
    length = "budgeted_schedule:factor=0.5"
    study, recipe = Planted(faster={threads(2): 1.5}, samples={length: 0.5}), Recipe.coerce(f"{threads(2)} + {length}")
    rows = leave_one_out(study, Incumbents([Recipe(), recipe]), SAMPLES, baseline_of(study))
    share = {row["method"]: row["speedup"] for row in rows}["budgeted_schedule"]
    assert share["low"] > 1 and not [what for what in study.kinds("run") if what.startswith(f"{threads(2)},")]


def test_share_of_an_exact_member_needs_no_further_run_of_the_recipe():
    """The run on another seed than the first shows as well how many samples the recipe trains."""
    recipe = Recipe.coerce(f"fused_optimizer + {clipping(1)}")
    study = Planted(faster={"fused_optimizer": 1.2}, samples={clipping(1): 0.5})
    study.run(recipe, 7)
    [first, _] = contributions(study, recipe, SAMPLES)
    assert first["method"] == "fused_optimizer" and first["speedup"]["median"] == pytest.approx(1.2)
    assert [kind for kind, _ in study.asked[:2]] == ["run", "speed"]


def test_ablation_keeps_members_that_gain_by_step_time_only():
    """As DiLoCo does: equally many samples, a slightly worse final metric, and much faster steps."""
    recipe = Recipe.coerce(f"{threads(2)} + {clipping(1)}")
    study = Planted(faster={threads(2): 1.5, clipping(1): 3.0}, better={clipping(1): -0.01})
    incumbents = Incumbents([Recipe(), recipe])
    speedups = {
        share["method"]: share["speedup"] for share in leave_one_out(study, incumbents, SAMPLES, baseline_of(study))
    }
    assert incumbents.best == recipe
    assert (
        speedups["gradient_clipping"]["median"] == pytest.approx(3.0)
        and speedups["gradient_clipping"]["low"] is not None
    )
    study = Planted(faster={threads(2): 1.5}, better={clipping(1): -0.01})
    leave_one_out(study, incumbents, SAMPLES, baseline_of(study))
    assert str(incumbents.best) == threads(2)


def test_ablation_keeps_a_member_whose_steps_are_faster_though_the_target_comes_later():
    """As a larger batch does: the same samples in less time, the target after more of them."""

    class Later(Planted):
        def run(self, recipe, seed, *limits, **more):
            run = super().run(recipe, seed, *limits, **more)
            later = 1.3 if clipping(1) in str(recipe) else 1.0
            return run | {key: later * run[key] for key in ("samples_to_target", "seconds_to_target") if run[key]}

    recipe = Recipe.coerce(f"{threads(2)} + {clipping(1)}")
    study = Later(faster={threads(2): 1.5, clipping(1): 1.25})
    incumbents = Incumbents([Recipe(), recipe])
    leave_one_out(study, incumbents, SAMPLES, baseline_of(study))
    assert incumbents.best == recipe


def test_setting_with_faster_but_more_steps_is_judged_by_total_time():
    """1.5 times the speed, and 1.5 times as many samples."""
    recipe = Recipe.coerce(f"{threads(2)} + {clipping(1)}")
    study = Planted(faster={threads(2): 1.5, clipping(1): 1.5}, samples={clipping(1): 1.5}, better={clipping(1): -0.01})
    incumbents = Incumbents([Recipe(), recipe])
    leave_one_out(study, incumbents, SAMPLES, baseline_of(study))
    assert str(incumbents.best) == threads(2)
