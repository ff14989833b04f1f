"""The batcher: what is computed together, what is refused, and that every request gets one answer."""

import threading
import time

import numpy
import pytest

from hasten.serving.batcher import Batcher, BatcherSettings, DeadlineExceededError, QueueFullError, best_batching


class Recorded:
    """A batcher whose model adds 1; keeps the sizes of its batches and the answers."""

    def __init__(self, compute=lambda inputs: inputs[0] + 1, **settings):
        self.sizes, self.answers, self.changed = [], {}, threading.Condition()
        self.gate = threading.Event()
        self.gate.set()
        self.compute = compute
        self.batcher = Batcher(self._compute, self._done, BatcherSettings(**settings))

    def _compute(self, inputs):
        self.gate.wait()
        self.sizes.append(len(inputs[0]))
        return self.compute(inputs)

    def _done(self, answers):
        with self.changed:
            self.answers.update(answers)
            self.changed.notify()

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.answers) == count, 10.0), self.answers


def of(value, size=1, width=2):
    return (numpy.full((size, width), value, dtype=numpy.float32),)


def test_every_request_gets_its_own_rows():
    recorded = Recorded(max_batch=8, max_wait=0.05)
    for key in range(20):
        recorded.batcher.submit(key, of(key, size=key % 3 + 1))
    recorded.wait_for(20)
    for key, rows in recorded.answers.items():
        assert rows.shape == (key % 3 + 1, 2) and (rows == key + 1).all()
    assert max(recorded.sizes) <= 8 and len(recorded.sizes) < 20


def test_requests_of_other_shapes_are_not_mixed():
    recorded = Recorded(max_batch=8, max_wait=0.05)
    for key in range(6):
        recorded.batcher.submit(key, of(key, width=2 + key % 2))
    recorded.wait_for(6)
    assert all(rows.shape == (1, 2 + key % 2) for key, rows in recorded.answers.items())


def test_full_queue_refuses_and_states_the_wait():
    recorded = Recorded(max_queue=4, max_batch=1, max_wait=0.0)
    recorded.gate.clear()
    with pytest.raises(QueueFullError) as refused:
        for key in range(10):
            recorded.batcher.submit(key, of(key))
    assert refused.value.seconds >= 0.0
    recorded.gate.set()
    recorded.batcher.close()
    assert 4 <= len(recorded.answers) <= 6


def test_request_larger_than_the_queue_is_computed_in_parts():
    recorded = Recorded(max_queue=4, max_batch=2)
    recorded.batcher.submit("large", of(1.0, size=10))
    recorded.wait_for(1)
    assert recorded.sizes == [2] * 5  # in parts, as no batch is larger than max_batch


def test_late_request_is_answered_without_being_computed():
    recorded = Recorded(deadline=0.05, max_batch=1, max_wait=0.0)
    recorded.gate.clear()
    recorded.batcher.submit("first", of(1))
    time.sleep(0.02)
    recorded.batcher.submit("second", of(2))
    time.sleep(0.1)
    recorded.gate.set()
    recorded.wait_for(2)
    assert isinstance(recorded.answers["second"], DeadlineExceededError) and recorded.sizes == [1]


def test_request_that_the_model_cannot_compute_fails_alone():
    def compute(inputs):
        if (inputs[0] < 0).any():
            raise ValueError("negative")
        return inputs[0] + 1

    recorded = Recorded(compute, max_batch=8, max_wait=0.1)
    for key in (1, -1, 2):
        recorded.batcher.submit(key, of(key))
    recorded.wait_for(3)
    assert isinstance(recorded.answers[-1], ValueError)
    assert (recorded.answers[1] == 2).all() and (recorded.answers[2] == 3).all()


def test_model_that_mixes_the_samples_of_a_batch_answers_no_request():
    """As one whose first dimension is that of time."""
    recorded = Recorded(lambda inputs: inputs[0][-1:], max_batch=8, max_wait=0.05)
    for key in range(2):
        recorded.batcher.submit(key, of(key, size=3))
    recorded.wait_for(2)
    assert all("1 scores for 3 samples" in str(answer) for answer in recorded.answers.values())


def test_close_computes_what_waits():
    recorded = Recorded(max_batch=100, max_wait=60.0)
    for key in range(5):
        recorded.batcher.submit(key, of(key))
    recorded.batcher.close()
    assert len(recorded.answers) == 5 and recorded.sizes == [5]
    with pytest.raises(QueueFullError):  # not accepted and never answered
        recorded.batcher.submit("late", of(1))


@pytest.mark.parametrize(
    ("seconds", "size"),
    [([1.0, 1.1, 1.3, 2.6], 4), ([1.0, 2.0, 4.0, 8.0], 1), ([1.0, 1.0, 1.0, 1.0], 8), ([1.0, 2.5, 3.9, 7.0], 8)],
)
def test_batch_size_is_the_smallest_from_which_no_larger_one_pays(seconds, size):
    best, wait = best_batching({2**index: value for index, value in enumerate(seconds)})
    assert best == size and 0.0 < wait <= 0.01
