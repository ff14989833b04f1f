"""Runners: compute batches in the caller, in threads or in worker processes. All yield the same batches.

A runner takes a function from the index of a batch to the batch, and the indices. It yields the batches in order and
computes at most ``prefetch`` of them in advance. ``processes.py`` explains why torch's DataLoader workers are not used.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from hasten.core.data import WorkerConfig
from hasten.core.errors import RunError
from hasten.data.workers import timeout_message

DEFAULT_TIMEOUT_S = 600.0


class Runner(Protocol):
    """Computes batches: ``(function from index to batch, indices) -> iterator over the batches in order``."""

    @property
    def workers(self) -> WorkerConfig: ...

    @property
    def timeout(self) -> float | None:
        """Seconds that one batch may take before a RunError; None waits forever."""

    def __call__(self, make: Callable[[int], Any], indices: range) -> Iterator: ...


@dataclass(frozen=True)
class InlineRunner:
    """A runner without workers: each batch is computed by the caller when it requests it, and has no timeout."""

    workers: WorkerConfig = field(default_factory=WorkerConfig, init=False)
    timeout: float | None = DEFAULT_TIMEOUT_S  # of workers that replace this runner

    def __call__(self, make: Callable[[int], Any], indices: range) -> Iterator:
        for index in indices:
            yield make(index)  # inside a generator, a StopIteration of the user's code is an error, not the last batch


@dataclass(frozen=True)
class ThreadRunner:
    """Computes batches in threads, which end with the iteration, unless one hangs."""

    workers: WorkerConfig  # number of threads, and of finished batches that may wait
    timeout: float | None = None  # seconds that one batch may take before a RunError; None waits forever

    def __call__(self, make: Callable[[int], Any], indices: range) -> Iterator:
        jobs: SimpleQueue = SimpleQueue()
        pending: deque[tuple[int, Future]] = deque()
        names = [f"hasten-data-{thread}" for thread in range(self.workers.threads)]
        threads = [Thread(target=_work, args=(make, jobs), name=name, daemon=True) for name in names]
        for thread in threads:
            thread.start()
        hangs = False
        try:
            for index in indices:
                pending.append((index, Future()))
                jobs.put(pending[-1])
                if len(pending) >= self.workers.threads + self.workers.prefetch:
                    yield self._result(*pending.popleft())
            while pending:
                yield self._result(*pending.popleft())
        except _BatchTimeoutError:
            hangs = True  # a thread cannot be ended from outside: it keeps running
            raise
        finally:
            for _, future in pending:
                future.cancel()
            for _ in threads:
                jobs.put(None)
            for thread in threads:
                thread.join(0 if hangs else self.timeout)

    def _result(self, index: int, future: Future) -> Any:
        try:
            return future.result(self.timeout)
        except TimeoutError:
            if future.done() or self.timeout is None:
                raise  # raised by the function itself
            raise _BatchTimeoutError(timeout_message(index, self.timeout, "a thread")) from None


def runner_of(workers: WorkerConfig, timeout: float | None) -> Runner:
    """Returns a ProcessRunner, a ThreadRunner, or without workers an InlineRunner; ``timeout``: seconds per batch."""
    if workers.processes:
        from hasten.data.workers.processes import ProcessRunner

        return ProcessRunner(workers, timeout)
    return ThreadRunner(workers, timeout) if workers.threads else InlineRunner(timeout=timeout)


def in_threads(runner: Runner) -> bool:
    """Whether batches are computed, or may later be computed, in threads of the training process."""
    return bool(runner.workers.threads) or "threads" in getattr(runner, "kinds", ())


class _BatchTimeoutError(RunError):
    """A thread did not finish its batch within the timeout."""


def _work(make: Callable[[int], Any], jobs: SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        _finish(make, *job)
        del job  # otherwise this thread keeps the batch in memory until the next one


def _finish(make: Callable[[int], Any], index: int, future: Future) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(make(index))
        except BaseException as error:
            future.set_exception(error)
