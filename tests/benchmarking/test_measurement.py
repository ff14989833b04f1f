"""When a comparison is over, and what it spends its budget on, with planted blocks."""

from typing import Any

import pytest
import torch

from hasten.benchmarking.arm import Arm
from hasten.benchmarking.measurement import ArmSamples, Measurement
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.process_group_info import SINGLE_PROCESS
from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from helpers import engine_tasks


def measurement(**limits) -> Measurement:
    arms = ArmSamples(Recipe()), ArmSamples(Recipe())
    known = {"budget": 60.0, "min_rounds": 3, "max_rounds": 16, "looks": [6, 9], "longest": 240.0, "start_step": 0}
    return Measurement(arms, **{**known, "later_seconds": 0.0, "on_progress": no_progress, **limits})


def add_blocks(measured: Measurement, pairs: int) -> None:
    """Adds a round of ``pairs`` pairs of blocks."""
    measured.rounds += 1
    for arm in measured.arms:
        arm.blocks += [
            {"seconds": 0.3 + 0.01 * index, "samples": 8, "round": measured.rounds} for index in range(pairs)
        ]


@pytest.mark.parametrize(("seconds", "needed"), [(None, True), (0.1, True), (0.5, False)])
def test_measurement_times_long_evaluations_in_the_first_round_only(seconds, needed):
    measured = measurement()
    assert measured.needs_evaluations()
    measured.arms[0].plan["evaluation"] = measured.arms[1].plan["evaluation"] = seconds
    measured.rounds = 1
    assert measured.needs_evaluations() is needed


@pytest.mark.parametrize(
    ("rounds", "kept"), [([2], None), ([3], 1), ([6, 0], 1), ([6, 2], 1), ([6, 3], 2), ([6, 6, 1], 2)]
)
def test_measurement_that_ends_early_keeps_whole_rounds(rounds, kept):
    measured = measurement()
    measured.look_count = 3
    for pairs in rounds:
        add_blocks(measured, pairs)
    assert measured.end_now() is (kept is not None)
    if kept:
        assert measured.rounds == kept and len(measured.arms[0].blocks) == sum(rounds[:kept])
        assert measured.ratio.low < 1 < measured.ratio.high


@pytest.mark.parametrize(
    ("budget", "setup", "pair_seconds", "is_single", "pairs"),
    [
        (60.0, 2.0, 0.6, False, 6),
        (24.0, 4.0, 0.8, False, 3),  # three rounds of 4 + 3 x 0.8 s, and 20 % more
        (5.0, 8.0, 0.6, True, 9),  # no second round
        (60.0, 4.0, 20.0, True, 9),
    ],
)
def test_measurement_plans_rounds_that_the_budget_allows(budget, setup, pair_seconds, is_single, pairs):
    measured = measurement(budget=budget)
    measured.pair_seconds = pair_seconds
    measured._plan_blocks(setup)
    assert (measured.is_single, measured.most_pairs) == (is_single, pairs)


class SlowToBuild:
    """A pair of arms that took 9 s to build; the clock goes on by 1 s for each pair of blocks, whose ratio is restless.

    The first pair takes 20 s.
    """

    build_seconds, positions = 9.0, (0.0, 0.0)
    plans = tuple(
        dict.fromkeys(("evaluation", "evaluate_every", "samples_per_epoch", "steps"))
        | {"step": 0.05, "samples_per_step": 1, "sync_period": 1, "warmup_steps": 0}
        for _ in range(2)
    )

    def __init__(self, until_evaluation: float | None = None):
        self.now, self.blocks, self.until_evaluation = 0.0, 0, until_evaluation
        if until_evaluation is not None:  # one of 0.1 s after each block of 6 samples
            self.plans = tuple(plan | {"evaluation": 0.1, "evaluate_every": 6} for plan in self.plans)

    def monotonic(self) -> float:
        return self.now

    def run_to(self, position: float) -> None:
        pass

    def time_blocks(self, samples: float, order: tuple[int, int]) -> list[dict[str, float]]:
        self.blocks += 1
        self.now += 20.0 if self.blocks == 1 else 1.0
        return [{"seconds": 0.24 + 0.12 * (self.blocks % 2), "samples": samples}, {"seconds": 0.3, "samples": samples}]

    def time_evaluations(self, order: tuple[int, int]) -> list[float]:
        self.now += self.until_evaluation or 0.0
        return [0.1, 0.1]

    def peak_memory(self) -> list[list]:
        return [[], []]


@pytest.mark.parametrize(("until_evaluation", "evaluations"), [(0.2, 8), (5.0, 2)])
def test_measurement_times_few_evaluations_where_an_arm_trains_until_they_come(
    monkeypatch, until_evaluation, evaluations
):
    pair = SlowToBuild(until_evaluation)
    monkeypatch.setattr("hasten.benchmarking.measurement.time", pair)
    measured = measurement(budget=60.0, looks=[9], max_rounds=1)
    measured.run_round(pair)  # type: ignore[arg-type]
    assert len(measured.arms[0].blocks) == 9
    assert len(measured.arms[0].evaluations) == evaluations


def test_measurement_whose_budget_turns_out_too_small_for_a_second_round_spends_it_on_the_first(monkeypatch):
    pair = SlowToBuild()
    monkeypatch.setattr("hasten.benchmarking.measurement.time", pair)
    measured = measurement(budget=40.0, looks=[6, 9, 14])
    measured.run_round(pair)  # type: ignore[arg-type]
    assert measured.is_over and measured.rounds == 1
    assert len(measured.arms[0].blocks) == 14, "three pairs would have been a round of several"


@pytest.mark.parametrize(("max_rounds", "pairs"), [(1, 6), (8, 14)])
def test_single_round_that_stands_for_several_ends_early_only_beyond_doubt(max_rounds, pairs):
    """Sure after 6 pairs of 1.15x: enough for a search, not for what is reported."""
    measured = measurement(budget=3.0, max_rounds=max_rounds, looks=[6, 9, 14])
    pair = Steady(1.15)
    measured.run_round(pair)  # type: ignore[arg-type]
    assert measured.is_over and measured.verdict == "faster"
    assert len(measured.arms[0].blocks) == pairs


def test_single_round_beyond_doubt_ends_at_the_first_look():
    measured = measurement(budget=3.0, max_rounds=8, looks=[6, 9, 14])
    measured.run_round(Steady(2.0))  # type: ignore[arg-type]
    assert len(measured.arms[0].blocks) == 6 and measured.ratio.low > 1.25


class Steady(SlowToBuild):
    """A pair of arms of which the second is faster by a factor, and too slow to build for a second round."""

    def __init__(self, faster: float):
        super().__init__()
        self.faster, self.evaluations = faster, list[float]()

    def time_blocks(self, samples: float, order: tuple[int, int]) -> list[dict[str, Any]]:
        of_block: dict[str, Any] = {"samples": samples, "evaluations": self.evaluations}
        return [{"seconds": 0.3, **of_block}, {"seconds": 0.3 / self.faster, **of_block}]


class FailsLater(Steady):
    """The same, of a long training that fails at any later position."""

    plans = tuple(plan | {"steps": 10_000} for plan in SlowToBuild.plans)

    def run_to(self, position: float) -> None:
        if position > 0:
            raise RunError("the loss is nan at step 24")


def test_measurement_whose_later_look_fails_keeps_the_verdict():
    measured = measurement(budget=3.0, max_rounds=8, later_seconds=1.0)
    measured.run_round(FailsLater(2.0))  # type: ignore[arg-type]
    assert measured.is_over and measured.verdict == "faster" and measured.by_position == []
    assert measured.why().endswith("; later in the training it was not measured: the loss is nan at step 24")


@pytest.mark.parametrize(("budget", "rounds"), [(10.0, 1), (16.0, 2)])
def test_arms_that_run_one_after_the_other_are_timed_in_both_orders_where_the_budget_allows_it(budget, rounds):
    measured = measurement(budget=budget)
    measured.is_sequential, measured.pair_seconds = True, 1.0
    measured._plan_blocks(8.0)
    assert measured.is_single == (rounds == 1)


def test_evaluations_that_are_not_timed_count_in_both_arms_as_they_were_seen():
    """A script whose epochs are long: 1 s of evaluation for each second of training, steps twice as fast."""
    measured = measurement(budget=3.0, max_rounds=1)
    pair = Steady(2.0)
    pair.plans = tuple(plan | {"evaluate_every": 20, "evaluation_seen": 1.0} for plan in pair.plans)
    measured.run_round(pair)  # type: ignore[arg-type]
    training = measured.arms[0].seconds_per_sample()[0] * 20
    assert measured.ratio.median == pytest.approx((training + 1.0) / (training / 2 + 1.0), rel=1e-3)


@pytest.mark.parametrize(("evaluation", "taken"), [(0.1, 9), (None, 0)])
def test_evaluations_inside_of_blocks_count_unless_they_come_too_seldom(evaluation, taken):
    measured, pair = measurement(budget=60.0, looks=[9], max_rounds=1), Steady(2.0)
    pair.plans = tuple(plan | {"evaluation": evaluation, "evaluate_every": 6} for plan in pair.plans)
    pair.evaluations = [0.1]
    measured.run_round(pair)  # type: ignore[arg-type]
    for arm in measured.arms:
        assert len(arm.evaluations) - (2 if evaluation else 0) == taken, "two are timed before the first block"
        assert "evaluations" not in arm.blocks[0]


@pytest.mark.parametrize(("evaluations", "counts"), [([20.0, 0.3], 0.3), ([0.3], 0.3), ([0.2, 0.4, 0.3], 0.3)])
def test_first_evaluation_of_a_process_does_not_stand_for_all(evaluations, counts):
    arm = ArmSamples(Recipe(), {"evaluate_every": 10, "samples_per_epoch": 10}, evaluations=evaluations)
    assert arm.evaluation_seconds_per_sample() == pytest.approx(counts / 10)


def test_progress_of_a_long_training_begins_at_zero(monkeypatch):
    reports = []
    measured = measurement(budget=60.0, later_seconds=15.0, on_progress=lambda *report: reports.append(report))
    measured.began = 1000.0
    times = iter([1000.0, 1045.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times, 1045.0))
    for _ in range(2):
        measured._report()
    assert [(done, left) for _, done, left in reports] == [(0.0, 45.0), (1.0, 0.0)]


class StepsOnly:
    def step(self):
        pass


def test_schedule_without_a_state_cannot_be_measured():
    task = engine_tasks.task(
        engine_tasks.Augmented(), optimizer=lambda model: (torch.optim.SGD(model.parameters(), 0.1), StepsOnly())
    )
    with pytest.raises(ConfigurationError, match="a StepsOnly, has no state_dict"):
        Arm(TaskRef.of(task), {}, "cpu", 0, SINGLE_PROCESS).build()
