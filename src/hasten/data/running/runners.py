"""Who computes the batches: the caller itself, threads, or processes. The batches are the same.

A runner gets a function from a number to a batch, and the numbers; it gives the batches in their order, and never
computes further ahead than it was told. Why there are no plain worker processes of torch's DataLoader: see ``processes.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from hasten.contract.data import Crew
from hasten.contract.errors import Failure


class Runner(Protocol):
    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator: ...


@dataclass(frozen=True)
class Here:
    """Each batch is computed when it is asked for."""

    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator:
        for number in numbers:
            yield make(number)  # inside a generator a stray StopIteration is an error, not the end of the pass


@dataclass(frozen=True)
class Threads:
    """Some threads compute batches of which ``ahead`` may wait; a batch that takes longer than ``timeout`` seconds ends it."""

    threads: int = 1
    ahead: int = 2
    timeout: float | None = None

    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator:
        jobs: SimpleQueue = SimpleQueue()
        waiting: deque[tuple[int, Future]] = deque()
        crew = [Thread(target=_work, args=(make, jobs), name=f"hasten-data-{i}", daemon=True) for i in range(self.threads)]
        for thread in crew:
            thread.start()
        stuck = False
        try:
            for number in numbers:
                waiting.append((number, Future()))
                jobs.put(waiting[-1])
                if len(waiting) >= self.threads + self.ahead:
                    yield self._result(*waiting.popleft())
            while waiting:
                yield self._result(*waiting.popleft())
        except _Stuck:
            stuck = True  # nobody can end a thread: it is left behind
            raise
        finally:
            for _, future in waiting:
                future.cancel()
            for _ in crew:
                jobs.put(None)
            for thread in crew:
                thread.join(0 if stuck else self.timeout)

    def _result(self, number: int, future: Future):
        try:
            return future.result(self.timeout)
        except TimeoutError:
            if future.done():
                raise  # the function's own
            raise _Stuck(stuck(number, self.timeout, "a thread")) from None


def runner_of(crew: Crew, timeout: float | None) -> Runner:
    """The runner with which a crew computes."""
    if crew.processes:
        from hasten.data.running.processes import Processes

        return Processes(crew.processes, crew.ahead, timeout)
    return Threads(crew.threads, crew.ahead, timeout) if crew.threads else Here()


def crew_of(runner: Runner) -> Crew:
    """The crew of a runner; nobody's, where it tells none."""
    if isinstance(crew := getattr(runner, "crew", None), Crew):
        return crew
    return Crew(*(getattr(runner, name, 0) for name in ("threads", "processes", "ahead")))


def in_threads(runner: Runner) -> bool:
    """Whether batches are, or may come to be, computed in threads of the training's process."""
    return bool(crew_of(runner).threads) or "threads" in getattr(runner, "kinds", ())


def stuck(number: int, seconds: float, who: str) -> str:
    """What is said about a batch that does not come."""
    return f"batch {number} of the pass did not come within {seconds:g} s: {who} hangs in it; see what it waits for, or .prefetch(timeout=)"


class _Stuck(Failure):
    """A thread that does not come back."""


def _work(make: Callable[[int], Any], jobs: SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        _finish(make, *job)
        del job  # or this thread would hold the batch, and its memory, until the next one


def _finish(make: Callable[[int], Any], number: int, future: Future) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(make(number))
        except BaseException as error:
            future.set_exception(error)
