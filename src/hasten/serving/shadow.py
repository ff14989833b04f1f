"""A second model that gets the requests of the first and answers none: agreement and latency, for ``/metrics``."""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy
from prometheus_client import CollectorRegistry, Counter, Histogram

Compute = Callable[[tuple[numpy.ndarray, ...]], numpy.ndarray]

TOLERANCE = 0.01
MAX_WAITING = 16  # batches; more are left out, so that the queue of answers never waits for them
LATENCIES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # seconds


class Shadow:
    """Runs batches through both models in a thread of its own, which of them first alternates, and compares them.

    Args:
        first: The model that answers.
        second: The model that is compared with it.
        registry: Gets the metrics ``hasten_shadow_*``: samples, agreed samples, dropped and failed batches, seconds.
    """

    def __init__(self, first: Compute, second: Compute, registry: CollectorRegistry):
        self.models = {"first": first, "second": second}
        self.waiting: queue.Queue[tuple[tuple[numpy.ndarray, ...], numpy.ndarray] | None] = queue.Queue(MAX_WAITING)
        count = partial(Counter, registry=registry)
        self.samples = count("hasten_shadow_samples", "Samples that both models computed")
        self.agreed = count("hasten_shadow_agreed", "Samples with the same largest score")
        self.dropped = count("hasten_shadow_dropped", "Batches that were not compared")
        self.failed = count("hasten_shadow_failed", "Batches that the second model failed to compute")
        text = "Seconds of a batch by model, measured in turns"
        self.seconds = Histogram("hasten_shadow_seconds", text, ["model"], registry=registry, buckets=LATENCIES)
        self.thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self.thread.start()

    def offer(self, inputs: tuple[numpy.ndarray, ...], scores: numpy.ndarray) -> None:
        """Queues a batch and the ``scores`` that the first model answered; drops it if MAX_WAITING wait already."""
        try:
            self.waiting.put_nowait((inputs, scores))
        except queue.Full:
            self.dropped.inc()

    def close(self) -> None:
        """Waits until the queued batches are compared and the thread has ended."""
        self.waiting.put(None)
        self.thread.join()

    def _run(self) -> None:
        names = ["first", "second"]
        while (batch := self.waiting.get()) is not None:
            inputs, scores = batch
            try:
                found, seconds = dict[str, numpy.ndarray](), dict[str, float]()
                for name in names:
                    began = time.perf_counter()
                    found[name] = self.models[name](inputs)
                    seconds[name] = time.perf_counter() - began
                self.agreed.inc(agreements(scores, found["second"]))
                self.samples.inc(len(scores))
                for name in names:
                    self.seconds.labels(name).observe(seconds[name])
            except Exception:  # of the second model; the first has answered
                self.failed.inc()
            names.reverse()


def agreements(scores: numpy.ndarray, others: numpy.ndarray) -> int:
    """Number of samples on which two models agree: the same largest score, or a single score within 1 %."""
    if scores.shape != others.shape:
        return 0
    if scores.ndim > 1 and scores.shape[-1] > 1:
        same = scores.argmax(axis=-1) == others.argmax(axis=-1)
    else:
        same = numpy.abs(scores - others) <= TOLERANCE * numpy.maximum(numpy.abs(scores), numpy.abs(others))
    return int(same.reshape(len(scores), -1).all(axis=1).sum())
