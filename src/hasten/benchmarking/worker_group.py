"""A Worker for each rank of a process group, used like a single Worker.

Every call goes to all ranks and returns when all of them have returned. Result, progress and warnings are those of
rank 0. Any error, a silence of ``timeout`` seconds or the deadline ends the group; the error reported is that of a rank
that failed by itself rather than of one that lost its peer.
The ranks meet through a store in this process, as they do under torchrun's agent.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from multiprocessing.connection import wait
from typing import Any

from torch.distributed import TCPStore

from hasten.benchmarking.fork_server import ERRORS, Worker, forward_message, seconds_to_wait, timeout_error
from hasten.core.errors import ConfigurationError, MemoryExhaustedError, PeerFailure, RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.engine.tasks import TaskRef
from hasten.launch.rendezvous import LOOPBACK, interface_of

COLLECTIVE_TIMEOUT_S = 86_400.0  # of the ranks; the calls of the group have timeouts of their own
SAME_ERROR_WAIT_S = 1.0  # for the other ranks to report the same error
ROOT_CAUSE_WAIT_S = 5.0  # for the failing rank to report, after ranks that only noticed its end


def start_workers(
    processes: int,
    service: str,
    timeout: float | None = None,
    deadline: float | None = None,
    /,
    task: TaskRef | None = None,
    **arguments: Any,
) -> Worker | WorkerGroup:
    """Starts one Worker (``processes`` 1) or a WorkerGroup with an object of class ``service`` on each rank.

    The object gets the JSON of ``task``. A task that the engine does not train, such as a script, starts the process
    that answers the calls itself (``TaskRef.start_worker``).

    ``timeout`` (seconds) is the default of a group's calls; calls of a single process have no timeout. ``deadline`` (a
    time of ``time.monotonic``) is the default of the calls of both, see ``Worker.call``.
    """
    if task is not None:
        answers = task.start_worker(service, processes, timeout, deadline, **arguments)
        if answers is not None:
            return answers
        arguments["task"] = task.to_json()
    if processes == 1:
        return Worker(service, {}, None, deadline, **arguments)
    return WorkerGroup(processes, service, timeout, deadline, **arguments)


class WorkerGroup:
    """An object on each of several ranks, which may call ``init_process_group`` for each training.

    The objects are created one after the other, so the constructor must not wait for other ranks. Arguments: see
    Worker.
    """

    def __init__(
        self,
        processes: int,
        service: str,
        timeout: float | None = None,
        deadline: float | None = None,
        /,
        **arguments: Any,
    ):
        self.store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.timeout, self.deadline = timeout, deadline
        environments = [_rank_environment(rank, processes, self.store.port) for rank in range(processes)]
        with ExitStack() as stack:
            self.ranks = [
                stack.enter_context(Worker(service, environment, timeout, deadline, **arguments))
                for environment in environments
            ]
            self.stack = stack.pop_all()

    def call(
        self,
        method: str,
        *,
        timeout: float | None = None,
        on_progress: ProgressCallback = no_progress,
        **arguments: Any,
    ) -> Any:
        """Calls a method on all ranks and returns the result of rank 0. Arguments: see ``Worker.call``.

        Raises:
            ConfigurationError, RunError: the error of the first rank that failed by its own error.
            RunError: a rank died, or those that have not returned were silent for ``timeout`` seconds. All ranks are
                killed.
            DeadlineError: a rank had not returned at the deadline. All ranks are killed.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline = self.deadline
        try:
            seconds_to_wait(timeout, deadline)  # starts nothing after the deadline
            for rank in self.ranks:
                rank.send(method, arguments)
            return self._collect_results(timeout, deadline, on_progress)
        except BaseException:
            self.kill()
            raise

    def _collect_results(self, timeout: float | None, deadline: float | None, on_progress: ProgressCallback) -> Any:
        results: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        while len(results) < len(self.ranks):
            messages = self._recv(results, errors, seconds_to_wait(timeout, deadline))
            if not messages:
                seconds_to_wait(timeout, deadline)
                raise timeout_error(timeout)
            if errors:
                raise self._root_cause(results, errors)
            for rank, kind, content in messages:
                if rank == 0 and kind != "result":
                    forward_message(kind, content, on_progress)
        return results[0]

    def _recv(
        self, results: dict[int, Any], errors: dict[int, Exception], timeout: float | None
    ) -> list[tuple[int, str, Any]]:
        """Waits for the next messages, as (rank, kind, content), of the ranks that are in neither dict; [] on timeout.

        Adds results and errors to the dicts.
        """
        pending: dict[Any, int] = {
            worker.connection: rank
            for rank, worker in enumerate(self.ranks)
            if rank not in results and rank not in errors
        }
        messages: list[tuple[int, str, Any]] = []
        for connection in wait(list(pending), timeout) if pending else ():
            rank = pending[connection]
            try:
                kind, content = self.ranks[rank].recv()
            except RunError as death:
                kind, content = type(death).__name__, str(death)
            if kind == "result":
                results[rank] = content
            elif kind in ERRORS:
                errors[rank] = ERRORS[kind](content)
            messages.append((rank, kind, content))
        return messages

    def _root_cause(self, results: dict[int, Any], errors: dict[int, Exception]) -> Exception:
        """The error to report: of a rank that failed by itself, rather than of one that lost its peer."""
        began = time.monotonic()
        while True:
            causes = [rank for rank, error in errors.items() if not isinstance(error, PeerFailure)]
            left = began + (SAME_ERROR_WAIT_S if causes else ROOT_CAUSE_WAIT_S) - time.monotonic()
            if left <= 0 or not self._recv(results, errors, left):
                break
        rank = causes[0] if causes else min(errors)
        error = errors[rank]
        all_the_same = len(errors) == len(self.ranks) and len({str(other) for other in errors.values()}) == 1
        if all_the_same or isinstance(error, ConfigurationError):
            return error
        kind = MemoryExhaustedError if isinstance(error, MemoryExhaustedError) else RunError
        return kind(f"rank {rank}: {error}")

    def suspend(self) -> None:
        for rank in self.ranks:
            rank.suspend()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()  # all at once, before the stack waits for one after the other
        self.stack.close()


def _rank_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Environment variables of a rank on this machine, as torchrun sets them, for init_process_group."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        # after a suspension of minutes its monitor may find that NCCL's watchdog thread, which was suspended too, hangs
        "TORCH_NCCL_ENABLE_MONITORING": 0,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(LOOPBACK) or "",
    }
    return {name: str(value) for name, value in variables.items() if value != ""}
