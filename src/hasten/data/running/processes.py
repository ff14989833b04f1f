"""Worker processes that compute batches: for functions that hold Python's lock.

Why not the worker processes of torch's DataLoader: when one of them is killed, torch raises from a signal handler, at whatever
line the training stands, so nobody can go on; and every batch travels in fresh shared memory, page fault by page fault.

A batch is a function of its number, so the number is all that is sent to a worker, and all that a worker that died leaves behind.
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

from hasten.contract.errors import Failure, Notice, Refusal, one_line
from hasten.data.running.parcels import Slot, packed, unpacked
from hasten.data.running.runners import stuck
from hasten.data.source import BadRow
from hasten.engine.failures import users_line

SECONDS_BETWEEN_LOOKS = 2.0  # of a worker without work, whether its parent still lives
CAUSES = {signal.SIGKILL: ", as the system does when memory runs out", signal.SIGSEGV: ", a fault in some compiled code"}


@dataclass(frozen=True)
class Processes:
    """Some processes compute batches of which ``ahead`` may wait; a batch that takes longer than ``timeout`` seconds ends it.

    A process that dies is started once more at the batch that it left; if that one gets no further, it is the end.
    """

    processes: int
    ahead: int = 2
    timeout: float | None = None

    def __call__(self, make: Callable[[int], Any], numbers: range) -> Iterator:
        slots, crew = 1 + -(-self.ahead // self.processes), []
        try:
            for _ in range(min(self.processes, len(numbers))):
                crew.append(_Worker(make, slots))  # one by one: if the system gives no more of them, those that are there end
            early = slots * len(crew)  # batches that are asked for before the first one is given
            for place, number in enumerate(numbers[:early]):
                crew[place % len(crew)].ask(number)
            for place in range(len(numbers)):
                worker = crew[place % len(crew)]
                batch = worker.answer(self.timeout)
                if place + early < len(numbers):
                    worker.ask(numbers[place + early])
                yield batch
                del batch  # or its memory could not be used again for the next one
        finally:
            for worker in crew:
                worker.end()


class _Worker:
    """One process, from this side: asked for batches by number, it answers in the order of asking."""

    def __init__(self, make: Callable[[int], Any], slots: int):
        self.make = make
        self.slots = [Slot() for _ in range(slots)]
        self.free = deque(range(slots))
        self.asked: deque[tuple[int, int]] = deque()  # (number, slot) of the answers to come
        self.second_try = False
        self._start()

    def ask(self, number: int) -> None:
        self.asked.append((number, self.free.popleft()))
        self._send(self.asked[-1])

    def answer(self, timeout: float | None):
        """The next batch.

        Raises:
            Failure: it does not come, or the process died twice in a row.
        """
        while (message := self._received(timeout)) is None:
            self._revive()
        self.second_try = False
        _, slot = self.asked.popleft()
        fine, made = unpacked(message, self.slots[slot])
        self.free.append(slot)
        if not fine:
            raise made
        return made

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
            system = multiprocessing.get_context("fork")
        except ValueError:
            raise Refusal("processes need fork, which this system has not; use threads: .prefetch(threads=2)") from None
        self.pipe, theirs = system.Pipe()
        self.process = system.Process(target=_work, args=(self.make, theirs, self.slots, os.getpid()), name="hasten-data", daemon=True)
        self.process.start()
        theirs.close()

    def _send(self, job: tuple[int, int]) -> None:
        with suppress(OSError):  # it died; whoever waits for its answer will notice
            self.pipe.send(job)

    def _received(self, timeout: float | None) -> bytes | None:
        """The next message, or None when the process is dead."""
        ready = wait([self.pipe, self.process.sentinel], timeout)
        if not ready:
            raise Failure(stuck(self.asked[0][0], timeout, f"worker process {self.process.pid}"))
        try:
            return self.pipe.recv_bytes() if self.pipe in ready or self.pipe.poll() else None
        except (EOFError, OSError):
            return None

    def _revive(self) -> None:
        self.process.join()
        died = f"worker process {self.process.pid} {_cause(self.process.exitcode)} while it made batch {self.asked[0][0]} of the pass"
        if self.second_try:
            raise Failure(f"{died}, and so did the one before it; look at the data of this batch and at the memory in use")
        warnings.warn(f"{died}; another one goes on there", Notice, stacklevel=2)
        self.second_try = True
        self.pipe.close()
        self._start()
        for job in self.asked:
            self._send(job)


def _work(make: Callable[[int], Any], pipe: Connection, slots: list[Slot], parent: int) -> None:
    """What a worker does until nobody wants anything of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        while True:
            while not pipe.poll(SECONDS_BETWEEN_LOOKS):
                if os.getppid() != parent:
                    return
            number, slot = pipe.recv()
            pipe.send_bytes(_packed(make, number, slots[slot]))
    except (EOFError, OSError):
        return  # the parent is gone


def _packed(make: Callable[[int], Any], number: int, slot: Slot) -> bytes:
    """The batch, or what was raised instead, as a message; its tensors are in the slot."""
    try:
        made = True, make(number)
        return packed(made, slot)
    except Exception as error:
        return packed((False, _sendable(error)), slot)


def _sendable(error: Exception) -> Exception:
    """The error as it can travel: its user's line and, unless one line says it all, the worker's traceback go with it."""
    with suppress(AttributeError):  # an exception may allow no more attributes
        error.raised_at = users_line(error)
    if not isinstance(error, (Failure, Refusal, BadRow)):
        error.add_note(f"in worker process {os.getpid()}:\n{''.join(traceback.format_exception(error))}")
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return Failure(one_line(error))


def _cause(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    number = signal.Signals(-code)
    return f"was killed by {number.name}{CAUSES.get(number, '')}"
