"""The largest batch that a saving of memory makes possible: decisions from measured figures, without a GPU."""

import math

import pytest

from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.tuning.budget import Budget
from hasten.tuning.largest_batch import (
    fitting_factor,
    larger_batch_recipes,
    largest_batch_compositions,
    memory_savers,
)
from hasten.tuning.study import Study
from hasten.tuning.systems import candidate, conflict_reason
from hasten.tuning.trial_store import TrialStore

GB = 10**9
GPU = frozenset({"cuda", "repeated_blocks", "matrix_weights"})
SAVERS = "activation_checkpointing + expandable_segments"
LARGER = candidate("batch_size")


def peak(step: float, between: float = 10, available: float = 80) -> dict:
    """The peak of a rank whose step takes ``step`` GB beside the ``between`` GB of weights and optimizer state."""
    return {
        "device": "cuda:0",
        "allocated": (between + step) * GB,
        "reserved": (between + step) * GB,
        "current": between * GB,
        "available": available * GB,
    }


@pytest.mark.parametrize(
    ("peaks", "samples", "factor"),
    [
        ([peak(20)], math.inf, 2),  # 95 % of 80 GB less 10 are 66: 3.3 times as large
        ([peak(60)], math.inf, 1),
        ([peak(60 / 8)], math.inf, 8),
        ([peak(60 / 8)], 32 * 6, 4),  # the data have six batches
        ([peak(60 / 8)], 20, 1),  # ... or less than one
        ([peak(5), peak(20)], math.inf, 2),  # the rank that needs the most decides
        ([{"device": "cpu", "resident": GB, "current": GB, "available": 9 * GB}], math.inf, 1),
    ],
)
def test_batch_is_multiplied_as_far_as_memory_and_data_allow(peaks, samples, factor):
    ranks = len(peaks)
    assert fitting_factor(32 * ranks, peaks, samples * ranks) == factor


def test_savers_are_the_bit_exact_methods_that_can_act():
    assert str(memory_savers(GPU)) == SAVERS
    assert str(memory_savers(GPU - {"repeated_blocks"})) == "expandable_segments"
    assert not memory_savers(frozenset({"cpu"}))


def test_batch_that_only_the_savers_make_possible_is_tried_with_them_by_each_rule():
    recipes = larger_batch_recipes(LARGER, memory_savers(GPU), without=2, with_savers=8)
    rules = [{"factor": 8, "rule": rule} for rule in ("sqrt", "linear")]
    assert recipes == [Recipe.parse(SAVERS).with_method("batch_size", **options) for options in rules]
    assert not any(map(conflict_reason, recipes))


@pytest.mark.parametrize(("without", "with_savers"), [(4, 4), (8, 4), (1, 1)])
def test_batch_that_fits_anyway_is_left_to_the_larger_batch_alone(without, with_savers):
    assert larger_batch_recipes(LARGER, memory_savers(GPU), without, with_savers) == []


@pytest.mark.slow
def test_memory_of_a_recipe_is_measured_once_and_proposes_nothing_on_the_cpu(tmp_path):
    study = Study(TaskRef("digits"), "cpu", TrialStore(tmp_path, {}), Budget(60.0), no_progress)
    plan = study.memory_plan(Recipe.parse("in_memory_batches"))
    assert plan["batch_size"] == 32 and plan["peak_memory"][0]["resident"] > 50e6
    assert study.memory_plan(Recipe.parse("in_memory_batches")) == plan
    assert fitting_factor(32, plan["peak_memory"], math.inf) == 1
    assert largest_batch_compositions(study, Recipe(), [LARGER], frozenset({"cpu"}), 1000) == []
