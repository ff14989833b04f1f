"""Runners: compute batches in the caller, in threads or in worker processes. All give the same batches.

A runner takes a function from the index of a batch to the batch, and the indices. It yields the batches in order and
computes at most ``ahead`` of them in advance. ``processes.py`` explains why torch's DataLoader workers are not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from hasten.core.data import WorkerConfig
from hasten.core.errors import RunError


class Runner(Protocol):
    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator: ...


@dataclass(frozen=True)
class InlineRunner:
    """Computes each batch in the caller when it is requested."""

    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator:
        for number in numbers:
            yield make(number)  # inside a generator a stray StopIteration is an error, not the end of the pass


@dataclass(frozen=True)
class ThreadRunner:
    """Computes batches in threads.

    Attributes:
        threads: Number of threads.
        ahead: Finished batches that may wait for the caller.
        timeout: Seconds that one batch may take before a Failure; None waits forever.
    """

    threads: int = 1
    prefetch: int = 2
    timeout: float | None = None

    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator:
        jobs: SimpleQueue = SimpleQueue()
        waiting: deque[tuple[int, Future]] = deque()
        threads = [
            Thread(target=_work, args=(make, jobs), name=f"hasten-data-{i}", daemon=True) for i in range(self.threads)
        ]
        for thread in threads:
            thread.start()
        stuck = False
        try:
            for number in numbers:
                waiting.append((number, Future()))
                jobs.put(waiting[-1])
                if len(waiting) >= self.threads + self.prefetch:
                    yield self._result(*waiting.popleft())
            while waiting:
                yield self._result(*waiting.popleft())
        except _Stuck:
            stuck = True  # a thread cannot be ended from outside: it is left behind
            raise
        finally:
            for _, future in waiting:
                future.cancel()
            for _ in threads:
                jobs.put(None)
            for thread in threads:
                thread.join(0 if stuck else self.timeout)

    def _result(self, number: int, future: Future):
        try:
            return future.result(self.timeout)
        except TimeoutError:
            if future.done():
                raise  # raised by the function itself
            raise _Stuck(stuck(number, self.timeout, "a thread")) from None


def runner_of(workers: WorkerConfig, timeout: float | None) -> Runner:
    """Returns the runner for a worker configuration."""
    if workers.processes:
        from hasten.data.workers.processes import ProcessRunner

        return ProcessRunner(workers.processes, workers.prefetch, timeout)
    return ThreadRunner(workers.threads, workers.prefetch, timeout) if workers.threads else InlineRunner()


def workers_of(runner: Runner) -> WorkerConfig:
    """Returns the worker configuration of a runner; one without workers for a runner that has none."""
    if isinstance(workers := getattr(runner, "workers", None), WorkerConfig):
        return workers
    return WorkerConfig(*(getattr(runner, name, 0) for name in ("threads", "processes", "prefetch")))


def in_threads(runner: Runner) -> bool:
    """Whether batches are computed, or may later be computed, in threads of the training process."""
    return bool(workers_of(runner).threads) or "threads" in getattr(runner, "kinds", ())


def stuck(number: int, seconds: float, who: str) -> str:
    """Returns the error message for a batch that exceeds the timeout."""
    hint = "see what it waits for, or .prefetch(timeout=)"
    return f"batch {number} of the pass did not come within {seconds:g} s: {who} hangs in it; {hint}"


class _Stuck(RunError):
    """A thread did not finish its batch within the timeout."""


def _work(make: Callable[[int], Any], jobs: SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        _finish(make, *job)
        del job  # otherwise this thread keeps the batch in memory until the next one


def _finish(make: Callable[[int], Any], number: int, future: Future) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(make(number))
        except BaseException as error:
            future.set_exception(error)
