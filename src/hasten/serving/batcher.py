"""One thread owns the model and computes requests in batches; the queue before it is bounded.

The first request that waits opens a batch. It is computed once ``max_batch`` samples wait, or ``max_wait`` seconds
later. A request that is older than its deadline is answered without being computed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hasten.deploy.signature import Signature
from hasten.serving.inputs import zero_inputs

CLOSED_S = 5.0  # after which a client may try again while a server stops
MEASURED_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of batches, which --tune-batching measures
MIN_SPEEDUP = 1.05  # ratio of the samples per second of two sizes, below which the larger one does not pay
SECONDS_PER_SIZE = 0.15  # for each size
MAX_BATCH_S = 1.0  # seconds of a batch, after which no larger one is measured
MAX_WAIT_S = 0.01

Arrays = tuple[numpy.ndarray, ...]  # the inputs of a request; dimension 0 is the batch
Compute = Callable[[Arrays], numpy.ndarray]
Done = Callable[[list[tuple[Any, numpy.ndarray | Exception]]], None]  # (key of the request, its scores or the error)


class QueueFullError(Exception):
    """The queue is full or closed; ``seconds``: estimate of when to try again, from the speed of the last batches."""

    def __init__(self, seconds: float):
        super().__init__("the queue is full")
        self.seconds = seconds


class DeadlineExceededError(Exception):
    """A request waited longer than its deadline."""


@dataclass
class BatcherSettings:
    """Limits of a batcher.

    Attributes:
        max_batch: Samples computed together.
        max_wait: Seconds that the first request of a batch waits for more.
        max_queue: Samples that may wait; a request of more is accepted if none waits.
        deadline: Seconds after which a waiting request is answered by an error.
    """

    max_batch: int = 64
    max_wait: float = 0.002
    max_queue: int = 1024
    deadline: float = 10.0


@dataclass(eq=False)
class _Request:
    arrived: float
    key: Any
    inputs: Arrays

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes without the batch: requests of the same shapes can be computed together."""
        return tuple(array.shape[1:] for array in self.inputs)


class Batcher:
    """The inference thread, which the constructor starts.

    Args:
        compute: Inputs of a batch -> scores, called in the inference thread.
        done: Called in the inference thread with [(key of a request, its scores or the exception)] of a batch.
        settings: The limits.
        observe: Called after each batch with (samples, seconds of computing).
    """

    def __init__(
        self,
        compute: Compute,
        done: Done,
        settings: BatcherSettings,
        observe: Callable[[int, float], None] = lambda samples, seconds: None,
    ):
        self.compute, self.done, self.settings, self.observe = compute, done, settings, observe
        self.waiting: deque[_Request] = deque()
        self.samples = 0  # that wait
        self.wanted = 1  # samples for which the inference thread is woken; for each of them would be too often
        self.seconds_per_sample = 0.0  # of the last batches
        self.is_closed = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self.thread.start()

    def submit(self, key: Any, inputs: Arrays) -> None:
        """Queues a request; ``done`` gets its key. QueueFullError if too many samples wait, or after ``close``."""
        request = _Request(time.monotonic(), key, inputs)
        with self.changed:
            if self.is_closed:
                raise QueueFullError(CLOSED_S)
            if self.waiting and self.samples + len(request) > self.settings.max_queue:
                raise QueueFullError(self.samples * self.seconds_per_sample)
            self.waiting.append(request)
            self.samples += len(request)
            if self.samples >= self.wanted:
                self.changed.notify()

    def close(self) -> None:
        """Refuses new requests, waits until those in the queue are answered, and ends the thread."""
        with self.changed:
            self.is_closed = True
            self.changed.notify()
        self.thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            now = time.monotonic()
            late = [request for request in batch if now - request.arrived > self.settings.deadline]
            if late:
                self.done([(request.key, DeadlineExceededError()) for request in late])
            if in_time := [request for request in batch if now - request.arrived <= self.settings.deadline]:
                self._compute(in_time)

    def _next_batch(self) -> list[_Request]:
        """Waits for requests of the same shapes: at most ``max_batch`` samples, or one request; [] at the end."""
        with self.changed:
            self.wanted = 1
            while not self.waiting and not self.is_closed:
                self.changed.wait()
            if not self.waiting:
                return []
            self.wanted = self.settings.max_batch
            until = self.waiting[0].arrived + self.settings.max_wait
            while self.samples < self.settings.max_batch and not self.is_closed:
                left = until - time.monotonic()
                if left <= 0.0 or not self.changed.wait(left):
                    break
            batch = [self.waiting.popleft()]
            count = len(batch[0])
            while self.waiting and self.waiting[0].shapes == batch[0].shapes:
                count += len(self.waiting[0])
                if count > self.settings.max_batch:
                    break
                batch.append(self.waiting.popleft())
            self.samples -= sum(map(len, batch))
            return batch

    def _compute(self, batch: Sequence[_Request]) -> None:
        began = time.perf_counter()
        sizes = [len(request) for request in batch]
        try:
            columns = zip(*(request.inputs for request in batch), strict=True)
            inputs = tuple(column[0] if len(batch) == 1 else numpy.concatenate(column) for column in columns)
            step = self.settings.max_batch  # of a single large request, too
            chunks = [tuple(array[i : i + step] for array in inputs) for i in range(0, sum(sizes), step)]
            scores = numpy.concatenate([self.compute(chunk) for chunk in chunks])
            if len(scores) != sum(sizes):  # dimension 0 is not that of the samples: clients would get those of others
                raise ValueError(f"the model returned {len(scores)} scores for {sum(sizes)} samples")
            parts = numpy.split(scores, numpy.cumsum(sizes)[:-1])
            answers: list[tuple[Any, Any]] = [(request.key, part) for request, part in zip(batch, parts, strict=True)]
        except Exception as error:  # an answer for every request, whatever the model does
            if len(batch) > 1:  # one of them is wrong, such as an index that the model does not know
                half = len(batch) // 2
                self._compute(batch[:half])
                return self._compute(batch[half:])
            answers = [(batch[0].key, error)]
        seconds, samples = time.perf_counter() - began, sum(sizes)
        self.seconds_per_sample = 0.8 * self.seconds_per_sample + 0.2 * seconds / samples
        self.done(answers)
        self.observe(samples, seconds)


def measure_batches(compute: Callable[[Arrays], object], signature: Signature) -> dict[int, float]:
    """Samples of a batch -> median seconds of computing it, for batches of zeros of each of ``MEASURED_BATCH_SIZES``,
    up to one that takes longer than ``MAX_BATCH_S``.
    """
    seconds: dict[int, float] = {}
    for size in MEASURED_BATCH_SIZES:
        inputs = zero_inputs(signature, size, free=16)
        compute(inputs)
        times, began = list[float](), time.perf_counter()
        while len(times) < 5 or time.perf_counter() - began < SECONDS_PER_SIZE:
            start = time.perf_counter()
            compute(inputs)
            times.append(time.perf_counter() - start)
        seconds[size] = sorted(times)[len(times) // 2]
        if seconds[size] > MAX_BATCH_S:
            break
    return seconds


def best_batching(seconds: dict[int, float]) -> tuple[int, float]:
    """(max_batch, max_wait) from ``measure_batches``: the smallest size from which no larger one computes
    MIN_SPEEDUP times as many samples per second, and half of its seconds, at most MAX_WAIT_S.

    While one batch is computed the next one collects, so that a long wait helps only at the start of a burst.
    """
    best = next(iter(seconds))
    for size in seconds:
        if size / seconds[size] > MIN_SPEEDUP * best / seconds[best]:
            best = size
    return best, min(MAX_WAIT_S, seconds[best] / 2)
