"""A second model that gets the requests of the first and answers none: agreement and latency, for ``/metrics``."""

import queue
import threading
import time
from collections.abc import Callable

import numpy
from prometheus_client import CollectorRegistry, Counter, Histogram

Compute = Callable[[tuple[numpy.ndarray, ...]], numpy.ndarray]

MAX_WAITING = 16  # batches; more are left out, so that the shadow never slows the answers
LATENCIES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # seconds


class Shadow:
    """Runs batches through both models in a thread of its own, in turns, and compares them.

    Args:
        first: The model that answers.
        second: The model that is compared with it.
    """

    def __init__(self, first: Compute, second: Compute):
        self.models = {"first": first, "second": second}
        self.waiting: queue.Queue[tuple[tuple[numpy.ndarray, ...], numpy.ndarray] | None] = queue.Queue(MAX_WAITING)
        self.thread = threading.Thread(target=self._run, name="shadow", daemon=True)

    def register(self, registry: CollectorRegistry) -> None:
        """Creates the figures and starts."""
        self.samples = Counter("hasten_shadow_samples", "Samples that both models computed", registry=registry)
        self.agreed = Counter("hasten_shadow_agreed", "Samples with the same largest score", registry=registry)
        self.left_out = Counter("hasten_shadow_left_out", "Batches that were not compared", registry=registry)
        self.failed = Counter(
            "hasten_shadow_failed", "Batches that the second model failed to compute", registry=registry
        )
        text = "Seconds of a batch by model, measured in turns"
        self.seconds = Histogram("hasten_shadow_seconds", text, ["model"], registry=registry, buckets=LATENCIES)
        self.thread.start()

    def offer(self, inputs: tuple[numpy.ndarray, ...], scores: numpy.ndarray) -> None:
        """Queues a batch that the first model has answered; leaves it out if too many wait."""
        try:
            self.waiting.put_nowait((inputs, scores))
        except queue.Full:
            self.left_out.inc()

    def close(self) -> None:
        """Ends the thread after the batches that wait."""
        if self.thread.is_alive():
            self.waiting.put(None)
            self.thread.join()

    def _run(self) -> None:
        names = ["first", "second"]
        while (batch := self.waiting.get()) is not None:
            inputs, scores = batch
            try:
                for name in names:
                    began = time.perf_counter()
                    found = self.models[name](inputs)
                    self.seconds.labels(name).observe(time.perf_counter() - began)
                    if name == "second":
                        self._compare(scores, found)
            except Exception:  # of the second model; the first has answered
                self.failed.inc()
            names.reverse()

    def _compare(self, scores: numpy.ndarray, found: numpy.ndarray) -> None:
        self.samples.inc(len(scores))
        if scores.shape == found.shape:
            same = scores.argmax(axis=-1) == found.argmax(axis=-1)
            self.agreed.inc(int(same.reshape(len(scores), -1).all(axis=1).sum()))
