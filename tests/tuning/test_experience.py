"""Compositions from the records: the table is up to date, and what it suggests fits the task."""

import importlib.util
import itertools
import tomllib
from pathlib import Path

import pytest

from hasten.core.card import FACTS
from hasten.core.recipe import Recipe
from hasten.engine.composition import check_conflicts
from hasten.engine.registry import make_methods, method_class
from hasten.tuning import experience

ROOT = Path(__file__).resolve().parents[2]
SHORT_STEPS = {"input": 0.3, "forward": 0.1, "backward": 0.1, "optimizer_step": 0.2}
ALL_ARITHMETIC = {"forward": 0.3, "backward": 0.6, "optimizer_step": 0.06}
# not in the table, which lists what tells tasks apart
OF_MOST_TASKS = {"multiple_epochs", "matrix_weights", "unfused_optimizer"}
IMAGES = {"cpu", "convolutions", "indexed_samples", "matrix_weights", "unfused_optimizer"}


@pytest.fixture(scope="module")
def make_experience():
    spec = importlib.util.spec_from_file_location("_make_experience", ROOT / "benchmarks" / "make_experience.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_equals_what_the_script_makes_of_the_records(make_experience):
    assert experience.TABLE.read_text() == make_experience.table(), "run benchmarks/make_experience.py"


def test_table_names_no_workload():
    text = experience.TABLE.read_text().lower()
    workloads = {path.stem for path in (ROOT / "src/hasten/workloads").glob("*.py")} - {"__init__", "_data"}
    assert len(workloads) > 4 and not [name for name in workloads | {"slow_network"} if name in text]


def test_table_counts_no_withdrawn_method(make_experience):
    assert make_experience._withdrawn("digits", "2026-11-22") == {"compile"}
    assert make_experience._withdrawn("digits", "2026-11-24") == set()
    result = {"verdict": "faster", "recipe": {"compile": {}, "ema": {}}, "contributions": []}
    assert make_experience._winner(result, "digits", "2026-11-22") is None
    assert make_experience._winner(result, "digits", "2026-11-24") == Recipe(result["recipe"])


def test_winner_loses_members_without_a_share_of_their_own(make_experience):
    shares = {
        "ema": {"median": 1.2, "low": 0.3, "high": 4.0},
        "znorm": {"median": 1.3, "low": 1.1, "high": 1.5},
        "fused_optimizer": {"median": 1.01, "low": None, "high": None},
    }
    contributions = [{"method": name, "speedup": share} for name, share in shares.items()]
    result = {"verdict": "faster", "recipe": {name: {} for name in shares}, "contributions": contributions}
    assert make_experience._winner(result, "digits", "2026-11-24") == Recipe({"znorm": {}})


def test_compositions_are_valid_for_every_set_of_facts():
    """Every recipe can be built, has no conflict, and consists of methods that apply."""
    words = ("convolutions", "repeated_blocks", "indexed_samples", "distributed", "matrix_weights", "workers")
    for count in range(len(words) + 1):
        for facts in itertools.combinations(words, count):
            for device, phases in itertools.product(("cpu", "cuda:0"), (SHORT_STEPS, ALL_ARITHMETIC, {})):
                recipes = experience.compositions(facts, phases, device)
                assert len({str(recipe) for recipe in recipes}) == len(recipes)
                for recipe in recipes:
                    check_conflicts(make_methods(recipe))
                    for name in recipe.methods:
                        holds = {*facts, device.partition(":")[0]}
                        assert method_class(name).card.applies_to & FACTS.keys() <= holds, (name, facts)


def test_most_similar_task_comes_first():
    rows = tomllib.loads(experience.TABLE.read_text())["composition"]
    for row in rows:
        words = set(row["facts"])
        phases = {phase: 0.5 for phase, word in experience.LARGE_PHASES.items() if word in words}
        best = experience.compositions(words & FACTS.keys() | OF_MOST_TASKS, phases, "cpu")[0]
        same_kind = [other["recipe"] for other in rows if set(other["facts"]) == words]
        assert str(best) in same_kind


def test_images_get_an_exact_and_a_full_composition():
    recipes = experience.compositions(IMAGES, {"input": 0.3, "forward": 0.3, "backward": 0.4}, "cpu")
    exact = [recipe for recipe in recipes if experience.is_exact(recipe)]
    assert exact and len(exact) < len(recipes)
    assert {"channels_last", "in_memory_batches"} <= exact[0].methods.keys()


def test_exact_part_keeps_the_exact_methods_of_a_full_composition():
    full = Recipe.parse("batch_size:factor=4 + budgeted_schedule:factor=0.5 + fused_optimizer + in_memory_batches")
    assert str(experience.exact_part(full)) == "fused_optimizer + in_memory_batches"


def test_stream_gets_no_method_that_reads_by_index():
    recipes = experience.compositions({"cpu"}, SHORT_STEPS, "cpu")
    assert recipes and not any("in_memory_batches" in recipe.methods for recipe in recipes)


def test_single_process_gets_no_distributed_method():
    distributed = experience.compositions({"cpu", "distributed", "indexed_samples"}, ALL_ARITHMETIC, "cpu")
    single = experience.compositions({"cpu", "indexed_samples"}, ALL_ARITHMETIC, "cpu")
    assert distributed and not {str(recipe) for recipe in distributed} & {str(recipe) for recipe in single}
