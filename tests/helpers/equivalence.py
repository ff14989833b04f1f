"""Comparison of a training by several ranks with the same training in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hasten import Task, train
from helpers.assertions import CLOSE, farthest, losses
from helpers.ranks import run_ranks, training_of


def assert_trains_like_one_process(directory: Path, make: Callable[[], Task], strategy: str, world: int) -> None:
    """Weights and losses are equal to those of one process except for rounding; the metric is equal on all ranks."""
    single = train(make(), device="cpu", out=directory / "single")
    answers = run_ranks(world, training_of, make, strategy, directory / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(directory / "shared", directory / "single") < CLOSE
    assert losses(directory / "shared") == pytest.approx(losses(directory / "single"), rel=CLOSE)
    assert {answer["metric"] for answer in answers} == {single["metric"]}
