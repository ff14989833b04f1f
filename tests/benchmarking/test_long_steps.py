"""Steps of seconds, and data whose items are whole batches: few steps, and a reason where something does not fit."""

import dataclasses
import statistics
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hasten
from hasten import Task
from hasten.benchmarking import arm
from hasten.benchmarking.arm import Arm, warm_up_steps
from hasten.core.data import WorkerConfig
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.profiling.step_profile import profile_steps

STEP = 0.05


class Batches(Dataset):
    """40 items, each a whole batch of 12 samples."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index >= 40:
            raise IndexError(index)
        inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(index))
        return inputs, (inputs.sum(1) > 0).long()


class Sleeping(torch.nn.Linear):
    def __init__(self, seconds: float, counts: list[int]):
        super().__init__(4, 2)
        self.seconds, self.counts = seconds, counts

    def forward(self, inputs):
        time.sleep(self.seconds)
        self.counts.append(self.training)
        return super().forward(inputs)


def sleeping(seconds: float, counts: list[int] | None = None) -> Task:
    return Task(
        model=lambda: Sleeping(seconds, [] if counts is None else counts),
        train_data=DataLoader(Batches(), batch_size=None),
        validation_data=DataLoader(Batches(), batch_size=None),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        metric="accuracy",
    )


def whole_batches() -> Task:
    return sleeping(0.001)


@pytest.fixture
def long_step(monkeypatch):
    """Steps count as long from 30 ms on, so that the test is short."""
    monkeypatch.setattr(arm, "LONG_STEP_S", 0.03)
    monkeypatch.setattr(arm, "WARM_UP_S", 0.03)


def test_arm_with_long_steps_warms_up_with_two_and_evaluates_one_batch(long_step):
    counts: list[int] = []
    plan = Arm(TaskRef.of(lambda: sleeping(STEP, counts)), {}, "cpu", 0).build()
    assert counts.count(True) == warm_up_steps(STEP) == 2 and counts.count(False) == 1
    assert plan["step"] > 0.9 * STEP
    assert plan["evaluation"] > 0.9 * 40 * STEP, "all batches, extrapolated from one"


def test_arm_with_short_steps_warms_up_with_fifteen():
    counts: list[int] = []
    Arm(TaskRef.of(lambda: sleeping(0.0, counts)), {}, "cpu", 0).build()
    assert counts.count(True) == warm_up_steps(0.001) == 15


def test_arm_of_whole_batches_counts_their_samples():
    plan = Arm(TaskRef.of(whole_batches), {}, "cpu", 0).build()
    assert plan["samples_per_step"] == 12 and plan["samples_per_epoch"] == 40 * 12 and plan["steps"] == 40


@pytest.mark.timing
def test_profile_of_whole_batches_gives_a_reason_for_the_batch_that_cannot_grow():
    where = {"device": "cpu", "seed": 0, "budget": 3.0}
    profile = profile_steps(TaskRef.of(whole_batches), Recipe(), ceilings=True, **where)
    assert "batch size of this DataLoader cannot be changed" in profile.ceilings.not_measured["larger_batch"]


@pytest.mark.slow
def test_diagnose_of_whole_batches_answers():
    result = hasten.diagnose(whole_batches, budget=5, device="cpu")
    assert result["phases"] and result["advice"]


class SlowSamples(Dataset):
    """240 samples, each of which takes 5 ms to read."""

    def __len__(self):
        return 240

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((4,), float(index)), index % 2


def read_by_workers() -> Task:
    return dataclasses.replace(
        sleeping(0.0),
        train_data=DataLoader(Batches(), batch_size=None),
        validation_data=DataLoader(SlowSamples(), batch_size=6, num_workers=2),
    )


def read_by_workers_in_own_order() -> Task:
    order = [list(range(first, first + 6)) for first in range(0, 240, 6)]
    loader = DataLoader(SlowSamples(), batch_sampler=order, num_workers=2)
    return dataclasses.replace(read_by_workers(), validation_data=loader)


@pytest.mark.timing
@pytest.mark.parametrize(
    ("task", "limit"),
    [(read_by_workers, 1.0), (read_by_workers, 0.02), (read_by_workers_in_own_order, 1.0)],
    ids=["short", "long", "own order"],
)
def test_evaluation_whose_batches_workers_read_is_extrapolated_from_their_steady_part(task, limit, monkeypatch):
    monkeypatch.setattr(arm, "EVALUATION_S", 0.1)
    monkeypatch.setattr(arm, "WORKERS_EVALUATION_S", 0.3)
    monkeypatch.setattr(arm, "LONG_STEP_S", limit)
    built = Arm(TaskRef.of(task), {}, "cpu", 0)
    plan = built.build()
    assert built.evaluated_batches < 20, "of 40"
    whole = min(built._evaluate(None) for _ in range(3))
    assert plan["evaluation"] == pytest.approx(whole, rel=0.3)
    assert statistics.median(built.evaluate() for _ in range(5)) == pytest.approx(whole, rel=0.3)


def test_evaluation_by_workers_that_are_not_known_is_not_taken_for_shorter_than_it_is(monkeypatch):
    """Workers start together, so that several batches come at once after the first: they are no steady part."""
    monkeypatch.setattr(arm, "EVALUATION_S", 0.1)
    built = Arm(TaskRef.of(read_by_workers), {}, "cpu", 0)
    built.build()
    assert built.program.validation is not None
    unknown = dataclasses.replace(built.program.validation, spec=None, workers=WorkerConfig())
    built.program = dataclasses.replace(built.program, validation=unknown)
    _, estimated = built._warm_up_evaluation()
    assert built.evaluated_batches < 10, "of 40"
    assert estimated > 40 * 6 * 0.005 / 2, "two workers take at least half of the seconds of all samples"


def test_evaluation_of_very_long_batches_is_timed_by_one_batch(long_step, monkeypatch):
    monkeypatch.setattr(arm, "LONG_STEP_S", 0.02)
    monkeypatch.setattr(arm, "LONG_EVALUATION_S", 0.02)
    built = Arm(TaskRef.of(read_by_workers), {}, "cpu", 0)
    built.build()
    assert built.evaluated_batches == 1
