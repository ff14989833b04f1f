"""Planted bottlenecks are found and named, and their ceilings agree with the gain of removing them."""

import pytest

from hasten.benchmarking.fork_server import Worker
from hasten.engine.tasks import TaskRef
from hasten.profiling.diagnose import diagnose
from helpers import planted_tasks

BUDGET = 6.0


def advised(result: dict) -> dict[str, float | None]:
    return {entry["method"]: entry["bound"] for entry in result["advice"]}


def seconds_a_sample(task, blocks: int = 3) -> float:
    """Returns seconds per sample over the whole run, including evaluations."""
    with Worker(
        "hasten.benchmarking.arm:Arm", task=TaskRef.of(task).to_json(), methods={}, device="cpu", seed=0
    ) as arm:
        plan = arm.call("build")
        paces = sorted(
            block["seconds"] / block["samples"] for block in (arm.call("train", count=10) for _ in range(blocks))
        )
    return paces[blocks // 2] + (plan["evaluation"] / plan["evaluate_every"] if plan["evaluation"] else 0.0)


@pytest.mark.timing
@pytest.mark.slow
def test_diagnose_names_a_slow_dataset():
    result = diagnose(planted_tasks.slow_dataset(), budget=BUDGET)
    assert "waiting for the next batch" in result["verdict"].lower()
    gain = seconds_a_sample(planted_tasks.slow_dataset()) / seconds_a_sample(planted_tasks.quiet())
    assert result["ceilings"]["input"]["median"] == pytest.approx(gain, rel=0.15)
    assert advised(result)["loader_workers"] == pytest.approx(gain, rel=0.15)
    assert sum(result["phases"].values()) == pytest.approx(1.0)
    assert result["phases"]["input"] == pytest.approx(1 - 1 / gain, abs=0.1)


@pytest.mark.timing
@pytest.mark.slow
def test_diagnose_names_a_synchronization_in_every_step():
    result = diagnose(planted_tasks.item_every_step(), budget=2.0)  # operation counts need no long measurement
    assert result["causes"]["host_reads_per_step"] == 1
    assert "reads values back" in result["verdict"]


@pytest.mark.timing
@pytest.mark.slow
def test_diagnose_names_a_tiny_batch():
    result = diagnose(planted_tasks.tiny_batch(), budget=BUDGET)
    assert "batch of 1 is small" in result["verdict"]
    assert result["ceilings"]["larger_batch"]["median"] > 2
    assert advised(result)["batch_size"] == result["ceilings"]["larger_batch"]["median"]
    assert result["causes"]["host_reads_per_step"] == 0


@pytest.mark.timing
@pytest.mark.slow
def test_diagnose_names_a_for_loop_optimizer():
    result = diagnose(planted_tasks.for_loop_optimizer(), budget=BUDGET)
    assert "optimizer's update" in result["verdict"]
    assert advised(result)["fused_optimizer"] > 1.5
    assert advised(result)["fused_optimizer"] == pytest.approx(result["ceilings"]["optimizer_step"]["median"])


@pytest.mark.timing
@pytest.mark.slow
def test_diagnose_names_an_expensive_evaluation():
    result = diagnose(planted_tasks.expensive_evaluation(), budget=BUDGET)
    assert "measuring the metric" in result["verdict"].lower()
    gain = seconds_a_sample(planted_tasks.expensive_evaluation()) / seconds_a_sample(planted_tasks.quiet())
    assert result["ceilings"]["evaluation"]["median"] == pytest.approx(gain, rel=0.15)


@pytest.mark.timing
@pytest.mark.slow
def test_diagnose_names_a_wasteful_allocator():
    result = diagnose(planted_tasks.wasteful_allocator(), budget=60)
    faults = result["causes"]["page_faults_per_step"]
    if faults < 10_000:
        pytest.skip(f"this machine's memory does not show the waste: {faults:.0f} page faults a step")
    assert "page faults" in result["verdict"]
    assert advised(result)["malloc_tuning"] > 1.1
    assert result["ceilings"]["system_time"]["median"] == advised(result)["malloc_tuning"]
