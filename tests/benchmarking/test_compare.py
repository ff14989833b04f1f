"""Comparisons in real processes: a task with itself, a planted speed-up of known size, invalid requests."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch

import hasten
from hasten import ConfigurationError, RunError, Task
from hasten.benchmarking.arm import estimate
from hasten.benchmarking.blocks import MIN_PAIRS, block_samples, block_steps, check_blocks_are_fair
from hasten.benchmarking.compare import Comparison, run_interleaved
from hasten.benchmarking.fork_server import DeadlineError
from hasten.benchmarking.measurement import ArmSamples
from hasten.benchmarking.pair import Pair
from hasten.benchmarking.ratio import Ratio
from hasten.benchmarking.worker_group import start_workers
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.profiling.step_profile import profile_steps
from hasten.reporting.result_schema import CompareResult
from hasten.reporting.validation import validate
from helpers import SLACK_S


class Sleepy(torch.utils.data.Dataset):
    """256 samples; every eighth waits ``pause`` seconds."""

    def __init__(self, pause: float):
        self.pause = pause

    def __len__(self):
        return 256

    def __getitem__(self, index):
        if index % 8 == 0:
            time.sleep(self.pause)
        return torch.full((4,), index / 256), index % 2


def sleepy(pause: float = 0.002) -> Task:
    return Task(
        model=lambda: torch.nn.Linear(4, 2),
        train_data=Sleepy(pause),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=8,
        epochs=2,
    )


@pytest.mark.timing
@pytest.mark.slow
def test_compare_of_task_with_itself_finds_no_difference():
    result = hasten.compare(sleepy(), budget=6)
    assert result["verdict"] in ("no difference", "unsure")
    assert result["ratio"]["low"] < 1.02
    assert result["ratio"]["high"] > 0.98


@pytest.mark.timing
@pytest.mark.slow
def test_compare_with_planted_speedup_finds_its_size():
    """The cache removes the wait; the remaining time is measured on a task that never waits."""
    slow, fast = sleepy(0.004), sleepy(0.0)
    gained = hasten.compare(slow, "baseline", "cache_dataset", budget=8)
    rest = hasten.compare(fast, "cache_dataset", "cache_dataset", budget=3)["seconds_per_1000_samples"]["a"]
    planted = (rest + 1000 * 0.004 / 8) / rest
    assert gained["verdict"] == "faster"
    assert gained["ratio"]["median"] == pytest.approx(planted, rel=0.35)
    assert gained["ratio"]["low"] > 2


def diverging(data) -> Task:
    """A task whose weights overflow after one or two steps."""
    return Task(
        model=lambda: torch.nn.Linear(4, 1),
        train_data=data,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e30),
        batch_size=8,
    )


def with_one_nan(make=lambda data: data) -> Task:
    """NaN in one of eight batches."""
    inputs = torch.ones(64, 4)
    inputs[20] = torch.nan
    return dataclasses.replace(
        sleepy(), train_data=make(torch.utils.data.TensorDataset(inputs, torch.zeros(64, dtype=torch.long)))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            with_one_nan(),
            r"the loss is nan at step (\d) \(epoch 1, batch \1\): the batch itself holds NaN or infinity; clean "
            r"the data",
        ),
        (
            with_one_nan(lambda data: torch.utils.data.DataLoader(data, batch_size=8)),
            r"the loss is nan at step 3 \(epoch 1, batch 3\): the batch itself holds NaN or infinity",
        ),
        (
            with_one_nan(lambda data: torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)),
            r"the loss is nan at step (\d) \(epoch 1, batch \1\): the batch itself holds NaN or infinity",
        ),
        (
            diverging(torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))),
            r"the loss is (nan|inf) at step \d .*: the batch itself is finite, the training diverged",
        ),
    ],
    ids=["samples", "loader", "shuffled loader", "training"],
)
def test_compare_and_diagnose_with_nan_loss_raise(task, message):
    """The error is raised before there is anything to compare."""
    with pytest.raises(RunError, match=message):
        hasten.compare(task, budget=3)
    with pytest.raises(RunError, match=message):
        hasten.train(task, device="cpu")


def test_compare_budget_may_be_text(monkeypatch):
    def raise_budget_error(*arguments, budget, **others):
        raise RunError(f"{budget} seconds")

    monkeypatch.setattr("hasten.benchmarking.compare.run_interleaved", raise_budget_error)
    monkeypatch.setattr("hasten.profiling.diagnose.profile_steps", raise_budget_error)
    with pytest.raises(RunError, match=r"^90\.0 seconds"):
        hasten.compare(sleepy(), budget="1.5m")
    with pytest.raises(RunError, match=r"^36\.0 seconds"):
        hasten.diagnose(sleepy(), budget="60s")
    for verb in (hasten.compare, hasten.diagnose):
        for wrong in ("soon", 0, -1, None, True, float("nan")):
            with pytest.raises(ConfigurationError, match=r"^budget must be a time such as 90s, 10m or 1h, not "):
                verb(sleepy(), budget=wrong)


CLOCK_CHANGING_METHOD = """
import time
from contextlib import contextmanager
from unittest.mock import patch
from hasten import Card, Exactness, Method

class Liar(Method):
    card = Card(summary="a clock at half its speed", exactness=Exactness.BIT_EXACT, source="none",
        gain_when="one looks at that clock")

    def process_context(self, context, run):
        @contextmanager
        def at_half_speed():
            clock = time.perf_counter
            with context(), patch("time.perf_counter", lambda: clock() / 2):
                yield

        return at_half_speed
"""


def test_compare_arm_that_changes_its_clock_raises(tmp_path):
    (tmp_path / "liar.py").write_text(CLOCK_CHANGING_METHOD)
    with pytest.raises(RunError, match=r"the clock of the comparison .* must not change the clock"):
        hasten.compare(sleepy(0.01), "baseline", f"{tmp_path}/liar.py:Liar", budget=3)


class Late:
    """Stands in for an arm whose first results arrive late, as on a busy machine."""

    def __init__(self, times: int):
        self.times = times

    def call(self, method: str, count: int, timeout: float) -> dict:
        self.times -= 1
        time.sleep(0.3 if self.times >= 0 else 0.1)
        return {"samples": 8, "seconds": 0.1, "position": 8}

    def suspend(self) -> None:
        pass


def test_run_interleaved_late_result_is_measured_again():
    plan = {"samples": 0, "samples_per_step": 8, "sync_period": 1, "step": 0.1}
    late, hopeless = (Pair([Late(times)], [plan], 3.0) for times in (2, 3))
    assert late.time_blocks(8, (0,))[0]["samples"] == 8
    with pytest.raises(RunError, match="must not change the clock"):
        hopeless.time_blocks(8, (0,))


@pytest.mark.parametrize(
    ("step", "sync_period", "steps"),
    [(0.1, 1, 5), (0.1, 16, 16), (0.001, 16, 304), (0.1, 7, 7), (2.0, 1, 1), (2.0, 500, 500)],
)
def test_steps_per_block_is_multiple_of_sync_period(step, sync_period, steps):
    """Otherwise a method that communicates every few steps would be timed between two exchanges."""
    assert block_steps({"step": step, "sync_period": sync_period}) == steps


@pytest.mark.parametrize(
    ("steps", "samples"),
    [
        (((0.1, 8, 1), (0.1, 8, 1)), 5 * 8),  # seconds and samples of a step, synchronization period
        (((0.01, 10, 1), (0.01, 20, 1)), 300),  # 0.3 and 0.15 s
        (((0.01, 10, 1), (0.001, 10, 1)), 1500),  # 1.5 and 0.15 s
        (((0.1, 10, 1), (0.0001, 10, 1)), 300),  # 3 and 0.003 s: not longer for the slower arm
        (((0.1, 8, 16), (0.1, 8, 1)), 16 * 8),  # a whole period
        (((5.0, 8, 1), (5.0, 8, 1)), 8),  # a whole step
    ],
)
def test_samples_per_block_are_enough_for_both_arms(steps, samples):
    plans = [dict(zip(("step", "samples_per_step", "sync_period"), values, strict=True)) for values in steps]
    assert block_samples(plans) == samples


def test_compare_repetitions_beyond_the_budget_raise():
    recipe, plan = Recipe.parse("diloco:sync_every=500"), {"step": 0.1, "sync_period": 500, "warmup_steps": 0}
    check_blocks_are_fair(recipe, plan, 500, longest=200.0)
    with pytest.raises(
        RunError,
        match="synchronizes every 500 steps, so that 3 fair blocks take 150 s, and the budget allows 40 s; give a "
        "larger budget",
    ):
        check_blocks_are_fair(recipe, plan, 500, longest=40.0)


def test_check_blocks_are_fair_with_warmup_steps_raises():
    recipe, plan = Recipe.parse("local_sgd:warmup_steps=500"), {"step": 0.1, "sync_period": 8, "warmup_steps": 500}
    with pytest.raises(RunError, match="the first 500 steps of local_sgd:warmup_steps=500 differ from the others"):
        check_blocks_are_fair(recipe, plan, 8, longest=1e9)


class Hanging(Sleepy):
    """The dataset of a task whose construction does not end."""

    def __init__(self):
        time.sleep(3600)


@pytest.mark.timing
@pytest.mark.slow
def test_run_interleaved_at_the_deadline_ends_with_the_blocks_it_has():
    """The blocks take 0.3 s each, and the budget would allow far more."""
    began = time.monotonic()
    comparison = run_interleaved(
        TaskRef.of(sleepy()), Recipe(), Recipe(), budget=600.0, device="cpu", looks=[1000], deadline=began + 5.0
    )
    assert time.monotonic() - began < 5.0 + SLACK_S
    assert len(comparison.a.blocks) == len(comparison.b.blocks) >= 3


class HangingOnceBuilt(Sleepy):
    """Its construction does not end if ``marker`` exists; it is made by the second construction."""

    def __init__(self, marker: Path):
        super().__init__(0.0)
        if marker.exists():
            time.sleep(3600)
        count = marker.with_suffix(".count")
        count.write_text(count.read_text() + "x" if count.exists() else "x")
        if len(count.read_text()) == 2:
            marker.touch()


@pytest.mark.slow
def test_run_interleaved_with_a_second_round_that_hangs_ends_with_the_first(tmp_path):
    began, ref = time.monotonic(), TaskRef.of(lambda: replace_data(HangingOnceBuilt(tmp_path / "marker")))
    comparison = run_interleaved(ref, Recipe(), Recipe(), budget=60.0, device="cpu", deadline=began + 9.0)
    assert time.monotonic() - began < 9.0 + SLACK_S
    assert comparison.to_json()["rounds"] == 1 and len(comparison.a.blocks) >= MIN_PAIRS
    assert "with so few rounds it assumes that processes of one recipe differ by 3 %" in comparison.why


def replace_data(data) -> Task:
    return dataclasses.replace(sleepy(), train_data=data)


def test_run_interleaved_arms_are_at_the_same_position_from_the_first_step_asked_for():
    """The batches of b are four times as large, so its warm-up takes it further."""
    recipe, ref = Recipe.parse("batch_size:factor=4"), TaskRef.of(sleepy(0.0))
    comparison = run_interleaved(
        ref, Recipe(), recipe, budget=1.0, device="cpu", rounds=(1, 1), looks=[3], start_step=500
    )
    a, b = comparison.a.blocks, comparison.b.blocks
    assert a[0]["position"] - a[0]["samples"] == pytest.approx(500 * 8, abs=16)
    for one, other in zip(a, b, strict=True):
        assert one["position"] == pytest.approx(other["position"], abs=16)
        assert one["samples"] == pytest.approx(other["samples"], abs=32)
    losses = comparison.losses()
    assert [len(losses[key]) for key in ("samples", "a", "b")] == [3, 3, 3]
    assert 0.1 < losses["b"][-1] < 0.8  # of a task that cannot be learned


def test_arm_built_without_evaluation_has_none():
    task = dataclasses.replace(sleepy(0.0), validation_data=Sleepy(0.0), metric="accuracy")
    arguments = {"task": TaskRef.of(task), "methods": {}, "device": "cpu", "seed": 0}
    for with_evaluation in (True, False):
        with start_workers(1, "hasten.benchmarking.arm:Arm", **arguments) as arm:
            plan = arm.call("build", with_evaluation=with_evaluation)
            assert (plan["evaluation"] is not None) is with_evaluation


@pytest.mark.timing
@pytest.mark.slow
def test_run_interleaved_restarts_its_processes_and_keeps_the_positions():
    comparison = run_interleaved(TaskRef.of(sleepy(0.0)), Recipe(), Recipe(), budget=16.0, device="cpu")
    result, blocks = comparison.to_json(), comparison.a.blocks
    assert 3 <= result["rounds"] <= 16
    first, second = ([block["position"] for block in blocks if block["round"] == number] for number in (1, 2))
    assert first[:3] == pytest.approx(second[:3], rel=0.2)
    assert result["losses"]["samples"] == first


LATE_METHOD = """
import time
from hasten import Card, Exactness, Method

class Late(Method):
    card = Card(summary="sleeps from step 1000 on", exactness=Exactness.BIT_EXACT)

    def zero_grad(self, zero_grad, run):
        def late():
            zero_grad()
            if run.progress.step > 1000:
                time.sleep(0.004)

        return late
"""


@pytest.mark.timing
@pytest.mark.slow
def test_compare_of_a_long_training_looks_at_a_later_stretch(tmp_path):
    (tmp_path / "late.py").write_text(LATE_METHOD)
    task = dataclasses.replace(sleepy(0.002), epochs=10_000)
    result = hasten.compare(task, "baseline", f"{tmp_path}/late.py:Late", budget=24)
    first, later = result["by_position"]
    assert first["step"] < 100 and later["step"] > 1000
    assert later["ratio"]["high"] < first["ratio"]["low"]
    assert "; the ratio depends on the position: " in result["why"]


@pytest.mark.parametrize("measure", ["compare", "profile", "estimate"])
def test_measurement_of_a_task_that_does_not_load_ends_at_the_deadline(measure):
    began = time.monotonic()
    ref = TaskRef.of(lambda: dataclasses.replace(sleepy(), train_data=Hanging()))
    limits = {"device": "cpu", "deadline": began + 1.0}
    with pytest.raises(DeadlineError, match="the deadline passed"):
        if measure == "compare":
            run_interleaved(ref, Recipe(), Recipe(), budget=60.0, **limits)
        elif measure == "profile":
            profile_steps(ref, Recipe(), seed=0, budget=60.0, **limits)
        else:
            estimate(ref, **limits)
    assert time.monotonic() - began < 1.0 + SLACK_S


def test_compare_method_without_effect_raises():
    with pytest.raises(RunError, match=r"channels_last has no effect"):
        hasten.compare(sleepy(), "baseline", "channels_last", budget=3)


@pytest.mark.parametrize(
    "recipe", ["no_such_method", "num_threads:count=many", "missing.toml", "in_memory_batches+cache_dataset"]
)
def test_compare_invalid_request_raises_before_start(recipe):
    with pytest.raises(ConfigurationError):
        hasten.compare(sleepy(), "baseline", recipe, budget=3)


def test_comparison_to_json_is_read_back_without_a_loss():
    plan = {"evaluate_every": 64, "samples_per_epoch": 256, "start": 0.5}
    blocks = [
        {"seconds": 0.3, "samples": 40, "cpu": 0.2, "switches": 1, "round": 1, "position": 90, "loss": 2.5},
        {"seconds": 0.4, "samples": 40, "cpu": 0.3, "switches": 0, "round": 2, "position": 90, "loss": 2.5},
    ]
    arms = [ArmSamples(Recipe.parse(name), plan, 2, blocks, [0.1, 0.2]) for name in ("ema", "tf32")]
    noise = {"spread_percent": 1.0, "involuntary_switches": 1, "steal_percent": None, "load": 0.5}
    written = Comparison(
        "faster", Ratio(1.2, 1.1, 1.3), *arms, "why", 3.0, noise, [(9, Ratio(1.0, 0.9, 1.1))]
    ).to_json()
    assert written.keys() <= CompareResult.__annotations__.keys()
    read = validate(written)
    assert {key: read[key] for key in written if key != "cpu_ratio"} == {
        key: written[key] for key in written if key != "cpu_ratio"
    }
    assert read["cpu_ratio"] == {"median": 1.0, "low": None, "high": None}
    assert written["rounds"] == 2
    assert written["losses"] == {"samples": [90], "a": [2.5], "b": [2.5]}
    assert written["seconds_per_1000_samples"]["a"] == pytest.approx(1000 * (0.4 / 40 + 0.1 / 64))
