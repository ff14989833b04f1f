"""The joint search of schedule options: its points, how it halves them, and what becomes an incumbent."""

import math
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hasten.core.recipe import Recipe
from hasten.engine.effects import NO_EFFECT
from hasten.engine.tasks import TaskRef
from hasten.reporting.view_model import NOT_DONE
from hasten.tuning import training_stage
from hasten.tuning.budget import Budget, OutOfBudgetError
from hasten.tuning.joint_search import POINTS, Space, add_lengthened, search_jointly, shorten, split_joint
from hasten.tuning.result import SearchState
from hasten.tuning.systems import Incumbents, candidate
from hasten.tuning.training import (
    SOONER,
    Baseline,
    first_outcome,
    push_if_it_saves_time,
    run_seeds,
    search_training,
    try_training_composition,
)
from hasten.tuning.training_stage import _easiest_to_prove
from hasten.tuning.varied_arguments import with_varied
from hasten.utils.search_range import SearchRange
from helpers.planted_study import THREADS, frozen

ITEMS = [candidate("budgeted_schedule"), candidate("batch_size")]
TARGET, METRIC, MARGIN, SAMPLES, SECONDS = 0.9, 0.95, 0.01, 10_000, 100.0
BEST_PEAK = 8.0


@dataclass
class Simulated:
    """A training that ends well if it is long enough, and the longer the further its peak is from BEST_PEAK.

    Larger batches make it up to twice as fast.
    """

    shortest: float = 0.15  # length that ends as well as the task, at the best peak
    budget: Budget = field(default_factory=lambda: frozen(1e6))
    seed: int = 0
    task: TaskRef = TaskRef("simulated")  # noqa: RUF009  # it is frozen
    idle: str = ""  # a method without an effect
    needs: str = ""  # a method without which trainings end worse
    ran: list[tuple[str, int]] = field(default_factory=list)
    trials: list[dict] = field(default_factory=list)

    def run(self, recipe: Recipe, seed: int, time_limit: float | None = None) -> dict:
        if (str(recipe), seed) not in self.ran:
            self.ran.append((str(recipe), seed))
            self.budget.check()
        if self.idle in recipe.methods:
            return {"failed": f"{self.idle} {NO_EFFECT}: planted", "trial_seconds": 1.0}
        schedule = recipe.methods.get("budgeted_schedule", {"factor": 1.0, "peak": BEST_PEAK})
        length, off = schedule["factor"], abs(math.log2(schedule.get("peak", BEST_PEAK) / BEST_PEAK))
        batch = recipe.methods.get("batch_size", {"factor": 1})["factor"]
        end = METRIC - 0.05 * max(0.0, math.log2(self.shortest * (1 + off) / length)) if recipe else METRIC
        end -= 0.05 * bool(recipe and self.needs and self.needs not in recipe.methods)
        samples, seconds = int(SAMPLES * length), SECONDS * length / (2 - 1 / batch)
        looks = [
            {"samples": n * samples // 10, "seconds": n * seconds / 10, "metric": end - 0.01 * (10 - n)}
            for n in range(1, 11)
        ]
        held = next((row for row in looks if row["metric"] >= TARGET), None)
        self.budget.charged += seconds
        return {
            "metric": end + 1e-4 * (seed % 7),
            "evaluations": looks,
            "seconds": seconds,
            "samples": samples,
            "trial_seconds": seconds,
            "pruned": False,
            "seconds_to_target": held and held["seconds"],
            "samples_to_target": held and held["samples"],
        }

    def compare_speed(self, *_: Any, **__: Any) -> dict:
        return {"verdict": "faster", "trial_seconds": 0.0}

    def check_exactness(self, *_: Any) -> dict:
        return {"passed": True, "why": "planted", "trial_seconds": 0.0}

    def note(self, what: str, stage: str, verdict: str, why: str, **_: Any) -> None:
        self.trials.append({"what": what, "verdict": verdict, "why": why})


def searched(study: Any, items: Any = ITEMS) -> list[Recipe]:
    seeds = [0, 1, 2]
    runs = [study.run(Recipe(), seed) for seed in seeds]
    baseline = Baseline(seeds, runs, TARGET, MARGIN, True, seeds)
    incumbents = Incumbents()
    search_jointly(study, incumbents, items, baseline, first_outcome(baseline))
    return incumbents.recipes


def test_joint_search_finds_a_short_training_near_the_best_peak():
    study = Simulated(shortest=0.3)
    *_, best = searched(study)
    schedule = best.methods["budgeted_schedule"]
    assert schedule["factor"] <= 0.64
    assert BEST_PEAK / 3 < schedule["peak"] < 3 * BEST_PEAK
    first_length = {text for text, _ in study.ran if "factor=0.16" in text}
    assert POINTS[0] <= len(first_length) <= POINTS[1]
    longer = {text for text, _ in study.ran if "factor=0.32" in text}
    assert len(longer) == len(first_length) // 2 + 1, "the better half, and one point between the two best"


@pytest.mark.parametrize(("shortest", "most"), [(0.35, 0.5), (0.6, 0.64)])
def test_next_length_is_as_much_longer_as_the_best_point_needs(shortest, most):
    """At 0.32 it nearly ends well, or misses much: the gain of the last doubling says by how much it must grow."""
    study = Simulated(shortest=shortest)
    searched(study)
    lengths = sorted({float(text) for text in re.findall(r"factor=([\d.]+),peak", str(study.ran))})
    assert lengths[:2] == [0.16, 0.32] and most - 0.12 < lengths[2] <= most


def test_composition_keeps_the_shorter_length_of_the_best_recipe():
    """A longer training cannot be faster: only what else the composition brings is worth a trial."""
    study, seeds = Simulated(shortest=0.3), [0, 1, 2]
    baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)
    short = Recipe({"budgeted_schedule": {"factor": 0.32, "peak": BEST_PEAK}})
    best = run_seeds(study, short, first_outcome(baseline), baseline, [])
    for tried in (["budgeted_schedule:factor=0.5,peak=9", "ema"], ["budgeted_schedule:factor=0.64"]):
        incumbents = Incumbents([Recipe(), short])
        try_training_composition(study, incumbents, best, Recipe.parse(tried), baseline, lambda recipe, outcome: [])
    assert {text for text, _ in study.ran} == {"baseline", str(short), str(short | Recipe.parse("ema"))}


@pytest.mark.parametrize(("length", "starts"), [(0.64, True), (0.32, False)])
def test_joint_search_starts_where_two_lengths_are_shorter_than_the_best_recipe(length, starts):
    """One that fits only its shortest length would end at trainings too short to learn anything."""
    study, seeds = Simulated(shortest=0.3), [0, 1, 2]
    baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)
    recipe = Recipe({"budgeted_schedule": {"factor": length, "peak": BEST_PEAK}})
    best = run_seeds(study, recipe, first_outcome(baseline), baseline, [])
    assert Space(ITEMS).shortens(best, baseline) == starts


@pytest.mark.parametrize("is_needed", [True, False])
def test_method_that_is_in_or_out_wins_where_trainings_end_better_with_it(is_needed):
    study = Simulated(shortest=0.3, needs="muon" if is_needed else "")
    *_, best = searched(study, [*ITEMS, candidate("muon")])
    trained = {"muon" in text for text, _ in study.ran if text != "baseline"}
    assert trained == {True, False} and ("muon" in best.methods or not is_needed)


def test_method_without_an_effect_leaves_all_points():
    study = Simulated(shortest=0.3, idle="muon")
    *_, best = searched(study, [*ITEMS, candidate("muon")])
    assert best and "muon" not in best.methods
    assert [trial["verdict"] for trial in study.trials].count("no effect") == 1


def test_short_training_that_was_lucky_on_two_seeds_is_refused_by_further_cheap_runs():
    class Lucky(Simulated):
        def run(self, recipe, seed, **limits):
            run = super().run(recipe, seed, **limits)
            return run | {"metric": run["metric"] - (seed > 1000) * 1.2 * MARGIN} if recipe else run

    seeds, recipe = [0, 1000], Recipe({"budgeted_schedule": {"factor": 0.15, "peak": BEST_PEAK}})
    for study, verdict in ((Simulated(), "kept"), (Lucky(), "refused")):
        baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)
        outcome = run_seeds(study, recipe, first_outcome(baseline), baseline, [])
        assert (outcome.verdict, len(outcome.runs)) == (verdict, 5)


def test_shorten_finds_the_least_length_that_ends_as_well():
    study, seeds = Simulated(shortest=0.3), [0, 1, 2]
    baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)
    whole = first_outcome(baseline)
    recipe = Recipe({"budgeted_schedule": {"factor": 0.64, "peak": BEST_PEAK}})
    won = shorten(study, ITEMS, baseline, recipe, run_seeds(study, recipe, whole, baseline, []))
    lengths = [recipe.methods["budgeted_schedule"]["factor"] for recipe, _ in won]
    assert lengths == [0.45, 0.32], "each is a recipe to fall back on"
    assert won[-1][1].gain_over(whole) == pytest.approx(1 / 0.32, rel=0.01)
    assert not shorten(study, [candidate("muon")], baseline, recipe, whole), "nothing sets its length"


class SlowSteps(Simulated):
    """muon makes steps 1.4 times slower, and reaches the target after half of the training."""

    def compare_speed(self, *_, **__):
        return {"verdict": "slower", "trial_seconds": 0.0}

    def run(self, recipe, seed, **limits):
        run, has_muon = super().run(recipe, seed, **limits), "muon" in recipe.methods
        rows = [
            {**row, "seconds": (1 + 0.4 * has_muon) * row["seconds"], "metric": row["metric"] + 0.05 * has_muon}
            for row in run["evaluations"]
        ]
        held = next((row for row in rows if row["metric"] >= TARGET + 0.045), None)
        reached = {f"{unit}_to_target": held and held[unit] for unit in ("seconds", "samples")}
        return run | reached | {"metric": rows[-1]["metric"], "seconds": rows[-1]["seconds"], "evaluations": rows}


@pytest.mark.parametrize("can_shorten", [True, False])
def test_method_in_slower_steps_saves_time_only_by_a_shorter_training(can_shorten):
    study, seeds, incumbents = SlowSteps(shortest=0.3), [0, 1, 2], Incumbents()
    baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET + 0.045, MARGIN, True, seeds)

    def shortened(recipe, outcome):
        return shorten(study, ITEMS, baseline, recipe, outcome) if can_shorten else []

    muon, whole = candidate("muon"), first_outcome(baseline)
    best = search_training(study, incumbents, [muon], baseline, whole, shortened)
    if can_shorten:
        lengths = [recipe.methods["budgeted_schedule"]["factor"] for recipe in incumbents.recipes if recipe]
        assert lengths[0] < 0.6 and lengths == sorted(lengths, reverse=True) and best.gain_over(whole) > 2
    else:
        assert incumbents.best == Recipe() and best is whole
        assert SOONER in study.trials[-1]["why"] and study.trials[-1]["verdict"] == "no gain"


def test_recipe_is_not_lost_where_the_budget_ends_while_its_training_is_shortened():
    class Ending(Simulated):
        def run(self, recipe, seed, **limits):
            if "budgeted_schedule" in recipe.methods:
                raise OutOfBudgetError
            return super().run(recipe, seed, **limits)

    study, seeds, incumbents = Ending(shortest=0.3), [0, 1, 2], Incumbents()
    baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)
    first, recipe = first_outcome(baseline), Recipe.parse(["ema"])
    outcome = run_seeds(
        study, recipe, replace(first, runs=(first.runs[0] | {"seconds_to_target": 99.0},)), baseline, []
    )

    def shortened(recipe, outcome):
        return shorten(study, ITEMS, baseline, recipe, outcome)

    found = push_if_it_saves_time(study, incumbents, recipe, outcome, first, "ema", shortened)
    assert found is outcome and incumbents.best == recipe


def test_every_length_of_a_script_is_shortened_together():
    (item,) = with_varied([candidate("script_arguments")], {"max_iters": 2000, "lr_decay_iters": 1900, "lr": 0.1})
    space, recipe = Space([item]), Recipe.parse(["ema"])
    shorter = space.with_length(recipe, 0.5)
    assert shorter.methods == {**recipe.methods, "script_arguments": {"max_iters": 1000, "lr_decay_iters": 950}}
    assert space.length_in(shorter) == 0.5 and space.length_in(recipe) == 1


def few_runs() -> Baseline:
    """Three runs of the task, on whose seeds the search does not train."""
    runs = [{"metric": METRIC + difference} for difference in (-0.003, 0.0, 0.003)]
    return Baseline([0, 1, 2], runs, TARGET, MARGIN, True, [0, 1, 2])


@pytest.mark.parametrize(("factor", "longer"), [(0.15, 0.3), (0.32, 0.64), (0.4, None)])
def test_lengthened_recipe_trains_twice_as_long_within_the_range(factor, longer):
    recipe = Recipe({"budgeted_schedule": {"factor": factor, "peak": 8.0}, "batch_size": {"factor": 4}})
    between, whole = recipe.with_method("budgeted_schedule", factor=1.4 * factor, peak=8.0), Recipe.parse("ema")
    recipes = [whole, between, recipe]
    found = add_lengthened(recipes, ITEMS, few_runs(), lambda recipe: [])
    assert found == (longer and recipe.with_method("budgeted_schedule", factor=longer, peak=8.0))
    assert recipes == [whole, *([found] if found else []), between, recipe], "each is faster than the one before it"
    for others in ([recipe.drop("budgeted_schedule")], []):
        assert add_lengthened(others, ITEMS, few_runs(), lambda recipe: []) is None


@pytest.mark.parametrize(
    ("ends", "longer"),
    [
        ({0.2: 0.951, 0.4: 0.971}, 0.25),  # linear in the logarithm: it needs 0.957 or a little more
        ({0.2: 0.951, 0.3: 0.9515, 0.4: 0.99}, 0.32),
        ({0.2: 0.971, 0.4: 0.99}, 0.4),  # ends well enough already: twice as long, to be sure
        ({0.2: 0.951, 0.4: 0.952}, 0.4),  # none does
    ],
)
def test_lengthened_recipe_has_the_least_length_that_would_end_clearly_better(ends, longer):
    def recipe_of(length: float, *others: str) -> Recipe:
        return Recipe({"budgeted_schedule": {"factor": length, "peak": BEST_PEAK}, **{name: {} for name in others}})

    recipes = [*(recipe_of(length) for length in sorted(ends, reverse=True)), recipe_of(min(ends), "fused_optimizer")]
    metrics = {str(recipe): [ends[recipe.methods["budgeted_schedule"]["factor"]]] for recipe in recipes}
    found = add_lengthened(recipes, ITEMS, few_runs(), lambda recipe: metrics[str(recipe)])
    assert found == recipe_of(longer, "fused_optimizer"), "an exact method changes no length"
    lengths = [recipe.methods["budgeted_schedule"]["factor"] for recipe in recipes]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({0.3: 0.951, 0.4: 0.97}, [0.4, 0.6]),
        ({0.3: 0.97, 0.4: 0.97}, [0.3, 0.4]),
        ({0.3: 0.951, 0.4: 0.951, 0.8: 0.97}, [0.6, 0.8]),
    ],
)
def test_recipe_that_ended_clearly_better_is_confirmed_before_a_shorter_one(ends, expected):
    """And, of two, the one that was made longer."""
    of_length = {
        length: Recipe({"budgeted_schedule": {"factor": length, "peak": BEST_PEAK}}) for length in (0.8, 0.6, 0.4, 0.3)
    }
    recipes = [recipe for length, recipe in of_length.items() if length in ends or length == 0.6]
    baseline = few_runs()
    complete = {(str(of_length[length]), 0, 1.0): {"metric": metric} for length, metric in ends.items()}
    study = SimpleNamespace(complete=complete, horizon=1.0)
    assert [*_easiest_to_prove(study, recipes, of_length[0.6], baseline)] == [of_length[length] for length in expected]
    assert of_length[0.6] not in _easiest_to_prove(study, recipes, None, baseline)


def test_joint_search_tries_no_length_of_the_best_recipe_or_longer():
    study, seeds = Simulated(shortest=0.5), [0, 1, 2]
    baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)
    recipe = Recipe({"budgeted_schedule": {"factor": 0.55, "peak": BEST_PEAK}})
    best = run_seeds(study, recipe, first_outcome(baseline), baseline, [])
    study.ran.clear()
    search_jointly(study, Incumbents([Recipe(), recipe]), ITEMS, baseline, best)
    lengths = {float(re.findall(r"factor=([\d.]+),peak", text)[0]) for text, _ in study.ran}
    assert {0.16, 0.32} < lengths and 0.4 < max(lengths) < 0.5, "the last one is not jumped over"


def test_joint_search_of_a_script_that_evaluates_before_it_trains():
    class Early(Simulated):
        def run(self, recipe, seed, **limits):
            run = super().run(recipe, seed, **limits)
            return run | {"evaluations": [{"samples": 0, "seconds": 0.0, "metric": 0.1}, *run["evaluations"][::5]]}

    assert len(searched(Early(shortest=0.3))) > 1


def test_shorten_compares_samples_since_the_clock_of_a_run_may_be_disturbed():
    class Disturbed(Simulated):
        def run(self, recipe, seed, **limits):
            run, slow = super().run(recipe, seed, **limits), 1.5 if "factor=0.45" in str(recipe) else 1.0
            rows = [{**row, "seconds": slow * row["seconds"]} for row in run["evaluations"]]
            return run | {"seconds": slow * run["seconds"], "evaluations": rows}

    study, seeds = Disturbed(shortest=0.3), [0, 1, 2]
    baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)
    recipe = Recipe({"budgeted_schedule": {"factor": 0.64, "peak": BEST_PEAK}})
    whole = first_outcome(baseline)
    won = shorten(study, ITEMS, baseline, recipe, run_seeds(study, recipe, whole, baseline, []))
    assert [one.methods["budgeted_schedule"]["factor"] for one, _ in won] == [0.45, 0.32]


def test_joint_search_without_a_length_that_suffices_changes_nothing():
    assert searched(Simulated(shortest=5.0)) == [Recipe()]


def test_joint_search_at_the_end_of_the_budget_keeps_what_it_found():
    ample = Simulated(shortest=0.05)
    searched(ample)
    seconds = 3 * SECONDS + 0.9 * (ample.budget.charged - 3 * SECONDS)
    short = Simulated(shortest=0.05, budget=frozen(seconds))
    assert len(searched(short)) > 1


def test_space_points_are_in_range_and_differ():
    space = Space(ITEMS)
    points = space.sample(9, seed=1)
    recipes = [space.add_to(Recipe(), point, 0.25) for point in points]
    assert len({str(recipe) for recipe in recipes}) > 6
    for recipe in recipes:
        assert isinstance(recipe, Recipe)
        assert recipe.methods["budgeted_schedule"]["factor"] == 0.25
        assert recipe.methods.get("batch_size", {"factor": 1})["factor"] in (1, 2, 4, 8, 16)
    without = [recipe for recipe in recipes if "batch_size" not in recipe.methods]
    assert without, "a batch of the task's size is tried by leaving the method out"


def test_methods_without_a_length_are_not_searched_jointly():
    assert split_joint([ITEMS[1], THREADS]) == ([], [ITEMS[1], THREADS])
    assert split_joint([*ITEMS, THREADS]) == (ITEMS, [THREADS])
    chosen = candidate("budgeted_schedule", None, {"factor": 0.5})
    assert split_joint([chosen, ITEMS[1]])[0] == [], "the user's options are tried as they are"


@pytest.mark.parametrize(("position", "value"), [(0.0, 2.0), (1.0, 8.0), (0.5, 4.0)])
def test_search_range_is_even_in_the_logarithm(position, value):
    assert SearchRange(2.0, 8.0).at(position) == value
    assert replace(SearchRange(2, 8), powers_of_two=True).at(position) == value


@pytest.mark.parametrize("varied", [True, False])
def test_what_the_user_varies_is_searched_before_compositions(varied, monkeypatch):
    """Compositions train at the full length first, which may leave no budget."""
    study, seeds, order = Simulated(), [0, 1, 2], []
    baseline = Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True, seeds)

    def noting(name):
        return lambda *arguments: order.append(name) or arguments[-1 if name == "jointly" else 2]

    monkeypatch.setattr(training_stage, "experience_of", lambda *_: [Recipe.parse(["ema"])])
    monkeypatch.setattr(training_stage, "largest_batch_compositions", lambda *_: [])
    monkeypatch.setattr(training_stage, "leave_one_out", lambda *_: [])
    monkeypatch.setattr(training_stage, "try_training_composition", noting("compositions"))
    monkeypatch.setattr(training_stage, "search_jointly", noting("jointly"))
    monkeypatch.setattr(training_stage, "search_training", lambda *_: None)
    items = with_varied([candidate("script_arguments")], {"epochs": 50}) if varied else ITEMS
    state: Any = SearchState(plan={"samples_per_epoch": 100, "epochs": 1})
    training_stage._search(study, state, items, baseline, first_outcome(baseline))
    assert order == (["jointly", "compositions"] if varied else ["compositions", "jointly"])


@pytest.mark.parametrize(
    ("names", "remedy"),
    [(["lr_decay_iters", "max_iters"], "--vary lr_decay_iters,max_iters lets"), ([], "fewer steps")],
)
def test_answer_names_the_arguments_that_would_shorten_a_training(names, remedy):
    study, state = Simulated(), SearchState(length_arguments=names)
    training_stage._note_shorter_trainings(study, state)
    assert not study.trials, "no recipe reached the target sooner"
    study.note("ema", "training", "no gain", f"{SOONER}: it takes 3 s")
    training_stage._note_shorter_trainings(study, state)
    assert study.trials[-1]["verdict"] in NOT_DONE and remedy in study.trials[-1]["why"]
