"""Worker processes that compute batches, for functions that hold the GIL.

Why not the workers of torch's DataLoader: when one of them is killed, torch raises from a signal handler at an
arbitrary line of the training, which therefore cannot continue; and it allocates new shared memory for every batch,
which costs a page fault per page.

A batch is a function of its index. The index is all that is sent to a worker, and all that is needed to replace a dead
worker.
"""

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

from hasten.core.data import WorkerConfig
from hasten.core.errors import ConfigurationError, HastenWarning, RunError, format_error
from hasten.data.source import BadRow
from hasten.data.workers import timeout_message
from hasten.data.workers.shm_transport import SharedBuffer, deserialize, serialize
from hasten.engine.error_messages import line_in_users_code

PARENT_CHECK_INTERVAL_S = 2.0  # of an idle worker
SIGNAL_CAUSES = {
    signal.SIGKILL: " (the system does this when memory runs out)",
    signal.SIGSEGV: " (a fault in compiled code)",
}


@dataclass(frozen=True)
class ProcessRunner:
    """Computes batches in forked worker processes.

    A worker that dies is replaced, with a warning, at the batch that it was computing. If its replacement dies at the
    same batch, a RunError is raised.
    """

    workers: WorkerConfig  # number of processes, and of batches that each has in flight
    timeout: float | None = None  # seconds that one batch may take before a RunError; None waits forever

    def __call__(self, make: Callable[[int], Any], indices: range) -> Iterator:
        buffers, workers = self.workers.prefetch_factor, []  # buffers of each worker
        try:
            for _ in range(min(self.workers.processes, len(indices))):
                workers.append(_Worker(make, buffers))  # one by one, so that those already started end if a fork fails
            in_flight = buffers * len(workers)
            for position, index in enumerate(indices[:in_flight]):
                workers[position % len(workers)].request(index)
            for position in range(len(indices)):
                worker = workers[position % len(workers)]
                batch = worker.result(self.timeout)
                if position + in_flight < len(indices):
                    worker.request(indices[position + in_flight])
                yield batch
                del batch  # otherwise its memory cannot be reused for the next one
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """Handle of one worker process in the parent: requests batches, and receives them in order."""

    def __init__(self, make: Callable[[int], Any], buffers: int):
        self.make = make
        self.buffers = [SharedBuffer() for _ in range(buffers)]
        self.free = deque(range(buffers))
        self.requests: deque[tuple[int, int]] = deque()  # (index of the batch, index of the buffer), oldest first
        self.is_second_try = False
        self._start()

    def request(self, index: int) -> None:
        self.requests.append((index, self.free.popleft()))
        self._send(self.requests[-1])

    def result(self, timeout: float | None) -> Any:
        """Returns the batch of the oldest request; RunError if it exceeds the timeout, or the process died twice in a
        row.
        """
        while (message := self._receive(timeout)) is None:
            self._replace()
        self.is_second_try = False
        _, buffer = self.requests.popleft()
        succeeded, result = deserialize(message, self.buffers[buffer])
        self.free.append(buffer)
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
        for buffer in self.buffers:
            buffer.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, child_pipe = context.Pipe()
        args = self.make, child_pipe, self.buffers, os.getpid()
        self.process = context.Process(target=_work, args=args, name="hasten-data", daemon=True)
        self.process.start()
        child_pipe.close()

    def _send(self, request: tuple[int, int]) -> None:
        with suppress(OSError):  # the process died, which ``result`` detects
            self.pipe.send(request)

    def _receive(self, timeout: float | None) -> bytes | None:
        """The next message, or None if the process is dead; RunError after ``timeout`` seconds (None: no limit)."""
        ready = wait([self.pipe, self.process.sentinel], timeout)
        if not ready:
            assert timeout is not None
            raise RunError(timeout_message(self.requests[0][0], timeout, f"worker process {self.process.pid}"))
        try:
            return self.pipe.recv_bytes() if self.pipe in ready or self.pipe.poll() else None
        except (EOFError, OSError):
            return None

    def _replace(self) -> None:
        self.process.join()
        batch = f"batch {self.requests[0][0]} of the epoch"
        message = f"worker process {self.process.pid} {_exit_cause(self.process.exitcode)} while computing {batch}"
        if self.is_second_try:
            hint = "check the data of this batch and the memory in use"
            raise RunError(f"{message}, and so did the process before it; {hint}")
        warnings.warn(f"{message}; another process repeats this batch", HastenWarning, stacklevel=2)
        self.is_second_try = True
        self.pipe.close()
        self._start()
        for request in self.requests:
            self._send(request)


def _work(make: Callable[[int], Any], pipe: Connection, buffers: list[SharedBuffer], parent: int) -> None:
    """Main function of a worker: computes requested batches until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        while True:
            while not pipe.poll(PARENT_CHECK_INTERVAL_S):
                if os.getppid() != parent:
                    return
            index, buffer = pipe.recv()
            pipe.send_bytes(_compute(make, index, buffers[buffer]))
    except (EOFError, OSError):
        return  # the parent ended


def _compute(make: Callable[[int], Any], index: int, buffer: SharedBuffer) -> bytes:
    """Computes batch ``index``: serialized (True, batch) or (False, exception), with tensors in the buffer."""
    try:
        return serialize((True, make(index)), buffer)
    except Exception as error:
        return serialize((False, _picklable(error)), buffer)


def _picklable(error: Exception) -> Exception:
    """The exception with its line in the user's code and, as a note, its traceback, which pickle would lose. An
    exception that cannot be pickled becomes a RunError with its message.
    """
    try:
        error.raised_at = line_in_users_code(error)  # pyright: ignore[reportAttributeAccessIssue]  # read by the engine
        if not isinstance(error, (RunError, ConfigurationError, BadRow)):
            error.add_note(f"in worker process {os.getpid()}:\n{''.join(traceback.format_exception(error))}")
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(format_error(error))


def _exit_cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    number = signal.Signals(-code)
    return f"was killed by {number.name}{SIGNAL_CAUSES.get(number, '')}"
