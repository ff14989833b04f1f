"""The rules of the search. What the instruments tell is planted; what is tested is what is made of it, and what it may cost."""

import random
import time
from dataclasses import dataclass, field, replace
from math import prod

import pytest

from hasten.contract.recipe import Recipe
from hasten.contract.watch import silent
from hasten.engine.environment import cores
from hasten.engine.tasks import TaskRef
from hasten.measure.ratio import Ratio, verdict_of
from hasten.tuning.candidates import Candidates, Wanted, competent_recipes
from hasten.tuning.gate import FEWEST_SEEDS
from hasten.tuning.ledger import Ledger
from hasten.tuning.result import Found
from hasten.tuning.search import (
    NOTHING_TO_DO,
    SYSTEMS_LOSSES,
    TRAINING_LOSSES,
    Baseline,
    Ladder,
    Outcome,
    candidate,
    systems,
    training,
)
from hasten.tuning.shares import leave_one_out
from hasten.tuning.study import Budget, OutOfBudget, Study
from hasten.tuning.tune import BASELINE_SEEDS, RESERVED_RUNS, _competent, _confirm, _examine, _search

TARGET, SAMPLES, METRIC, MARGIN = 0.9, 10_000, 0.95, 0.01
TRIAL = 2.0  # seconds that every trial takes
THREADS = replace(candidate("threads"), tries=tuple({"count": count} for count in range(1, 9)))
CLIPPING = replace(candidate("gradient_clipping"), tries=tuple({"max_norm": float(norm)} for norm in range(1, 9)))


def threads(count: int) -> str:
    return f"threads:count={count}"


def clipping(norm: int) -> str:
    return f"gradient_clipping:max_norm={norm}.0"


@dataclass
class Planted:
    """Stands for a Study. Each member of a recipe has its effects; every trial is paid for once, from a real Budget."""

    faster: dict[str, float] = field(default_factory=dict)  # times, a step
    samples: dict[str, float] = field(default_factory=dict)  # to the target: times those of the baseline
    luck: dict[str, float] = field(default_factory=dict)  # times faster by the stopwatch of a run, for no reason
    better: dict[str, float] = field(default_factory=dict)  # at its end, in the metric
    start: dict[str, float] = field(default_factory=dict)  # seconds
    refuted: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    spread: float = 0.0005  # of the metric, over recipes and seeds
    budget: Budget = field(default_factory=lambda: Budget(1e6))
    task: str = "planted"
    device: str = "cpu"
    seed: int = 0
    higher_is_better: bool = True
    target: float | None = TARGET
    asked: list[tuple[str, str]] = field(default_factory=list)
    trials: list[dict] = field(default_factory=list)

    def run(self, recipe: Recipe, seed: int, give_up_after: float | None = None) -> dict:
        self._pay("run", f"{recipe}, seed {seed}, give up after {give_up_after}")
        metric = (
            METRIC + random.Random(f"{recipe} {seed}").gauss(0, self.spread) + sum(self.better.get(each, 0.0) for each in _members(recipe))
        )
        samples = round(SAMPLES * self._of(self.samples, recipe))
        seconds = samples / 1000 / self._of(self.faster, recipe) / self._of(self.luck, recipe)
        late = give_up_after is not None and seconds > give_up_after
        looks = [{"samples": n * samples // 20, "seconds": n * seconds / 20, "metric": metric} for n in range(1, 41)]
        there = {"seconds_to_target": seconds, "samples_to_target": samples, "first_samples": samples}
        told = {"metric": metric, "best_metric": metric, "samples": 2 * samples, "gave_up": late, "trial_seconds": TRIAL}
        return told | {"evaluations": looks} | (dict.fromkeys(there) if late else there)

    def pace(self, a: Recipe, b: Recipe, **_) -> dict:
        self._pay("pace", f"{b} against {a}")
        if idle := set(self.idle) & set(_members(b)):
            return {"failed": f"{idle.pop().partition(':')[0]} {NOTHING_TO_DO}: planted", "trial_seconds": TRIAL}
        median = self._of(self.faster, b) / self._of(self.faster, a)
        ratio = Ratio(median, 0.995 * median, 1.005 * median)
        return {
            "verdict": verdict_of(ratio),
            "ratio": ratio.to_json(),
            "why": f"{ratio}",
            "seconds_per_1000_samples": {"a": 1 / self._of(self.faster, a), "b": 1 / self._of(self.faster, b)},
            "start_seconds": {name: sum(self.start.get(each, 0.0) for each in _members(recipe)) for name, recipe in (("a", a), ("b", b))},
            "trial_seconds": TRIAL,
        }

    def proof(self, base: Recipe, recipe: Recipe, exactness) -> dict:
        self._pay("proof", f"{recipe} against {base}")
        return {"passed": not set(self.refuted) & set(_members(recipe)), "why": "planted", "trial_seconds": TRIAL}

    def once(self, kind: str, words: str, measure) -> dict:
        self._pay(kind, words)
        return {"advice": []}

    def anatomy(self, recipe: Recipe) -> dict:
        self._pay("anatomy", str(recipe))
        return {}

    def note(self, what: str, stage: str, verdict: str, why: str, *, ratio=None, seconds: float = 0.0) -> None:
        self.trials.append({"what": what, "stage": stage, "verdict": verdict, "why": why, "seconds": seconds})

    def kinds(self, kind: str) -> list[str]:
        return [what for each, what in self.asked if each == kind]

    def noted(self, stage: str) -> list[str]:
        return [trial["what"] for trial in self.trials if trial["stage"] == stage]

    def _of(self, effects: dict[str, float], recipe: Recipe) -> float:
        return prod(effects.get(each, 1.0) for each in _members(recipe))

    def _pay(self, kind: str, what: str) -> None:
        if (kind, what) not in self.asked:
            self.budget.ask()
            self.asked.append((kind, what))
            self.budget.spent += TRIAL


def _members(recipe: Recipe) -> list[str]:
    return [str(Recipe({name: settings})) for name, settings in recipe.methods.items()]


def baseline_of(study: Planted) -> Baseline:
    seeds = [0, 1000, 2000]
    return Baseline(seeds, [study.run(Recipe(), seed) for seed in seeds], TARGET, MARGIN, True)


def searched_systems(study: Planted, each=THREADS) -> Ladder:
    systems(study, ladder := Ladder(), [each], SAMPLES, 5.0)
    return ladder


def searched_training(study: Planted, each=CLIPPING) -> Ladder:
    training(study, ladder := Ladder(), [each], baseline_of(study))
    return ladder


def outcome(*seconds: float | None, samples: tuple[int | None, ...] = (), metric: float = METRIC) -> Outcome:
    """Of a run a seed."""
    samples = samples or (SAMPLES,) * len(seconds)
    runs = [{"seconds_to_target": s, "samples_to_target": n, "metric": metric} for s, n in zip(seconds, samples, strict=True)]
    return Outcome("kept", "", tuple(runs))


# ── what is held against what ────────────────────────────────────────────────────────────────────


def test_only_seeds_that_both_were_run_on_are_compared():
    once, thrice = outcome(10.0), outcome(8.0, 20.0, 20.0)
    assert thrice.gain_over(once) == pytest.approx(1.25)
    assert once.gain_over(thrice) == pytest.approx(0.8)
    assert outcome(8.0, None).gain_over(once) == pytest.approx(1.25)
    assert outcome(8.0, None).gain_over(outcome(10.0, 10.0)) is None


def test_samples_are_compared_on_the_same_seeds():
    one, three = outcome(10.0, samples=(1000,)), outcome(10.0, 10.0, 10.0, samples=(1000, 1000, 1000))
    fewer_later = outcome(10.0, 10.0, 10.0, samples=(1000, 500, 500))
    assert not fewer_later.needs_fewer(one)
    assert fewer_later.needs_fewer(three)
    assert not outcome(10.0, samples=(995,)).needs_fewer(one)
    assert outcome(10.0, samples=(500,)).needs_fewer(outcome(None, samples=(None,)))


def test_a_loser_is_told_in_the_seconds_of_the_seeds_that_were_compared():
    runs = [{**run, "gave_up": False} for run in outcome(9.9, 30.0, 30.0).runs]
    told = Outcome.of(runs, baseline_of(Planted()), outcome(10.0))
    assert told.verdict == "no gain"
    assert told.why == "reached the target in 9.90 s; the best so far takes 10.00 s"


@pytest.mark.parametrize(
    ("run", "verdict", "words"),
    [
        ({"failed": "ema has nothing to act on: no weights"}, "nothing to do", "no weights"),
        ({"failed": "ran out of memory"}, "failed", "memory"),
        ({"gave_up": True}, "no gain", "after 10.5 s"),
        ({"seconds_to_target": None}, "refused", "never reached the target 0.9"),
        ({"metric": METRIC - 3 * MARGIN}, "refused", "the margin is 0.01"),
        ({"seconds_to_target": 9.9}, "no gain", "9.90 s"),
        ({"seconds_to_target": 5.0}, "kept", "5.00 s"),
    ],
)
def test_what_becomes_of_a_run(run, verdict, words):
    usual = {"gave_up": False, "seconds_to_target": 5.0, "samples_to_target": SAMPLES, "metric": METRIC, "trial_seconds": TRIAL}
    told = Outcome.of([usual | run], baseline_of(Planted()), outcome(10.0))
    assert told.verdict == verdict
    assert words in told.why


@pytest.mark.parametrize(
    ("seconds", "better", "verdict"),
    [(10.2, 2 * MARGIN, "kept"), (10.2, MARGIN, "no gain"), (10.2, MARGIN / 2, "no gain"), (12.0, 2 * MARGIN, "no gain")],
)
def test_a_clearly_better_end_makes_up_for_no_gain_but_not_for_a_loss(seconds, better, verdict):
    baseline, best = baseline_of(Planted()), outcome(10.0)
    (run,) = outcome(seconds, metric=METRIC + better).runs
    assert Outcome.of([{**run, "gave_up": False}], baseline, best).verdict == verdict


def test_many_that_are_nearly_as_soon_do_not_add_up():
    """A better end may cost 5 % of the time, once: not again for each that ends better still."""
    tries = CLIPPING.tries[:7]
    study = Planted(
        samples={clipping(norm): 0.5 for norm in range(1, 8)},
        better={clipping(norm): 2 * norm * MARGIN for norm in range(1, 8)},
        luck={clipping(norm): 0.97 ** (norm - 1) for norm in range(1, 8)},
    )
    assert str(searched_training(study, replace(CLIPPING, tries=tries)).best) == clipping(2)


@pytest.mark.parametrize("higher", [True, False])
def test_as_good_is_meant_in_the_direction_of_the_metric(higher):
    baseline = Baseline([0, 1], [{"metric": 1.0}, {"metric": 1.0}], TARGET, MARGIN, higher)
    better = 1 if higher else -1
    assert baseline.as_good([1.0 + better * 5 * MARGIN])
    assert baseline.as_good([1.0 - better * MARGIN / 2])
    assert not baseline.as_good([1.0 - better * 2 * MARGIN])


# ── systems ──────────────────────────────────────────────────────────────────────────────────────


def test_settings_of_a_systems_method_end_after_so_many_losses():
    study = Planted(faster={threads(SYSTEMS_LOSSES + 1): 2.0})
    assert searched_systems(study).rungs == [Recipe()]
    assert study.noted("systems") == [threads(count + 1) for count in range(SYSTEMS_LOSSES)]


def test_a_gain_begins_the_count_anew_and_the_best_setting_is_one_rung():
    study = Planted(faster={threads(2): 1.5, threads(4): 2.0, threads(4 + SYSTEMS_LOSSES): 1.8})
    ladder = searched_systems(study)
    assert [str(recipe) for recipe in ladder.rungs] == ["baseline", threads(4)]
    assert study.noted("systems") == [threads(count + 1) for count in range(4 + SYSTEMS_LOSSES)]


def test_where_the_budget_ends_the_best_setting_so_far_is_kept():
    study = Planted(faster={threads(1): 1.5, threads(2): 2.0}, budget=Budget(2 * TRIAL))  # a pace and a proof
    systems_ladder = Ladder()
    with pytest.raises(OutOfBudget):
        systems(study, systems_ladder, [THREADS], SAMPLES, 5.0)
    assert str(systems_ladder.best) == threads(1)


def test_a_start_that_a_run_does_not_earn_back_is_no_gain():
    study = Planted(faster={threads(1): 1.5}, start={threads(1): 5.0})  # saves 3.3 of 10 seconds
    assert searched_systems(study, replace(THREADS, tries=({"count": 1},))).rungs == [Recipe()]
    assert study.trials[0]["verdict"] == "no gain"
    assert not study.kinds("proof")


def test_what_is_offered_is_proven_first():
    offered = replace(THREADS, tries=({"count": 1},), offered=True)
    refuted = Planted(faster={threads(1): 2.0}, refuted=(threads(1),))
    assert searched_systems(refuted, offered).rungs == [Recipe()]
    assert [kind for kind, _ in refuted.asked] == ["proof"]
    kept = Planted(faster={threads(1): 2.0})
    assert str(searched_systems(kept, offered).best) == threads(1)
    assert [kind for kind, _ in kept.asked] == ["proof", "pace"]
    assert kept.trials[0]["seconds"] == 2 * TRIAL, "the proof is paid for once"


# ── training ─────────────────────────────────────────────────────────────────────────────────────


def test_settings_of_a_training_method_end_after_so_many_losses():
    study = Planted(samples={clipping(TRAINING_LOSSES + 1): 0.5})
    assert searched_training(study).rungs == [Recipe()]
    assert study.noted("training") == [clipping(norm + 1) for norm in range(TRAINING_LOSSES)]


def test_every_gain_of_a_training_method_is_a_rung():
    study = Planted(samples={clipping(2): 0.8, clipping(4): 0.5})
    ladder = searched_training(study)
    assert [str(recipe) for recipe in ladder.rungs] == ["baseline", clipping(2), clipping(4)]
    assert study.noted("training") == [clipping(norm + 1) for norm in range(4 + TRAINING_LOSSES)]


@pytest.mark.parametrize(
    ("samples", "faster", "kept"),
    [(1.0, 1.0, False), (0.995, 1.0, False), (1.0, 1.3, True), (0.9, 1.0, True)],
)
def test_as_many_samples_have_to_be_faster_by_pace_not_by_the_luck_of_a_stopwatch(samples, faster, kept):
    study = Planted(samples={clipping(1): samples}, faster={clipping(1): faster}, luck={clipping(1): 1.1})
    ladder = searched_training(study, replace(CLIPPING, tries=CLIPPING.tries[:1]))
    assert (str(ladder.best) == clipping(1)) is kept
    assert bool(study.kinds("pace")) is (samples > 0.99)


@pytest.mark.parametrize(("better", "luck", "kept"), [(1.5, 0.98, True), (0.5, 0.98, False), (1.5, 0.9, False)])
def test_of_two_that_are_there_as_soon_the_one_that_ends_better_is_kept(better, luck, kept):
    study = Planted(samples={clipping(1): 0.5, clipping(2): 0.5}, better={clipping(2): better * MARGIN}, luck={clipping(2): luck})
    ladder = searched_training(study, replace(CLIPPING, tries=CLIPPING.tries[:2]))
    assert (str(ladder.best) == clipping(2)) is kept


def test_a_setting_that_changes_nothing_is_not_kept_for_being_lucky():
    study = Planted(samples={clipping(2): 0.9, clipping(3): 0.9}, faster={clipping(3): 1.3}, spread=0.0)
    ladder = searched_training(study, replace(CLIPPING, tries=CLIPPING.tries[:3]))
    assert str(ladder.best) == clipping(2)
    assert study.trials[-1]["why"] == "trains exactly as a setting that was tried before"
    assert len([what for what in study.kinds("run") if what.startswith(clipping(3))]) == 1


def test_a_training_method_without_its_promised_effect_is_out_at_once():
    study = Planted(samples={clipping(1): 0.5, clipping(2): 0.5}, refuted=(clipping(1),))
    assert searched_training(study).rungs == [Recipe()]
    assert study.noted("training") == [clipping(1)]


@pytest.mark.parametrize(("budget", "seeds"), [(1e6, BASELINE_SEEDS), (20 * TRIAL, BASELINE_SEEDS), (12 * TRIAL, 1)])
def test_further_seeds_are_run_where_they_can_be_afforded(budget, seeds):
    study = Planted(samples={clipping(1): 0.5}, budget=Budget(budget))
    searched_training(study, replace(CLIPPING, tries=CLIPPING.tries[:1]))
    assert sum(what.startswith(clipping(1)) for what in study.kinds("run")) == seeds


# ── the budget ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("total", "reserved"), [(1800.0, RESERVED_RUNS * TRIAL + 60.0), (54.0, RESERVED_RUNS * TRIAL + 10.0), (30.0, 15.0)]
)
def test_runs_and_comparisons_are_kept_back_for_the_confirmation(total, reserved):
    study, found = Planted(budget=Budget(total)), Found()
    _examine(study, found, Wanted(None, Recipe()), None)
    assert study.budget.reserved == pytest.approx(reserved)


@pytest.mark.parametrize("total", [26.0, 29.0, 31.0, 43.0, 64.0, 101.0, 200.0])
def test_a_search_leaves_its_reserve_and_nothing_exceeds_the_budget_by_more_than_a_trial(total):
    effects = {threads(count): 1 + count / 10 for count in range(1, 9)} | {"fused_optimizer": 1.1}
    study = Planted(faster=effects, samples={clipping(norm): 0.9**norm for norm in range(1, 9)}, budget=Budget(total))
    found = Found(baseline=baseline_of(study), candidates=Candidates([THREADS], [CLIPPING]), pace_seconds=TRIAL)
    reserve = study.budget.reserved = min(total / 2, 9 * TRIAL)
    _search(study, found)
    for_exact, reserve = study.budget.reserved - reserve, study.budget.reserved
    assert (0.0 if total < 40.0 else 1e-9) <= for_exact <= (FEWEST_SEEDS + 1) * TRIAL
    assert total < 200.0 or for_exact == (FEWEST_SEEDS + 1) * TRIAL
    assert study.budget.spent <= total - reserve + TRIAL
    assert bool(study.noted("search")) is (total - study.budget.spent <= reserve), "that it was stopped is told"
    _confirm(study, found)
    assert study.budget.spent <= total + TRIAL
    assert found.won or total < 40.0
    assert total < 100.0 or found.confirmed.over_competent is not None


def test_what_is_measured_of_the_shares_is_kept_where_the_budget_ends():
    recipe = Recipe.read(f"{threads(2)} + {clipping(1)} + fused_optimizer")
    study = Planted(faster={threads(2): 1.5, "fused_optimizer": 1.2}, samples={clipping(1): 0.5}, budget=Budget(3 * TRIAL))
    told = [share["method"] for share in leave_one_out(study, Ladder([Recipe(), recipe]))]
    assert 0 < len(told) < 3
    ample = Planted(faster=study.faster, samples=study.samples)
    assert {share["method"]: round(share["speedup"]["median"], 1) for share in leave_one_out(ample, Ladder([Recipe(), recipe]))} == {
        "threads": 1.5,
        "fused_optimizer": 1.2,
        "gradient_clipping": 2.0,
    }


def test_a_member_that_gives_nothing_leaves_the_recipe():
    recipe = Recipe.read(f"{threads(2)} + fused_optimizer")
    study, ladder = Planted(faster={threads(2): 1.5}), Ladder([Recipe(), recipe])
    assert [share["method"] for share in leave_one_out(study, ladder)] == ["threads"]
    assert str(ladder.best) == threads(2)
    assert study.trials[-1]["verdict"] == "left out"


# ── the competent run ────────────────────────────────────────────────────────────────────────────

WORKERS = str(competent_recipes("cpu", cores())[-1].without("fused_optimizer"))


@pytest.mark.parametrize(
    ("faster", "idle", "best"),
    [
        ({"fused_optimizer": 1.2}, (), "fused_optimizer"),
        ({"fused_optimizer": 1.2, WORKERS: 1.3}, (), f"fused_optimizer + {WORKERS}"),
        ({WORKERS: 1.3}, ("fused_optimizer",), WORKERS),
        ({"fused_optimizer": 1.2}, (WORKERS,), "fused_optimizer"),
        ({}, (), "baseline"),
        ({WORKERS: 0.8}, ("fused_optimizer",), "baseline"),
    ],
)
def test_a_competent_user_keeps_what_is_surely_faster_and_leaves_what_has_nothing_to_act_on(faster, idle, best):
    assert str(_competent(Planted(faster=faster, idle=idle), 5.0)) == best


def test_a_trial_is_begun_while_something_is_left_and_a_known_one_always(tmp_path):
    study = Study(TaskRef("planted"), "cpu", Ledger(tmp_path, {}), Budget(10.0, reserved=9.98), silent)

    def measure(_) -> dict:
        time.sleep(0.01)
        return {}

    with pytest.raises(OutOfBudget):
        for number in range(100):
            study.once(f"number {number}", "", measure)
    seconds = [entry["outcome"]["trial_seconds"] for entry in study.ledger.known.values()]
    assert study.budget.spent == pytest.approx(sum(seconds))
    assert sum(seconds[:-1]) < 0.02 <= study.budget.spent
    study.once("number 0", "", measure)
    assert study.budget.spent == pytest.approx(sum(seconds)), "a trial is paid for once"
    study.budget.reserved = 0.0
    study.once("of the confirmation", "", measure)

    later = Study(TaskRef("planted"), "cpu", Ledger(tmp_path, {}), Budget(0.0), silent)
    later.once("number 0", "", measure)
    assert later.budget.spent == pytest.approx(seconds[0]), "and counts again in the search that remembers it"


class Recorded(Study):
    """A Study whose runs were recorded: 0.8, 0.92 and 0.95 after a second each."""

    def _in_worker(self, recipe, seed, method, watch, **limits) -> dict:
        looks = [{"samples": 100 * n, "seconds": float(n), "metric": metric} for n, metric in enumerate((0.8, 0.92, 0.95), 1)]
        return {"metric": 0.95, "evaluations": looks, "gave_up": limits.get("give_up_after", 9.0) < 2.0}


def test_a_target_that_is_fixed_after_the_first_runs_counts_for_them(tmp_path):
    study = Recorded(TaskRef("planted"), "cpu", Ledger(tmp_path, {}), Budget(10.0), silent)
    assert study.run(Recipe(), 0)["seconds_to_target"] is None
    study.target = TARGET
    assert study.run(Recipe(), 0)["seconds_to_target"] == 2.0


def test_a_run_that_came_to_its_end_is_known_whoever_asks_and_one_given_up_is_not(tmp_path):
    study = Recorded(TaskRef("planted"), "cpu", Ledger(tmp_path, {}), Budget(10.0), silent, target=TARGET)
    assert study.run(Recipe(), 0, give_up_after=1.0)["gave_up"]
    assert not study.run(Recipe(), 0, give_up_after=5.0)["gave_up"]
    assert study.run(Recipe(), 0)["samples_to_target"] == 200
    assert len(study.ledger.known) == 2
