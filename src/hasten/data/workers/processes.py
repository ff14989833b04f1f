"""Worker processes that compute batches, for functions that hold the GIL.

Why not the workers of torch's DataLoader: when one of them is killed, torch raises from a signal handler at an
arbitrary line of the training, which therefore cannot continue; and it allocates new shared memory for every batch,
which costs a page fault per page.

A batch is a function of its index. The index is all that is sent to a worker, and all that is needed to replace a dead
worker.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hasten.core.errors import ConfigurationError, HastenWarning, RunError, format_error
from hasten.data.source import BadRow
from hasten.data.workers.runners import stuck
from hasten.data.workers.shm_transport import SharedBuffer, deserialize, serialize
from hasten.engine.error_messages import line_in_users_code

PARENT_CHECK_INTERVAL_S = 2.0  # of an idle worker
CAUSES = {signal.SIGKILL: ", as the system does when memory runs out", signal.SIGSEGV: ", a fault in compiled code"}


@dataclass(frozen=True)
class ProcessRunner:
    """Computes batches in forked worker processes.

    A worker that dies is replaced once, at the batch that it was computing. If its replacement dies there too, a
    Failure is raised.

    Attributes:
        processes: Number of workers.
        ahead: Finished batches that may wait for the caller.
        timeout: Seconds that one batch may take before a Failure; None waits forever.
    """

    processes: int
    prefetch: int = 2
    timeout: float | None = None

    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator:
        slots, workers = 1 + -(-self.prefetch // self.processes), []
        try:
            for _ in range(min(self.processes, len(numbers))):
                workers.append(_Worker(make, slots))  # one by one, so that those already started end if a fork fails
            requested = slots * len(workers)  # batches in flight
            for position, number in enumerate(numbers[:requested]):
                workers[position % len(workers)].ask(number)
            for position in range(len(numbers)):
                worker = workers[position % len(workers)]
                batch = worker.answer(self.timeout)
                if position + requested < len(numbers):
                    worker.ask(numbers[position + requested])
                yield batch
                del batch  # otherwise its memory cannot be reused for the next one
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """The parent's handle of one worker process, which answers requests for batches in their order."""

    def __init__(self, make: Callable[[int], Any], slots: int):
        self.make = make
        self.slots = [SharedBuffer() for _ in range(slots)]
        self.free = deque(range(slots))
        self.asked: deque[tuple[int, int]] = deque()  # (index of the batch, slot) of each open request
        self.second_try = False
        self._start()

    def ask(self, number: int) -> None:
        self.asked.append((number, self.free.popleft()))
        self._send(self.asked[-1])

    def answer(self, timeout: float | None):
        """Returns the next batch.

        Raises:
            Failure: It exceeds the timeout, or the process died twice in a row.
        """
        while (message := self._received(timeout)) is None:
            self._revive()
        self.second_try = False
        _, slot = self.asked.popleft()
        succeeded, result = deserialize(message, self.slots[slot])
        self.free.append(slot)
        if not succeeded:
            raise result
        return result

    def end(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(2.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        for slot in self.slots:
            slot.close()

    def _start(self) -> None:
        try:
            context = multiprocessing.get_context("fork")
        except ValueError:
            raise ConfigurationError(
                "processes need fork, which this system has not; use threads: .prefetch(threads=2)"
            ) from None
        self.pipe, child_pipe = context.Pipe()
        args = self.make, child_pipe, self.slots, os.getpid()
        self.process = context.Process(target=_work, args=args, name="hasten-data", daemon=True)
        self.process.start()
        child_pipe.close()

    def _send(self, job: tuple[int, int]) -> None:
        with suppress(OSError):  # the process died; ``answer`` detects it
            self.pipe.send(job)

    def _received(self, timeout: float | None) -> bytes | None:
        """Returns the next message, or None if the process is dead."""
        ready = wait([self.pipe, self.process.sentinel], timeout)
        if not ready:
            raise RunError(stuck(self.asked[0][0], timeout, f"worker process {self.process.pid}"))
        try:
            return self.pipe.recv_bytes() if self.pipe in ready or self.pipe.poll() else None
        except (EOFError, OSError):
            return None

    def _revive(self) -> None:
        self.process.join()
        process, batch = f"worker process {self.process.pid}", f"batch {self.asked[0][0]} of the pass"
        message = f"{process} {_cause(self.process.exitcode)} while it made {batch}"
        if self.second_try:
            raise RunError(
                f"{message}, and so did the one before it; look at the data of this batch and at the memory in use"
            )
        warnings.warn(f"{message}; another one continues there", HastenWarning, stacklevel=2)
        self.second_try = True
        self.pipe.close()
        self._start()
        for job in self.asked:
            self._send(job)


def _work(make: Callable[[int], Any], pipe: Connection, slots: list[SharedBuffer], parent: int) -> None:
    """Main function of a worker: computes requested batches until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        while True:
            while not pipe.poll(PARENT_CHECK_INTERVAL_S):
                if os.getppid() != parent:
                    return
            number, slot = pipe.recv()
            pipe.send_bytes(_packed(make, number, slots[slot]))
    except (EOFError, OSError):
        return  # the parent is gone


def _packed(make: Callable[[int], Any], number: int, slot: SharedBuffer) -> bytes:
    """Serializes (True, batch) or (False, exception); tensors are in the slot."""
    try:
        return serialize((True, make(number)), slot)
    except Exception as error:
        return serialize((False, _picklable(error)), slot)


def _picklable(error: Exception) -> Exception:
    """The exception with its line in the user's code and, as a note, its traceback, which pickle would lose.

    An exception that cannot be pickled becomes a Failure with its message.
    """
    try:
        error.raised_at = line_in_users_code(error)
        if not isinstance(error, (RunError, ConfigurationError, BadRow)):
            error.add_note(f"in worker process {os.getpid()}:\n{''.join(traceback.format_exception(error))}")
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(format_error(error))


def _cause(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    number = signal.Signals(-code)
    return f"was killed by {number.name}{CAUSES.get(number, '')}"
