"""Comparison of a training by several ranks with the same training in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hasten import Task, train
from helpers.assertions import CLOSE, farthest, losses
from helpers.ranks import interrupted_run, resumed_run, run_ranks, training_of


def assert_trains_like_one_process(directory: Path, make: Callable[[], Task], strategy: str, world: int) -> None:
    """Weights and losses are equal to those of one process except for rounding; the metric is equal on all ranks."""
    single = train(make(), device="cpu", out=directory / "single")
    answers = run_ranks(world, training_of, make, strategy, directory / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(directory / "shared", directory / "single") < CLOSE
    assert losses(directory / "shared") == pytest.approx(losses(directory / "single"), rel=CLOSE)
    assert {answer["metric"] for answer in answers} == {single["metric"]}


def assert_resumes_under(then: str, world: int, directory: Path, make: Callable[[], Task], first: str) -> None:
    """A run of two ranks, interrupted, ends under another strategy and size like one in one process."""
    train(make(), device="cpu", out=directory / "single")
    broken = run_ranks(2, interrupted_run, make, directory / "shared", first)
    assert all(isinstance(answer, Exception) for answer in broken), broken
    answers = run_ranks(world, resumed_run, make, directory / "shared", then)
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(directory / "shared", directory / "single") < CLOSE
