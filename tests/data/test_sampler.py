"""Sample orders are permutations, functions of (seed, epoch), and can be entered at any position."""

import time

import numpy
import pytest

from hasten import ConfigurationError
from hasten.data import Pipeline
from hasten.data.sampler import DeterministicBatchSampler
from helpers.pipelines import Runs

EDGES = numpy.array([0, 7, 8, 30, 30, 41, 64, 99])


def rows_of(order, epoch=0):
    return numpy.concatenate([order.batches(epoch)(number) for number in range(len(order))])


@pytest.mark.parametrize("window", [None, 1, 2, 3, 7, 50])
@pytest.mark.parametrize("size", [1, 10, 99, 200])
def test_shuffle_is_a_permutation_that_can_be_entered_anywhere(window, size):
    order = DeterministicBatchSampler(99, size, seed=4, window=window, chunk_offsets=EDGES)
    for epoch in (0, 1):
        expected = rows_of(order, epoch)
        assert expected.dtype == numpy.int64 and sorted(expected) == list(range(99))
        for number in reversed(range(len(order))):
            assert (order.batches(epoch)(number) == expected[number * size : (number + 1) * size]).all()
    assert (rows_of(order) != rows_of(order, 1)).any() and (
        rows_of(order) != rows_of(DeterministicBatchSampler(99, size, 5, False, window, EDGES))
    ).any()
    assert (rows_of(order) == rows_of(DeterministicBatchSampler(99, size, 4, False, window, EDGES))).all()


def test_window_shuffles_within_its_chunks():
    edges = numpy.arange(0, 1001, 10)
    shuffled = rows_of(DeterministicBatchSampler(1000, 25, seed=1, window=4, chunk_offsets=edges))
    for window in shuffled.reshape(-1, 40):
        assert len(set(window // 10)) == 4, "rows of four runs"
        assert (numpy.diff(window // 10) != 0).sum() > 10, "mixed"
    assert (shuffled.reshape(-1, 40).min(1) // 10 != numpy.arange(0, 100, 4)).any(), (
        "the runs are not in their old order"
    )


def test_sampler_without_seed_keeps_the_row_order():
    assert (rows_of(DeterministicBatchSampler(99, 10)) == numpy.arange(99)).all()
    assert (
        len(DeterministicBatchSampler(99, 10, drop_last=True)) == 9
        and len(DeterministicBatchSampler(99, 10)) == 10
        and len(DeterministicBatchSampler(0, 10)) == 0
    )


def test_source_states_its_chunks():
    rows = [
        row for batch in Pipeline(Runs(EDGES.tolist())).shuffle(seed=0, window=1).batch(9) for row in batch.tolist()
    ]
    assert sorted(rows) == list(range(99))
    runs = numpy.searchsorted(EDGES, rows, side="right")
    assert (numpy.diff(runs) != 0).sum() == 5, "six runs that are not empty, one after the other"


def test_shuffle_of_too_many_rows_requires_a_window():
    with pytest.raises(ConfigurationError, match=r"too many to be shuffled all at once.*window"):
        DeterministicBatchSampler(1 << 40, 8, seed=0).batches(0)
    edges = numpy.arange(0, (1 << 40) + 1, 1 << 20)
    began = time.process_time()
    assert len(DeterministicBatchSampler(1 << 40, 8, seed=0, window=2, chunk_offsets=edges).batches(3)(1 << 36)) == 8
    assert time.process_time() - began < 2
