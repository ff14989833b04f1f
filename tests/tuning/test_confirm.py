"""The confirmation: which recipe runs on which seeds, and which one wins. Outcomes of runs are planted."""

import math
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace
from typing import ClassVar

import pytest

from hasten.benchmarking.ratio import Ratio
from hasten.core.recipe import Recipe
from hasten.tuning.confirm import (
    FIRST_FURTHER_SEED,
    MAX_FINALISTS,
    _finalists,
    confirm,
    fresh_seeds,
    further_seeds,
)
from hasten.tuning.gate import LOOKS, not_passed
from hasten.tuning.time_to_target import Counts, time_to_target
from hasten.tuning.training import Baseline
from hasten.tuning.training_stage import _finding_of, _to_prove
from hasten.utils.durations import parse_budget
from helpers.planted_trainings import (
    FAST,
    FASTER,
    LOOK,
    MARGIN,
    SAMPLES,
    TARGET,
    PlantedTrainings,
    baseline_of,
    confirmed,
)


def test_confirm_fastest_recipe_wins_and_others_cost_nothing():
    study = PlantedTrainings({"baseline": 0.9, str(FAST): 0.9, str(FASTER): 0.9})
    won = confirmed(study)
    assert won.recipe == FASTER
    assert won.passed
    assert won.speedup.median == pytest.approx(5.0, rel=0.01)
    assert not study.seeds_of(FAST)
    assert study.notes[str(FAST)][0] == "not tried"
    assert study.seeds_of(Recipe()) == fresh_seeds(0, LOOKS[0])


def test_confirm_slower_recipe_that_passes_wins_with_the_runs_of_the_original():
    study = PlantedTrainings({"baseline": 0.9, str(FAST): 0.9, str(FASTER): 0.85})
    won = confirmed(study)
    assert won.recipe == FAST
    assert won.passed
    assert study.notes[str(FASTER)][0] == "refused"
    assert study.seeds_of(Recipe()) == fresh_seeds(0, LOOKS[0])


@pytest.mark.parametrize(
    ("recipe", "metric", "further"),
    [(FASTER, 0.9, 2 * LOOKS[0]), (FASTER, 0.85, 0), (FAST, 0.9, 0)],  # they take 2 and 5 of the original's 10 seconds
)
def test_confirm_runs_further_seeds_of_a_cheap_recipe_that_may_pass(recipe, metric, further):
    study = PlantedTrainings({"baseline": 0.9, str(recipe): metric})
    confirmed(study, (recipe,))
    assert sum(seed >= FIRST_FURTHER_SEED for seed in study.seeds_of(recipe)) == further


def test_confirm_seed_that_misses_the_target_ends_the_recipe():
    study = PlantedTrainings({"baseline": 0.9, str(FAST): 0.79, str(FASTER): 0.79})
    last = confirmed(study)
    assert not last.passed
    assert "never reached the target" in last.why
    assert len(study.seeds_of(FASTER)) == 1


def test_confirm_further_seed_that_misses_the_target_is_one_of_many():
    """If the original misses the target now and then, a veto for each further seed would penalize cheap recipes."""
    study = PlantedTrainings({"baseline": 0.81, str(FAST): 0.81, str(FASTER): 0.81}, spread=0.006)
    won = confirmed(study)
    missed = [seed for seed, run in won.tuned_runs.items() if run["seconds_to_target"] is None]
    assert won.recipe == FASTER
    assert missed
    assert all(seed >= FIRST_FURTHER_SEED for seed in missed)


def test_confirm_equal_speed_is_stated():
    study = PlantedTrainings(
        {"baseline": 0.9, str(FAST): 0.9, str(FASTER): 0.9}, cost={"baseline": 10.0, str(FAST): 10.0, str(FASTER): 10.0}
    )
    last = confirmed(study)
    assert not last.passed
    assert "as good, but not" in last.why
    assert {verdict for verdict, _ in study.notes.values()} == {"refused"}


def test_confirm_at_the_end_of_the_budget_judges_the_finished_runs():
    enough = PlantedTrainings({"baseline": 0.9, str(FAST): 0.9, str(FASTER): 0.9}, budget_runs=2 * LOOKS[0])
    assert confirmed(enough).passed
    few = PlantedTrainings({"baseline": 0.9, str(FAST): 0.9, str(FASTER): 0.9}, budget_runs=4)
    assert not confirmed(few).passed
    assert all("budget ended" in why for _, why in few.notes.values())


def test_confirm_improves_a_passing_slower_recipe_only_if_it_pays():
    nearly = {"baseline": 10.0, str(FAST): 2.1, str(FASTER): 2.0}
    study = PlantedTrainings({"baseline": 0.9, str(FAST): 0.9, str(FASTER): 0.8905}, cost=nearly)
    won = confirmed(study)
    assert won.recipe == FAST
    assert len(study.seeds_of(Recipe())) == LOOKS[0]  # FASTER is uncertain, and would give 5 % at most


ONE, TWO = Recipe({"num_threads": {"count": 1}}), Recipe({"channels_last": {}})  # exact
SLOW = Recipe({"ema": {"decay": 0.7}})


def test_finalists_contain_a_quality_risk_once():
    suspect = FASTER
    rungs = (SLOW, ONE | TWO | suspect, ONE | suspect, suspect)  # the last two leave out one member each
    metric = {str(recipe): 0.85 if recipe.methods.get("ema") == suspect.methods["ema"] else 0.9 for recipe in rungs}
    study = PlantedTrainings(metric | {"baseline": 0.9}, cost={"baseline": 10.0, str(SLOW): 6.0, str(suspect): 2.0})
    assert confirmed(study, rungs).recipe == SLOW
    assert {name for name, _ in study.ran} == {"baseline", str(suspect), str(SLOW)}


def test_confirm_runs_more_seeds_of_near_passes_before_another_recipe():
    cost = {"baseline": 10.0, str(FAST): 5.0, str(FASTER): 2.0}
    first_look = LOOKS[0] * 2 + LOOKS[0] * 2
    second = (LOOKS[1] - LOOKS[0]) * 4
    for metric, held in ((0.8945, FASTER), (0.891, FAST)):
        study = PlantedTrainings(
            {"baseline": 0.9, str(FAST): 0.9, str(FASTER): metric},
            spread=0.0025,
            cost=cost,
            budget_runs=first_look + second,
        )
        assert confirmed(study).recipe == held, metric


def test_confirm_of_several_passing_recipes_the_fastest_wins():
    in_doubt, slowed = 0.8905, 5.0
    cost = {"baseline": 10.0, str(SLOW): 5.0, str(FAST): 3.0, str(FASTER): 2.0}
    metric = {"baseline": 0.9, str(SLOW): 0.9, str(FAST): 0.9, str(FASTER): in_doubt}
    study = PlantedTrainings(metric, cost=cost, unseen={str(FAST): slowed})
    won = next(iter(confirm(study, [SLOW, FAST, FASTER], baseline_of(), 5.0, first=[SLOW])))
    assert won.recipe == SLOW and won.speedup.median == pytest.approx(2.0)
    assert study.notes[str(FAST)][0] == "slower"


def test_finalists_are_the_fastest_recipes_and_those_to_look_at_first():
    outside = Recipe({"./mine.py:Mine": {}})
    assert _finalists([Recipe(), outside, outside | ONE, outside | ONE | TWO]) == [outside | ONE | TWO]
    clipped = Recipe({"gradient_clipping": {}})
    assert _finalists([Recipe(), FAST | clipped, FAST]) == [FAST, FAST | clipped], (
        "that it left may be what costs quality"
    )
    milder = [Recipe({"ema": {"decay": decay}}) for decay in (0.5, 0.6, 0.8, 0.85, 0.9)]
    assert _finalists([Recipe(), *milder]) == milder[::-1][:MAX_FINALISTS]
    assert _finalists([Recipe(), SLOW, *milder], first=[SLOW]) == [*milder[::-1][: MAX_FINALISTS - 1], SLOW], (
        "those to look at first are always among them"
    )


def test_interval_of_a_changed_training_includes_the_evaluation_spacing():
    done = confirmed(PlantedTrainings({"baseline": 0.9, str(FAST): 0.9}), (FAST,))
    assert done.counts.baseline == [(SAMPLES, LOOK)] * LOOKS[0]
    assert done.speedup.low < done.training_speedup.low < done.speedup.median


def test_interval_of_run_times_with_three_agreeing_seeds_has_a_width():
    study = PlantedTrainings({"baseline": 0.9, str(FASTER): 0.9}, unseen={str(FASTER): 3.0})
    won = confirmed(study, (FASTER,))
    assert won.speedup.median == pytest.approx(2.0)
    assert won.speedup.low < 0.99 * won.speedup.median
    assert "the measured runs show less" in won.why


@pytest.mark.parametrize(("late", "message"), [(0.2, 5.0), (2.0, 2.4)])
def test_interval_uses_run_times_if_they_differ_from_the_comparison(late, message):
    study = PlantedTrainings({"baseline": 0.9, str(FASTER): 0.9}, unseen={str(FASTER): late}, uneven=0.95 * late)
    won = confirmed(study, (FASTER,))
    assert won.uses_measured == (late == 2.0)
    assert won.speedup.median == pytest.approx(message, rel=0.15)


def test_interval_of_independent_arms_counts_the_further_runs():
    """A seed says nothing about the samples of an arm that trains differently, so all runs of both arms count."""
    pace = {
        "ratio": {"median": 2.0, "low": 2.0, "high": 2.0},
        "seconds_per_1000_samples": {"a": 1.0},
        "start_seconds": {"a": 0, "b": 0},
    }
    baseline, tuned = [(1400, 200), (1400, 200), (2200, 200)], [(1000, 200), (1400, 200), (1200, 200)]
    further = [(1200, 200), (800, 200), (1200, 200)]
    few, *_ = time_to_target(pace, Counts(baseline, tuned))
    more, *_ = time_to_target(pace, Counts(baseline, tuned + further))
    assert few.median == pytest.approx(2 * (1400 * 1400 * 2200 / 1.68e9) ** (1 / 3))
    assert more.high / more.low < few.high / few.low


def test_confirm_whole_training_has_a_speedup_of_its_own():
    study = PlantedTrainings({"baseline": 0.9, str(FASTER): 0.9})
    won = confirmed(study, (FASTER,))
    assert won.training_speedup.median == pytest.approx(won.speedup.median, rel=0.1)
    assert won.training_speedup.high / won.training_speedup.low < won.speedup.high / won.speedup.low


def coverage(share: float, with_spacing: bool) -> float:
    """Returns how often the interval contains the truth if this fraction of seeds reaches the target one evaluation
    late."""
    pace = {
        "ratio": {"median": 1.0, "low": 1.0, "high": 1.0},
        "seconds_per_1000_samples": {"a": 1.0},
        "start_seconds": {"a": 0, "b": 0},
    }
    truth, held = 10 / 2**share, 0.0
    for lates in product((False, True), repeat=LOOKS[0]):
        tuned = [(200 if late else 100, 100 if with_spacing else 0) for late in lates]
        ratio, *_ = time_to_target(pace, Counts([(1000, 20 if with_spacing else 0)] * len(lates), tuned))
        held += math.prod(share if late else 1 - share for late in lates) * (ratio.low <= truth <= ratio.high)
    return held


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_interval_of_seeds_that_agree_on_an_evaluation_has_a_width(share):
    assert coverage(share, with_spacing=True) >= 0.95
    assert coverage(share, with_spacing=False) < 0.8, "the interval of the counts without the evaluation spacing"


def test_confirm_is_stricter_after_earlier_recipes():
    study = PlantedTrainings({"baseline": 0.9, str(FAST): 0.894, str(FASTER): 0.894}, spread=0.002)
    tried = [[], [FAST], [FAST, FASTER]]
    lows = [confirm(study, [FASTER], baseline_of(), 5.0, tested)[0].gate.difference["low"] for tested in tried]
    assert lows[2] < lows[1] < lows[0], "after another recipe, and once more after itself"


def test_confirm_divides_its_error_among_the_looks_that_the_budget_allows():
    study = PlantedTrainings({"baseline": 0.9, str(FASTER): 0.894}, spread=0.002)
    found = []
    for budget in (1e9, 60.0):  # three runs of the recipe take 12 s, two more of the original and of the recipe 48 s
        study.budget.total = budget
        found.append(confirm(study, [FASTER], baseline_of(), 5.0)[0])
    assert [each.most_looks for each in found] == [len(LOOKS), 1] and found[1].looks == 1
    assert found[1].confidence == pytest.approx(1 - len(LOOKS) * (1 - found[0].confidence))


def test_confirm_of_a_recipe_that_misses_the_target_as_the_original_does_judges_the_whole_training():
    class NearTheTarget(PlantedTrainings):
        def run(self, recipe, seed):
            run = super().run(recipe, seed)
            missed = dict.fromkeys(("seconds_to_target", "samples_to_target", "first_samples"))
            return run | (missed if seed in (fresh_seeds(0, 1)[0], *also_missed) else {})

    also_missed = []
    won = confirmed(NearTheTarget({"baseline": 0.9, str(FASTER): 0.9}), (FASTER,))
    assert won.passed and won.speedup == won.training_speedup
    also_missed = further_seeds(0, 1)
    assert confirmed(NearTheTarget({"baseline": 0.9, str(FASTER): 0.9}), (FASTER,)).passed


@dataclass
class NearTarget(PlantedTrainings):
    """Trainings that end near a target; those of the recipe on seeds in ``ends`` with another metric."""

    target: float = 0.9
    ends: dict[int, float] = field(default_factory=dict)

    def run(self, recipe, seed):
        run = super().run(recipe, seed)
        metric = self.ends.get(seed, run["metric"]) if recipe else run["metric"]
        missed = dict.fromkeys(("seconds_to_target", "samples_to_target", "first_samples"))
        return run | {"metric": metric} | (missed if metric < self.target else {})

    def confirmed(self):
        return confirm(self, [FASTER], replace(baseline_of(), target=self.target), 5.0)[0]


FIRST_SEEDS = pytest.mark.parametrize("seed", [fresh_seeds(0, 1)[0], further_seeds(0, 1)[0]])


@FIRST_SEEDS
def test_one_seed_that_misses_the_target_by_less_than_the_margin_is_left_to_the_gate(seed):
    study = NearTarget({"baseline": 0.9, str(FASTER): 0.9}, target=0.896, ends={seed: 0.895})
    won = study.confirmed()
    assert won.passed and won.speedup == won.training_speedup
    assert "1 of its 9 seeds missed the target 0.896" in won.why


def test_recipe_that_misses_the_target_on_average_is_not_proven_though_it_ends_as_well():
    done = NearTarget({"baseline": 0.9, str(FASTER): 0.895}, target=0.896).confirmed()
    assert not done.passed and not done.gate.passed and "so does their mean, 0.89" in done.why
    assert done.gate.difference["low"] > -MARGIN


@FIRST_SEEDS
def test_recipe_of_which_one_run_ends_below_the_target_by_more_than_the_margin_fails(seed):
    study = NearTarget({"baseline": 0.9, str(FASTER): 0.9}, target=0.896, ends={seed: 0.885})
    done = study.confirmed()
    assert not done.passed and "never reached the target" in done.why
    if not done.gain:
        return  # its first pair ended it
    found = _finding_of(study, SimpleNamespace(run_seconds=10.0, start_seconds=0.0), done, is_whole=True)
    assert found.evidence == "estimated" and found.speedup.median > 2 and "missed the target" in found.to_prove


def test_measured_runs_count_where_they_surely_show_less_however_seldom_they_are_evaluated():
    """Three runs of each arm that agree: the distance of their evaluations says nothing about their clock."""
    cost = {"baseline": 10.0, str(FASTER): 5.0}
    study = PlantedTrainings({"baseline": 0.9, str(FASTER): 0.9}, cost=cost, unseen={str(FASTER): 0.9})
    done = confirmed(study, (FASTER,))
    assert done.uses_measured and done.speedup.median == pytest.approx(10 / 5.9, rel=0.01)


def test_confirm_counts_a_run_of_the_baseline_once():
    """The runs that set the margin are those of the confirmation; twice in the spread, they would make it too small."""
    study = PlantedTrainings({"baseline": 0.9, str(FASTER): 0.9}, spread=0.002)
    seeds = fresh_seeds(0, LOOKS[0])
    runs = [study.run(Recipe(), seed) for seed in seeds]
    again = Baseline([0, 1, 2], runs, TARGET, MARGIN, True, seeds)
    without = Baseline([0, 1, 2], [], TARGET, MARGIN, True, [])
    lows = [confirm(study, [FASTER], each, 5.0)[0].gate.difference["low"] for each in (again, without)]
    assert lows[0] == lows[1]


def test_budget_that_would_prove_a_script_pays_for_a_watched_run_of_it():
    """A search that continues first watches a whole run, in at most half of its time."""
    attempt = confirmed(PlantedTrainings({"baseline": 0.9, str(FASTER): 0.9}), (FASTER,))
    attempt.speedup, state = Ratio(2.0, 1.9, 2.1), SimpleNamespace(run_seconds=60.0, start_seconds=1.0, findings=[])
    of_task, of_script = (_to_prove(state, attempt, False, of_script) for of_script in (False, True))
    seconds = [parse_budget(text.rpartition("+")[2]) for text in (of_task, of_script)]
    assert seconds[1] - seconds[0] >= 60 and seconds[1] >= 150


def test_metric_that_never_moves_is_proven_by_no_number_of_seeds():
    attempt = confirmed(PlantedTrainings({"baseline": 0.9, str(FASTER): 0.9}), (FASTER,))
    attempt.gate, state = (
        not_passed("it measures nothing", MARGIN, [1, 2, 3], settled=True),
        SimpleNamespace(run_seconds=9),
    )
    assert _to_prove(state, attempt, True, False) == "no more seeds would prove it: it measures nothing"


@pytest.mark.parametrize("is_good", [True, False])
def test_recipe_that_goes_first_has_the_largest_part_of_the_error_until_it_passes(is_good):
    """Then its part goes to the others."""
    study = PlantedTrainings({"baseline": 0.9, str(FAST): 0.91 if is_good else 0.88, str(FASTER): 0.9}, spread=0.004)
    found = {str(one.recipe): one for one in confirm(study, [FAST, FASTER], baseline_of(), 5.0, first=[FAST])}
    assert found[str(FAST)].passed == is_good
    part, of_first = (1 - found[str(one)].confidence for one in (FASTER, FAST))
    assert part == pytest.approx(of_first if is_good else of_first / 4)


def test_recipe_that_seems_easier_to_prove_goes_first():
    study = PlantedTrainings({"baseline": 0.9, str(FAST): 0.91, str(FASTER): 0.9}, spread=0.004)
    attempts = confirm(study, [FAST, FASTER], baseline_of(), 5.0, first=[FAST])
    assert study.seeds_of(FASTER) and study.ran.index((str(FAST), fresh_seeds(0, 1)[0])) < min(
        index for index, (name, _) in enumerate(study.ran) if name == str(FASTER)
    )
    assert attempts[0].recipe == FASTER and attempts[0].passed, "the faster one is tried, too, and wins"


def test_recipe_that_ends_worse_by_the_margin_gets_no_further_seeds():
    study = PlantedTrainings({"baseline": 0.9, str(FASTER): 0.886}, spread=0.008)
    done = confirmed(study, (FASTER,))
    assert not done.gate.settled, "the test alone would go on"
    assert "over 3 paired seeds" in study.notes[str(FASTER)][1] and "last look" not in study.notes[str(FASTER)][1]
    assert len(study.seeds_of(FASTER)) == LOOKS[0]


def test_recipe_that_was_not_tried_is_said_to_be_beaten_only_by_a_faster_one():
    study = PlantedTrainings({"baseline": 0.9, str(FAST): 0.9, str(FASTER): 0.9}, budget_runs=2 * LOOKS[0])
    assert confirm(study, [FAST, FASTER], baseline_of(), 5.0, first=[FAST])[0].recipe == FAST
    assert study.notes[str(FAST)][0] == "won" and "budget ended" in study.notes[str(FASTER)][1]


def test_recipes_that_differ_in_length_only_are_compared_once():
    lengths = [Recipe({"budgeted_schedule": {"factor": factor}, "ema": {"decay": 0.9}}) for factor in (0.6, 0.3)]
    other = lengths[0].drop("ema")

    class Counting(PlantedTrainings):
        compared: ClassVar[list[str]] = []

        def compare_speed(self, a, b, **how):
            self.compared.append(str(b))
            return super().compare_speed(a, b, **how)

    names = ["baseline", *map(str, [other, *lengths])]
    study = Counting(dict.fromkeys(names, 0.9), cost=dict(zip(names, (10.0, 6.0, 5.0, 2.0), strict=True)))
    study.compared.clear()
    confirm(study, [other, *lengths], baseline_of(), 5.0, first=[other, lengths[0]])
    assert set(study.compared) == {str(other), str(lengths[1])}
    assert all(map(study.seeds_of, [other, *lengths]))


def test_recipes_to_look_at_first_have_an_order():
    cost = {"baseline": 10.0, str(SLOW): 6.0, str(FAST): 5.0, str(FASTER): 2.0}
    for metric, tried in ((0.9, [FAST, FASTER]), (0.86, [FAST, SLOW, FASTER])):
        metrics = {"baseline": 0.9, str(SLOW): 0.9, str(FAST): metric, str(FASTER): 0.86}
        study = PlantedTrainings(metrics, cost=cost)
        confirm(study, [SLOW, FAST, FASTER], baseline_of(), 5.0, first=[FAST, SLOW])
        names = [name for name, seed in study.ran if seed < FIRST_FURTHER_SEED and name != "baseline"]
        assert list(dict.fromkeys(names)) == [str(recipe) for recipe in tried]


@pytest.mark.parametrize(("slowdowns", "is_proven"), [([1.0], True), ([4.0, 1.1], True), ([4.0, 4.0], False)])
def test_recipe_whose_speed_was_measured_beside_other_programs_is_not_proven(slowdowns, is_proven):
    class Disturbed(PlantedTrainings):
        salts: ClassVar[dict] = {}

        def compare_speed(self, a, b, *, salt, **how):
            index = self.salts.setdefault(salt, len(self.salts))  # a trial with the same salt comes from the store
            noise = {"slowdown": slowdowns[index], "system_noise": {"others_percent": 40.0}}
            return super().compare_speed(a, b, **how) | noise

    study = Disturbed({"baseline": 0.9, str(FASTER): 0.9})
    study.salts.clear()
    done = confirmed(study, (FASTER,))
    assert done.passed == is_proven and done.gate.passed
    found = _finding_of(study, SimpleNamespace(run_seconds=10.0, comparison_seconds=5.0), done, is_whole=True)
    assert (found.evidence == "proven") == is_proven == ("idle machine" not in found.to_prove)
