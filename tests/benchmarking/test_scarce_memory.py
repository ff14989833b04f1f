"""Comparisons where memory is scarce: two arms that do not fit together, one that does not fit alone, and the figures.

A file lock stands for the memory of a device: only one process can have it, and it is free once that process has ended.
"""

import dataclasses
import fcntl
import os
import sys
from functools import partial
from typing import Any

import pytest
import torch

import hasten
from hasten.benchmarking import arm as arm_module
from hasten.benchmarking.compare import run_interleaved
from hasten.benchmarking.worker_group import start_workers
from hasten.core.errors import MemoryExhaustedError
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.hosts.script_ref import ScriptRef
from hasten.testing import tasks
from hasten.tuning.budget import Budget
from hasten.tuning.study import Study
from hasten.tuning.systems import Incumbents, candidate, search_systems
from hasten.tuning.trial_store import TrialStore

PLANTED = 500_000_000
HELD: list[Any] = []  # in a worker: what it holds until it ends

METHODS = '''
"""Methods that take memory, or save it."""
from dataclasses import dataclass

import torch
from hasten import Card, Exactness, Method

@dataclass(frozen=True)
class Hungry(Method):
    card = Card(summary="does not fit into memory", exactness=Exactness.BIT_EXACT)
    gigabytes: int = 90

    def model(self, model, run):
        if self.gigabytes > 80:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.gigabytes}.00 GiB")
        return model

class Holds(Method):
    card = Card(summary="holds 500 MB", exactness=Exactness.BIT_EXACT)

    def model(self, model, run):
        model.held = [torch.ones(500_000_000, dtype=torch.uint8)]
        return model

'''


@pytest.fixture(name="methods")
def methods_fixture(tmp_path):
    """``name -> "file:name"`` of the methods above."""
    (tmp_path / "methods.py").write_text(METHODS)
    return lambda name: f"{tmp_path}/methods.py:{name}"


def whole_device(lock: str) -> hasten.Task:
    """A task whose run needs all of a device's memory: the second process that tries does not get it."""
    if not HELD:
        HELD.append(os.open(lock, os.O_CREAT | os.O_RDWR))
        try:
            fcntl.flock(HELD[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB") from None
    return tasks.perceptron()


def half_of_the_device() -> hasten.Task:
    """A task that runs, but reports that it needs more than half of the memory."""
    peaks = [{"device": "cuda:0", "allocated": 44e9, "reserved": 45e9, "current": 20e9, "available": 80e9}]
    arm_module.memory_peaks = lambda ranks, device: peaks  # in the worker
    return tasks.perceptron()


def quick(task: Any, a: str, b: str, **more: Any) -> Any:
    recipes = Recipe.coerce(a), Recipe.coerce(b)
    return run_interleaved(TaskRef.of(task), *recipes, budget=1.0, device="cpu", rounds=(1, 1), **more)


@pytest.mark.slow
@pytest.mark.parametrize("task", [whole_device, half_of_the_device])
def test_compare_arms_that_do_not_fit_together_runs_them_in_turns(task, tmp_path):
    task = partial(task, str(tmp_path / "lock")) if task is whole_device else task
    limits: Any = {"budget": 60.0, "rounds": (2, 2), "looks": [3]}
    result = run_interleaved(TaskRef.of(task), Recipe(), Recipe(), device="cpu", **limits).to_json()
    assert not result["interleaved"] and "memory does not suffice for both arms at once (" in result["why"]
    assert (result["rounds"], result["blocks"]) == (2, 6)
    assert len(result["losses"]["a"]) == len(result["losses"]["b"]) == len(result["losses"]["samples"]) == 3
    assert result["losses"]["a"] == result["losses"]["b"]  # at the same positions of the training
    assert [len(result["peak_memory_bytes"][name]) for name in "ab"] == [1, 1]


def test_compare_arms_that_fit_together_interleaves_them():
    assert quick(tasks.perceptron, "baseline", "baseline").to_json()["interleaved"]


@pytest.mark.slow
def test_compare_of_groups_that_do_not_fit_together_runs_them_in_turns():
    result = quick(half_of_the_device, "baseline", "baseline", processes=(2, 2)).to_json()
    assert not result["interleaved"]


CASES = [("baseline", "Hungry", 1), ("Hungry", "baseline", 0), ("Hungry", "Hungry", 0)]


@pytest.mark.parametrize(("a", "b", "failed"), CASES)
def test_arm_that_does_not_fit_alone_is_named(a, b, failed, methods):
    a, b = (each if each == "baseline" else methods(each) for each in (a, b))
    with pytest.raises(MemoryExhaustedError) as raised:
        quick(tasks.perceptron, a, b)
    assert raised.value.arm == failed
    assert "out of memory in building the run; use smaller batches, or add " in str(raised.value)
    with pytest.raises(
        MemoryExhaustedError, match=rf"{'ab'[failed]} \(.*Hungry\) does not fit into memory: out of mem"
    ):
        hasten.compare(tasks.perceptron, a, b, budget=1, device="cpu")


def test_candidate_is_not_blamed_for_the_failure_of_the_best_recipe(methods, tmp_path):
    study = Study(TaskRef.of(tasks.perceptron), "cpu", TrialStore(tmp_path / "run", {}), Budget(60.0), lambda *_: None)
    for best, tried, verdict in ((90, 70, "not measured"), (70, 90, "failed")):
        incumbents = Incumbents([Recipe({methods("Hungry"): {"gigabytes": best}})])
        item = candidate(methods("Hungry"), options={"gigabytes": tried})
        search_systems(study, incumbents, [item], samples=1e9, seconds=1.0)
        assert study.trials[-1]["verdict"] == verdict, study.trials[-1]
        assert "out of memory" in study.trials[-1]["why"]


def test_arm_reports_planted_memory_within_five_percent(methods):
    peaks = []
    for recipe in ({}, {methods("Holds"): {}}):
        arguments = {"task": TaskRef.of(tasks.perceptron), "methods": recipe, "device": "cpu", "seed": 0}
        with start_workers(1, "hasten.benchmarking.arm:Arm", **arguments) as arm:
            (peak,) = arm.call("build")["peak_memory"]
            peaks.append(peak["resident"])
            assert arm.call("peak_memory")[0]["resident"] >= peak["resident"]
    assert peaks[1] - peaks[0] == pytest.approx(PLANTED, rel=0.05)


@pytest.mark.slow
def test_compare_reports_the_peak_of_both_arms_and_ranks(methods):
    result = hasten.compare(
        dataclasses.replace(tasks.perceptron(), name="planted"), "baseline", methods("Holds"), budget=3, device="cpu",
        processes=2,
    )  # fmt: skip
    a, b = ([rank["resident"] for rank in result["peak_memory_bytes"][name]] for name in "ab")
    assert [y - x for x, y in zip(a, b, strict=True)] == pytest.approx([PLANTED, PLANTED], rel=0.05)


SCRIPT = """
import socket, sys, torch
address = socket.socket(socket.AF_UNIX)
try:
    address.bind(chr(0) + sys.argv[1])  # only one process can have it; a file would be another one in each sandbox
except OSError:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB") from None
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(64, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_scripts_that_do_not_fit_together_run_in_turns(tmp_path):
    (tmp_path / "hungry.py").write_text(SCRIPT)
    script = ScriptRef.of_command([sys.executable, "hungry.py", str(tmp_path)], directory=str(tmp_path))
    result = run_interleaved(
        script, Recipe(), Recipe(), device="cpu", budget=60.0, rounds=(1, 1), looks=[3]
    ).to_json()  # fmt: skip
    assert not result["interleaved"] and result["blocks"] == 3
    assert all(result["peak_memory_bytes"][name][0]["resident"] > 10**8 for name in "ab")


@pytest.mark.gpu
@pytest.mark.slow
def test_arms_that_need_more_than_half_of_a_gpu_run_one_after_the_other():
    result = hasten.compare(most_of_the_gpu, budget=30, device="cuda")
    assert not result["interleaved"] and result["verdict"] in ("no difference", "unsure")
    reserved = result["peak_memory_bytes"]["a"][0]["reserved"]
    assert reserved > 0.6 * torch.cuda.mem_get_info()[1]


@pytest.mark.gpu
@pytest.mark.slow
def test_next_worker_on_a_gpu_gets_the_memory_of_the_last_one():
    arguments = {"task": TaskRef.of(most_of_the_gpu), "methods": {}, "device": "cuda", "seed": 0}
    for _ in range(10):
        with start_workers(1, "hasten.benchmarking.arm:Arm", **arguments) as arm:
            arm.call("build")


def most_of_the_gpu() -> hasten.Task:
    """A task that holds 60 % of a GPU."""
    task = tasks.perceptron()

    def model() -> torch.nn.Module:
        built = task.model()
        size = int(0.6 * torch.cuda.mem_get_info()[1])
        built.held = [torch.ones(size, dtype=torch.uint8, device="cuda")]
        return built

    return dataclasses.replace(task, model=model)
