"""Several machines for real: two network namespaces, torchrun's agent on each, and a cable between them."""

import json

import pytest

from hasten.engine.train import train
from helpers import rank_tasks
from helpers.assertions import CLOSE, farthest
from helpers.netns_cluster import missing, on_both, two_machines

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def test_two_machines_train_what_one_process_trains(folder):
    train(rank_tasks.samples(), device="cpu", out=folder / "alone")
    with two_machines():
        first, second = on_both(folder, "train", "rank_tasks.py:samples", "--out", "shared", "--json")
    assert (first[0], second[0]) == (0, 0), (first[2], second[2])
    assert json.loads(first[1])["steps"] == 46 and second[1] == "", "the first rank answers, and nobody else"
    assert farthest(folder / "shared", folder / "alone") < CLOSE


@pytest.mark.slow
def test_what_fails_on_one_machine_ends_both(folder):
    with two_machines():
        told = on_both(folder, "train", "rank_tasks.py:raising", "--out", "shared")
    assert [code for code, *_ in told] == [1, 1]
    said = [text for *_, text in told]
    assert sum("sample 226: OSError: the disk is gone" in text for text in said) == 1, said
    assert sum("another rank has ended" in text for text in said) == 1, said


@pytest.mark.timing
@pytest.mark.slow
def test_the_speed_of_the_cable_is_found(folder):
    """200 megabits a second are 25 MB/s: in an all-reduce of two ranks each sends as much as its own bytes."""
    with two_machines(megabits=200):
        first, _ = on_both(folder, "bench-comm", "--json")
    found = json.loads(first[1])
    assert found["nodes"] == 2
    largest = found["collectives"]["all-reduce"]["sizes"][-1]
    assert 18e6 < largest["bytes"] / largest["seconds"]["median"] < 25.5e6
