"""Two nodes: two network namespaces joined by a veth pair, with torchrun's agent on each."""

import json

import pytest

from hasten.engine.train import train
from helpers import rank_tasks
from helpers.assertions import CLOSE, farthest
from helpers.netns_cluster import missing, run_on_both, two_nodes

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.mark.slow
def test_two_nodes_train_like_one_process(directory):
    train(rank_tasks.samples(), device="cpu", out=directory / "single")
    with two_nodes():
        first, second = run_on_both(directory, "train", "rank_tasks.py:samples", "--out", "shared", "--json")
    assert (first[0], second[0]) == (0, 0), (first[2], second[2])
    assert json.loads(first[1])["steps"] == 46 and second[1] == "", "the first rank answers, and nobody else"
    assert farthest(directory / "shared", directory / "single") < CLOSE


@pytest.mark.slow
def test_failure_on_one_node_ends_both(directory):
    with two_nodes():
        finished = run_on_both(directory, "train", "rank_tasks.py:raising", "--out", "shared")
    assert [code for code, *_ in finished] == [1, 1]
    errors = [text for *_, text in finished]
    assert sum("sample 226: OSError: the disk is gone" in text for text in errors) == 1, errors
    assert sum("another rank ended" in text for text in errors) == 1, errors


@pytest.mark.timing
@pytest.mark.slow
def test_link_bandwidth_is_measured(directory):
    """200 Mbit/s are 25 MB/s: in an all-reduce of two ranks each sends as many bytes as its tensor has."""
    with two_nodes(megabits=200):
        first, _ = run_on_both(directory, "bench-comm", "--json")
    found = json.loads(first[1])
    assert found["nodes"] == 2
    largest = found["collectives"]["all-reduce"]["sizes"][-1]
    assert 18e6 < largest["bytes"] / largest["seconds"]["median"] < 25.5e6
