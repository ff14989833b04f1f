"""torchrun's agent, and the five decisions in which hasten's differs from it.

torchrun's own parts do the rest: rendezvous, rank numbers, starting, watching and ending the ranks, restarts, log and error files
(https://docs.pytorch.org/docs/stable/elastic/agent.html). What is overridden, and the promise that needs it:

=================  ======================================================  ==============================================
step               torchrun                                                here, and the test in tests/launch
=================  ======================================================  ==============================================
``start_workers``  starts the same command                                 tells it which run to resume, also on a node that
                                                                           joins later (test_elastic: fewer machines go on)
``monitor``        restarts after every failure while restarts are left;   no restart where a rank failed by its own fault,
                   a node that goes costs one, a node that comes, too,     or where another node is done; a node that joins
                   on the nodes whose ranks were asked to end              costs none (test_elastic: who comes costs nobody)
``monitor``        a node that vanishes is noticed when collectives time   is noticed by its missing sign of life
                   out (minutes)                                           (test_elastic: who is done is not missed)
``close``          30 s from SIGTERM to SIGKILL                            60 s, to save a checkpoint; 3 s where ranks have
                                                                           waited in vain for a silent one (test_patience)
``exit_barrier``   waits 300 s, then gives up; a failure elsewhere does    waits as long as the other nodes are alive, and
                   not end the wait                                        hears of a failure (test_elastic: who is done waits)
=================  ======================================================  ==============================================

What the nodes have to know of each other beyond that is in the store of the rendezvous.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from hasten._torch_compat_elastic import ElasticAgent
from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.launch.rank_results import GOES_ON, RankResult, forget, read_results, run_directory

SHUTDOWN_GRACE_S = 60  # seconds that ranks have to save and to end when they are asked to
HANG_REPORT_S = 3.0  # seconds in which all but the rank that hangs report that they have waited in vain
HEARTBEAT_INTERVAL_S = 5.0  # seconds from one to the next
HEARTBEAT_TIMEOUT_S = (
    90.0  # seconds without one, after which a machine is given up; TCP takes twice as long as a cable was out
)
GOODBYE_S = 5.0  # seconds for the other machines to read that the job is over
WAIT_LIST = 1.5  # seconds until a new machine is surely seen: torch asks the store once a second
ENDED = (WorkerState.FAILED, WorkerState.UNHEALTHY)
SHAPE, OUT, CAME, GONE, ALIVE, DONE = (
    f"hasten/{name}" for name in ("shape", "out", "came", "gone", "alive", "done")
)  # in the store
COME = "another machine has come; all save, and go on together"


class ElasticAgent(ElasticAgent):
    """The ranks of this machine, from the first start to the last end.

    Args:
        folder: where they leave what came of them.
        store: that of the rendezvous.
    """

    def __init__(self, spec, logs_specs, folder: str, store: dist.Store):
        super().__init__(spec, logs_specs, shutdown_timeout=SHUTDOWN_GRACE_S)
        self.folder, self.store = folder, store
        self.done: set[int] = set()  # machines on which all ranks have come to their end, when we looked last
        self.looked, self.heard = 0.0, {}  # when we looked for signs of life; (machine, sign) -> when it was first seen
        self._hand_on()

    def start_workers(self, worker_group: WorkerGroup):
        forget(self.folder)
        self.heard, self.done = {}, set()
        if self.store.check([OUT]):
            os.environ[GOES_ON] = self.store.get(OUT).decode()
        return super().start_workers(worker_group)

    def close_workers(self, close: Callable[[signal.Signals], None], signal_number: signal.Signals) -> None:
        """Ends the ranks that are left. Where some have waited in vain, one that still reports nothing hangs: it is killed soon."""
        until = time.monotonic() + HANG_REPORT_S
        while self._some_waited() and self.workers_running():
            if time.monotonic() > until:
                return close(signal.SIGKILL)
            time.sleep(0.05)
        close(signal_number)

    def _some_waited(self) -> bool:
        return any(ending.waited for ending in read_results(self.folder).values())

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = self._looked_after(worker_group)
        while result.state == WorkerState.HEALTHY and self._nears_its_end(
            worker_group
        ):  # torch does not see who comes: it is too late
            time.sleep(worker_group.spec.monitor_interval)
            result = self._looked_after(worker_group)
        if result.state in ENDED:
            endings = read_results(self.folder)
            by_its_own_fault = any(ending.line and not ending.aftermath for ending in endings.values())
            alone = worker_group.group_world_size == 1
            if (
                by_its_own_fault
                or self._are_done(worker_group)
                or (alone and is_mutual_timeout(endings, exit_codes(result)))
            ):
                self.remaining_restarts = 0
            elif worker_group.spec.rdzv_handler.is_closed():
                raise RendezvousClosedError
            elif not alone and self._makes_room(worker_group, endings):
                self.remaining_restarts += 1  # which torch is about to take away
                warnings.warn(COME, HastenWarning, stacklevel=2)
            elif self.remaining_restarts:
                elsewhere = "a rank was asked to end" if alone else "ranks of another machine were lost"
                lost = describe_lost_rank(endings, exit_codes(result)) or elsewhere
                most = worker_group.spec.max_restarts
                which = f"restart {most - self.remaining_restarts + 1} of {most}"
                warnings.warn(
                    f"{lost}; all meet again to go on from the newest checkpoint, {which}", HastenWarning, stacklevel=2
                )
        return result

    def _looked_after(self, worker_group: WorkerGroup) -> RunResult:
        """How the ranks are; not well where a machine is missed.

        Raises:
            RendezvousClosedError: the job has ended elsewhere, which ranks may hear late that are in the midst of a long step.
        """
        result = super().monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY:
            return result
        if worker_group.spec.rdzv_handler.is_closed():
            raise RendezvousClosedError
        return RunResult(WorkerState.UNHEALTHY) if self._misses_a_machine(worker_group) else result

    def _nears_its_end(self, worker_group: WorkerGroup) -> bool:
        """Whether some machine has done all it had to; asked anew where another one comes, for whom ranks would be started again."""
        comes = worker_group.group_world_size > 1 and worker_group.spec.rdzv_handler.num_nodes_waiting()
        return bool(self._are_done(worker_group) if comes else self.done)

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            warnings.warn(COME, HastenWarning, stacklevel=2)
        super().stop_workers(worker_group)
        self._hand_on()

    def _hand_on(self) -> None:
        """Whoever meets us next is to know which run it goes on with."""
        if out := run_directory(self.folder):
            self.store.set(OUT, out)

    def exit_barrier(self) -> None:
        """All is done here, and nobody comes back to go on. The other machines are waited for, one of which may still write the model.

        Raises:
            RendezvousClosedError: the job has failed there, or one of them was lost.
        """
        group = self.get_worker_group()
        group.store.set(f"{DONE}/{group.group_rank}", "")
        while True:
            over = group.spec.rdzv_handler.is_closed()
            if len(self._are_done(group)) == group.group_world_size:
                return
            if over or self._misses_a_machine(group):
                raise RendezvousClosedError
            time.sleep(group.spec.monitor_interval)

    def _are_done(self, worker_group: WorkerGroup) -> set[int]:
        store = worker_group.store  # of this meeting alone
        self.done = {machine for machine in range(worker_group.group_world_size) if store.check([f"{DONE}/{machine}"])}
        return self.done

    def _makes_room(self, worker_group: WorkerGroup, endings: dict[int, RankResult]) -> bool:
        """Whether the ranks have ended because another agent, which saw a new machine first, has asked them to."""
        if not endings or not all(ending.stopped for ending in endings.values()):
            return False
        until = time.monotonic() + WAIT_LIST
        while not (waiting := worker_group.spec.rdzv_handler.num_nodes_waiting()) and time.monotonic() < until:
            time.sleep(worker_group.spec.monitor_interval)
        return waiting > 0

    def _misses_a_machine(self, worker_group: WorkerGroup) -> bool:
        """Whether one of the machines has not been heard of for long: it went without closing its connections."""
        if worker_group.group_world_size == 1 or time.monotonic() < self.looked + HEARTBEAT_INTERVAL_S:
            return False
        store = worker_group.store
        store.add(f"{ALIVE}/{worker_group.group_rank}", 1)
        at_work = set(range(worker_group.group_world_size)) - self._are_done(worker_group)
        signs = [(machine, store.add(f"{ALIVE}/{machine}", 0)) for machine in at_work]
        self.looked = time.monotonic()  # through a broken cable this takes as long as it is broken
        self.heard = {sign: self.heard.get(sign, self.looked) for sign in signs}
        return any(self.looked - first > HEARTBEAT_TIMEOUT_S for first in self.heard.values())


def check_same_launch_options(store: dist.Store, shape: dict[str, str]) -> None:
    """Makes sure that all machines were given the same numbers, before they wait for each other in vain.

    Raises:
        Refusal: this one was given others than the first.
    """
    first = json.loads(store.compare_set(SHAPE, "", json.dumps(shape)))
    for option, here in shape.items():
        if first[option] != here:
            raise ConfigurationError(
                f"this machine was given {option} {here}, and another one {option} {first[option]}; say the same on all of them"
            )


def leave_rendezvous(store: dist.Store, stays: bool) -> None:
    """This machine goes. ``stays``: it has the store, the job is over, and all that came are to know before it is gone."""
    until = time.monotonic() + GOODBYE_S
    with suppress(RuntimeError):  # it is gone with its machine
        store.add(GONE, 1)
        while stays and store.add(GONE, 0) < store.add(CAME, 0) and time.monotonic() < until:
            time.sleep(0.05)


def describe_lost_rank(endings: dict[int, RankResult], codes: dict[int, int]) -> str | None:
    """Which rank ended without a word, and how; not by the SIGTERM with which the agent ends the others."""
    waited = max((ending.waited for ending in endings.values()), default=0)
    silent = sorted(rank for rank, code in codes.items() if rank not in endings and code == -signal.SIGKILL)
    if waited and silent:  # see Agent.close_workers
        who = f"ranks {', '.join(map(str, silent))} have" if len(silent) > 1 else f"rank {silent[0]} has"
        return f"{who} said nothing for {waited:g} s"
    for rank, code in codes.items():
        if rank not in endings and code not in (0, -signal.SIGTERM):
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            return (
                f"rank {rank} was killed by {signal.Signals(-code).name}{memory}"
                if code < 0
                else f"rank {rank} ended with code {code}"
            )
    return None


def is_mutual_timeout(endings: dict[int, RankResult], codes: dict[int, int]) -> bool:
    """Whether all ranks were there, and none has heard what it waited for: they did not do the same."""
    return any(ending.waited for ending in endings.values()) and describe_lost_rank(endings, codes) is None


def exit_codes(result: RunResult) -> dict[int, int]:
    """The exit codes of the ranks that failed, by rank; first those that failed first, last those that had to be ended."""
    in_order = sorted(result.failures.items(), key=lambda each: (each[1].timestamp, each[0]))
    return {rank: failure.exitcode for rank, failure in in_order}
