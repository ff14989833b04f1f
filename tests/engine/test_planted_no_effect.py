"""Methods planted without effect are reported with the reason, and nothing measures them."""

import re
from pathlib import Path
from unittest import SkipTest

import pytest

import hasten
from hasten import RunError
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.testing import Subject, tasks
from hasten.testing.checks import shows_its_effect
from hasten.tuning.systems import failure_verdict
from hasten.tuning.trial import Trial
from helpers import planted_no_effect

FILE = Path(planted_no_effect.__file__)
REASONS = {
    "FlagSetTooLate": "the step ran with precision highest",
    "WrapperNeverCalled": "the wrapped function was never called",
    "CopyThrownAway": "no matrix product or convolution ran in bfloat16",
    "AutocastAroundNothing": "no matrix product or convolution ran in bfloat16",
    "FusedFlagOnACopy": "the optimizer updated the parameters without a fused kernel",
    "ClonesScaled": r"the optimizer used gradients of norm",
    "WorkersOfAnotherLoader": "no worker process is alive, expected 2",
    "ThreadsReset": "torch computes with 1 threads",
    "CompiledModuleNotCalled": r"torch.compile .* compiled no graph of this model: it was given no call",
    "CheckpointOfAnUnusedModule": "no block was recomputed in the backward pass",
    "CacheNeverRead": r"none of \d+ cached batches was read",
}


def recipe(name: str) -> Recipe:
    return Recipe().with_method(f"{FILE}:{name}")


def task() -> hasten.Task:
    return tasks.perceptron(epochs=1)


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_run_reports_the_reason(name, reason):
    result = hasten.train(task(), recipe(name), device="cpu")
    [(method, why)] = result["no_effect"]
    assert name in method and re.search(reason, why), result["no_effect"]
    assert result["effects"] == {}


@pytest.mark.parametrize("name", REASONS)
def test_trial_of_the_tuner_refuses_it(name):
    trial = Trial(TaskRef.of(task()).to_json(), recipe(name).methods, "cpu", 0)
    with pytest.raises(RunError, match=f"{name} has no effect: {REASONS[name]}") as refused:
        trial.run()
    assert failure_verdict(str(refused.value)) == "no effect"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["FlagSetTooLate", "CacheNeverRead"])  # all are refused at the same place
def test_comparison_gives_no_ratio(name):
    with pytest.raises(RunError, match=f"{name} has no effect: {REASONS[name]}"):
        hasten.compare(task(), "baseline", recipe(name), budget=1)


def test_a_check_that_fails_names_its_file_and_line():
    line = next(n for n, text in enumerate(FILE.read_text().splitlines(), 1) if "run.progress.steps" in text)
    result = hasten.train(task(), recipe("CheckFails"), device="cpu")
    assert result["effects"] == {}
    [(_, why)] = result["no_effect"]
    assert why.startswith(f"its effect check failed at {FILE}:{line}: ")
    assert "has no attribute 'steps'" in why


def test_a_method_without_a_check_is_marked():
    result = hasten.train(task(), recipe("StatesNoEffect"), device="cpu")
    assert result["no_effect"] == []
    assert [*result["effects"].values()] == ["effect not checked"]
    with pytest.raises(SkipTest, match="states no effect: it is reported as 'effect not checked'"):
        shows_its_effect(Subject(f"{FILE}:StatesNoEffect"))
