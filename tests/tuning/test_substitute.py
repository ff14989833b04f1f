"""The exact recipe that trains in place of the original on further seeds of a confirmation. Outcomes are planted."""

import pytest

from hasten.benchmarking.ratio import Ratio
from hasten.core.recipe import Recipe
from hasten.engine import registry
from hasten.tuning.confirm import confirm, fresh_seeds, quality_risks
from hasten.tuning.confirmation import SUBSTITUTED
from hasten.tuning.finding import Finding
from hasten.tuning.training import Baseline, Substitute
from hasten.tuning.training_stage import _substitute
from helpers.planted_trainings import FASTER, MARGIN, TARGET, PlantedTrainings

EXACT = Recipe({"channels_last": {}})


def substituted(study: PlantedTrainings, recipe: Recipe):
    """``recipe``, confirmed against two runs of the original and, on further seeds, the exact recipe."""
    seeds = fresh_seeds(0, 2)
    runs = [study.run(Recipe(), seed) for seed in seeds]
    baseline = Baseline([0, 1], runs, TARGET, MARGIN, True, seeds, substitute=Substitute(EXACT, 2.0))
    return confirm(study, [recipe], baseline, 5.0)[0]


COST = {"baseline": 10.0, str(EXACT): 5.0, str(FASTER): 2.0}


def test_confirm_trains_the_exact_recipe_in_place_of_the_original_on_further_seeds():
    study = PlantedTrainings({"baseline": 0.9, str(EXACT): 0.9, str(FASTER): 0.9}, cost=COST)
    done = substituted(study, FASTER)
    assert done.passed and done.speedup.median == pytest.approx(5.0, rel=0.01)
    assert study.seeds_of(Recipe()) == fresh_seeds(0, 2)
    assert study.seeds_of(EXACT) == fresh_seeds(0, 3)[::2], "the first one shows that it ends as well"
    assert f"on 1 of these seeds {EXACT}" in done.gate.why


@pytest.mark.parametrize(("speedup", "is_used"), [(1.05, False), (1.5, True)])
def test_exact_recipe_that_would_save_no_time_trains_nothing_in_place_of_the_original(speedup, is_used):
    """Of 10 further seeds it saves 10 runs, and takes 11 of its own: one more shows that it ends as well."""
    study = PlantedTrainings({"baseline": 0.9, str(EXACT): 0.9, str(FASTER): 0.9}, cost=COST)
    seeds = fresh_seeds(0, 2)
    runs = [study.run(Recipe(), seed) for seed in seeds]
    baseline = Baseline([0, 1], runs, TARGET, MARGIN, True, seeds, substitute=Substitute(EXACT, speedup))
    assert confirm(study, [FASTER], baseline, 5.0)[0].passed and bool(study.seeds_of(EXACT)) == is_used


def test_confirm_compares_measured_seconds_with_those_of_the_original_alone():
    """Both recipes pay 3 s a run for something that no block shows."""
    metric = {"baseline": 0.9, str(EXACT): 0.9, str(FASTER): 0.887}
    study = PlantedTrainings(metric, spread=0.006, cost=COST, unseen={str(EXACT): 3.0, str(FASTER): 3.0})
    done = substituted(study, FASTER)
    assert sum(SUBSTITUTED in run for run in done.baseline_runs.values()) > 2
    assert done.uses_measured and done.speedup.median == pytest.approx(10 / 5, rel=0.01)


@pytest.mark.parametrize("metric", [0.88, 0.79])  # worse by two margins, and below the target
def test_confirm_drops_an_exact_recipe_that_ends_worse(metric):
    study = PlantedTrainings({"baseline": 0.9, str(EXACT): metric, str(FASTER): 0.88}, cost=COST)
    done = substituted(study, FASTER)
    assert not done.passed and study.seeds_of(EXACT) == fresh_seeds(0, 1)


def test_confirm_runs_the_original_where_the_exact_recipe_fails():
    class Failing(PlantedTrainings):
        def run(self, recipe, seed):
            return {"failed": "planted"} if recipe == EXACT else super().run(recipe, seed)

    study = Failing({"baseline": 0.9, str(FASTER): 0.9})
    assert substituted(study, FASTER).passed and study.seeds_of(Recipe()) == fresh_seeds(0, 3)


def test_confirm_uses_a_run_of_the_original_that_is_there():
    study = PlantedTrainings({"baseline": 0.9, str(EXACT): 0.9, str(FASTER): 0.9}, cost=COST)
    study.stored = ((str(Recipe()), fresh_seeds(0, 3)[2]),)
    substituted(study, FASTER)
    assert study.seeds_of(Recipe()) == fresh_seeds(0, 3) and not study.seeds_of(EXACT)


def test_substitute_is_exact_and_of_hastens_own_methods():
    ratio = Ratio(2.0, 1.9, 2.1)
    of_user, own = Recipe({"./mine.py:Exact": {}}), Finding(EXACT, "exact", ratio, "")
    assert _substitute([Finding(of_user, "exact", Ratio(4.0, 3.9, 4.1), ""), own]) == Substitute(EXACT, 2.0)
    assert _substitute([Finding(EXACT, "estimated", ratio, "")]) is None


def test_exact_method_of_another_package_is_not_trusted(monkeypatch):
    assert not quality_risks(EXACT)
    monkeypatch.setattr(registry, "_installed", lambda: {"channels_last": None})
    assert quality_risks(EXACT) == EXACT


@pytest.mark.parametrize(("metrics", "trains"), [((0.9, 0.9), True), ((0.9, 0.9004), False)])
def test_confirm_drops_a_substitute_whose_bits_are_not_those_that_it_claims(metrics, trains):
    same_bits = Recipe({"in_memory_batches": {}})
    metric = {"baseline": metrics[0], str(same_bits): metrics[1], str(FASTER): 0.9}
    study = PlantedTrainings(metric, spread=0.0, cost={**COST, str(same_bits): 5.0})
    seeds = fresh_seeds(0, 2)
    runs = [study.run(Recipe(), seed) for seed in seeds]
    baseline = Baseline([0, 1], runs, TARGET, MARGIN, True, seeds, substitute=Substitute(same_bits, 2.0))
    confirm(study, [FASTER], baseline, 5.0)
    assert (len(study.seeds_of(same_bits)) > 1) is trains
