"""Several processes that train together, measured as one: a Worker for each rank of a job, under the face of a single Worker.

All ranks are asked at once, and the job has answered when all of them have; rank 0 has the word. The first that fails by its own fault ends
the job, and so does silence. Frozen are all of them or none. Where they meet, a store in our own process tells, as torchrun's agent does it.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from multiprocessing.connection import wait

from torch.distributed import TCPStore

from hasten.contract.errors import Aftermath, Failure, Refusal
from hasten.contract.watch import Watch, silent
from hasten.launch.meeting import HERE, interface_of
from hasten.measure.workers import ERRORS, Worker, pass_on, too_long

LONGEST_WAIT = 86_400.0  # seconds for another rank that is measured: whoever measures it has limits of his own
TO_AGREE = 1.0  # seconds in which the other ranks may say that they have failed alike
TO_OWN_UP = 5.0  # and in which the one may that the others have felt


def started(processes: int, service: str, patience: float | None = None, **arguments) -> Worker | Job:
    """An object of ours in a process of its own, or one in each process of a job, which is given so many seconds of silence.

    One process waits for nobody: it takes the time that it needs, where a call does not say otherwise.
    """
    return Worker(service, **arguments) if processes == 1 else Job(processes, service, patience, **arguments)


class Job:
    """An object of ours in each of several processes that can join as the ranks of a job; used like a Worker.

    Making the object must not wait for the others: the ranks are made one after the other. They can meet once (``joined``).
    """

    def __init__(self, processes: int, service: str, patience: float | None = None, **arguments):
        self.store, self.patience = TCPStore(HERE, 0, is_master=True, wait_for_workers=False), patience
        with ExitStack() as stack:
            self.ranks = [
                stack.enter_context(Worker(service, _told(rank, processes, self.store.port), patience, **arguments))
                for rank in range(processes)
            ]
            self.living = stack.pop_all()

    def call(self, method: str, *, timeout: float | None = None, watch: Watch = silent, **arguments):
        """What the method returns on rank 0, when it has returned on all.

        Raises:
            Refusal, Failure: of the first rank that failed by its own fault; a Failure too if one died, or those that are not ready said
                nothing for ``timeout`` seconds. The job is over then.
        """
        try:
            self.thaw()
            for rank in self.ranks:
                rank.ask(method, arguments)
            return self._answer(self.patience if timeout is None else timeout, watch)
        except BaseException:
            self.kill()
            raise

    def _answer(self, timeout: float | None, watch: Watch):
        answers, faults = {}, {}
        while len(answers) < len(self.ranks):
            heard = self._hear(answers, faults, timeout)
            if not heard:
                raise too_long(timeout)
            if faults:
                raise self._fault(answers, faults)
            for rank, kind, content in heard:
                if rank == 0 and kind != "result":
                    pass_on(kind, content, watch)
        return answers[0]

    def _hear(self, answers: dict[int, object], faults: dict[int, Exception], timeout: float | None) -> list[tuple[int, str, object]]:
        """(rank, kind, content) of what those that are not ready have to say next, nothing if the time runs out. What ends a rank is noted."""
        waiting = {worker.connection: rank for rank, worker in enumerate(self.ranks) if rank not in answers and rank not in faults}
        heard = []
        for connection in wait(list(waiting), timeout) if waiting else ():
            rank = waiting[connection]
            try:
                kind, content = self.ranks[rank].hear()
            except Failure as death:
                kind, content = "Failure", str(death)
            if kind == "result":
                answers[rank] = content
            elif kind in ERRORS:
                faults[rank] = ERRORS[kind](content)
            heard.append((rank, kind, content))
        return heard

    def _fault(self, answers: dict[int, object], faults: dict[int, Exception]) -> Exception:
        """The fault behind the first ones: a rank may have only felt that of another."""
        began = time.monotonic()
        while True:
            own = [rank for rank, fault in faults.items() if not isinstance(fault, Aftermath)]
            left = began + (TO_AGREE if own else TO_OWN_UP) - time.monotonic()
            if left <= 0 or not self._hear(answers, faults, left):
                break
        rank = own[0] if own else min(faults)
        fault, alike = faults[rank], len({str(each) for each in faults.values()}) == 1 and len(faults) == len(self.ranks)
        return fault if alike or isinstance(fault, Refusal) else Failure(f"rank {rank}: {fault}")

    def freeze(self) -> None:
        for rank in self.ranks:
            rank.freeze()

    def thaw(self) -> None:
        for rank in self.ranks:
            rank.thaw()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        self.living.close()


def _told(rank: int, processes: int, port: int) -> dict[str, str]:
    """What a rank finds in its environment: what torchrun tells."""
    told = {
        "RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": HERE, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(HERE) or "",
    }  # fmt: skip
    return {name: str(value) for name, value in told.items() if value != ""}
