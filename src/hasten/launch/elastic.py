"""torch's agent, which starts all ranks again where some were lost without a word, and not where one failed by its own fault.

The machines meet again and again in torch's rendezvous (https://docs.pytorch.org/docs/stable/elastic/rendezvous.html): when ranks have ended, when
a machine has come, when one has not been heard of for long. What they have to know of each other beyond that stands in the store of the rendezvous.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from contextlib import suppress
from subprocess import Popen

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from hasten.contract.errors import Notice, Refusal
from hasten.launch.endings import GOES_ON, Ending, folder_of_the_run, forget, leave_of, left

GRACE = 60  # seconds that ranks have to save and to end when they are asked to
TO_OWN_UP = 3.0  # seconds in which all but the rank that hangs say that they have waited in vain
SIGN_OF_LIFE = 5.0  # seconds from one to the next
SILENCE = 90.0  # seconds without one, after which a machine is given up; TCP takes twice as long as a cable was out
FAREWELL = 5.0  # seconds for the other machines to read that the job is over
WAIT_LIST = 1.5  # seconds until a new machine is surely seen: torch asks the store once a second
ENDED = (WorkerState.FAILED, WorkerState.UNHEALTHY)
SHAPE, OUT, CAME, GONE, ALIVE, DONE = (f"hasten/{name}" for name in ("shape", "out", "came", "gone", "alive", "done"))  # in the store
COME = "another machine has come; all save, and go on together"


class Agent(LocalElasticAgent):
    """The ranks of this machine, from the first start to the last end.

    Args:
        folder: where they leave what came of them.
        store: that of the rendezvous.
    """

    def __init__(self, spec, logs_specs, folder: str, store: dist.Store):
        super().__init__(spec, logs_specs)
        self.folder, self.store = folder, store
        self.done: set[int] = set()  # machines on which all ranks have come to their end, when we looked last
        self.looked, self.heard = 0.0, {}  # when we looked for signs of life; (machine, sign) -> when it was first seen
        self._hand_on()

    def _start_workers(self, worker_group: WorkerGroup):
        forget(self.folder)
        self.heard, self.done = {}, set()
        if self.store.check([OUT]):
            os.environ[GOES_ON] = self.store.get(OUT).decode()
        started = super()._start_workers(worker_group)
        end_the_others = self._pcontext.close

        def close(death_sig=None, timeout: int = GRACE) -> None:  # whatever torch asks for: its own patience is shorter
            self._end_the_silent(worker_group)
            end_the_others(death_sig, GRACE)

        self._pcontext.close = close
        return started

    def _end_the_silent(self, worker_group: WorkerGroup) -> None:
        """Where ranks have waited in vain, those that still say nothing are ended now: torch would ask them to, and wait for half a minute."""
        until = time.monotonic() + TO_OWN_UP
        while (waited := max((ending.waited for ending in left(self.folder).values()), default=0)) and (
            silent := self._silent(worker_group)
        ):
            if time.monotonic() > until:
                for rank, process in silent.items():
                    leave_of(rank, Ending(1, silent=waited), self.folder)
                    os.killpg(process.pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    def _silent(self, worker_group: WorkerGroup) -> dict[int, Popen]:
        """The ranks of this machine that are there and have not said what came of them."""
        processes = {worker_group.workers[local].global_rank: each.proc for local, each in self._pcontext.subprocess_handlers.items()}
        endings = left(self.folder)
        return {rank: process for rank, process in processes.items() if rank not in endings and process.poll() is None}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = self._looked_after(worker_group)
        while result.state == WorkerState.HEALTHY and self._nears_its_end(worker_group):  # torch does not see who comes: it is too late
            time.sleep(worker_group.spec.monitor_interval)
            result = self._looked_after(worker_group)
        if result.state in ENDED:
            endings = left(self.folder)
            by_its_own_fault = any(ending.line and not ending.aftermath for ending in endings.values())
            alone = worker_group.group_world_size == 1
            if by_its_own_fault or self._are_done(worker_group) or (alone and waited_for_each_other(endings, codes_of(result))):
                self._remaining_restarts = 0
            elif worker_group.spec.rdzv_handler.is_closed():
                raise RendezvousClosedError
            elif not alone and self._makes_room(worker_group, endings):
                self._remaining_restarts += 1  # which torch is about to take away
                warnings.warn(COME, Notice, stacklevel=2)
            elif self._remaining_restarts:
                elsewhere = "a rank was asked to end" if alone else "ranks of another machine were lost"
                lost = how_lost(endings, codes_of(result)) or elsewhere
                most = worker_group.spec.max_restarts
                which = f"restart {most - self._remaining_restarts + 1} of {most}"
                warnings.warn(f"{lost}; all meet again to go on from the newest checkpoint, {which}", Notice, stacklevel=2)
        return result

    def _looked_after(self, worker_group: WorkerGroup) -> RunResult:
        """How the ranks are; not well where a machine is missed.

        Raises:
            RendezvousClosedError: the job has ended elsewhere, which ranks may hear late that are in the midst of a long step.
        """
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY:
            return result
        if worker_group.spec.rdzv_handler.is_closed():
            raise RendezvousClosedError
        return RunResult(WorkerState.UNHEALTHY) if self._misses_a_machine(worker_group) else result

    def _nears_its_end(self, worker_group: WorkerGroup) -> bool:
        """Whether some machine has done all it had to; asked anew where another one comes, for whom ranks would be started again."""
        comes = worker_group.group_world_size > 1 and worker_group.spec.rdzv_handler.num_nodes_waiting()
        return bool(self._are_done(worker_group) if comes else self.done)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            warnings.warn(COME, Notice, stacklevel=2)
        self._shutdown()
        self._hand_on()

    def _hand_on(self) -> None:
        """Whoever meets us next is to know which run it goes on with."""
        if out := folder_of_the_run(self.folder):
            self.store.set(OUT, out)

    def _exit_barrier(self) -> None:
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

    def _makes_room(self, worker_group: WorkerGroup, endings: dict[int, Ending]) -> bool:
        """Whether the ranks have ended because another agent, which saw a new machine first, has asked them to."""
        if not endings or not all(ending.stopped for ending in endings.values()):
            return False
        until = time.monotonic() + WAIT_LIST
        while not (waiting := worker_group.spec.rdzv_handler.num_nodes_waiting()) and time.monotonic() < until:
            time.sleep(worker_group.spec.monitor_interval)
        return waiting > 0

    def _misses_a_machine(self, worker_group: WorkerGroup) -> bool:
        """Whether one of the machines has not been heard of for long: it went without closing its connections."""
        if worker_group.group_world_size == 1 or time.monotonic() < self.looked + SIGN_OF_LIFE:
            return False
        store = worker_group.store
        store.add(f"{ALIVE}/{worker_group.group_rank}", 1)
        at_work = set(range(worker_group.group_world_size)) - self._are_done(worker_group)
        signs = [(machine, store.add(f"{ALIVE}/{machine}", 0)) for machine in at_work]
        self.looked = time.monotonic()  # through a broken cable this takes as long as it is broken
        self.heard = {sign: self.heard.get(sign, self.looked) for sign in signs}
        return any(self.looked - first > SILENCE for first in self.heard.values())


def refuse_another_shape(store: dist.Store, shape: dict[str, str]) -> None:
    """Makes sure that all machines were given the same numbers, before they wait for each other in vain.

    Raises:
        Refusal: this one was given others than the first.
    """
    first = json.loads(store.compare_set(SHAPE, "", json.dumps(shape)))
    for option, here in shape.items():
        if first[option] != here:
            raise Refusal(f"this machine was given {option} {here}, and another one {option} {first[option]}; say the same on all of them")


def say_farewell(store: dist.Store, stays: bool) -> None:
    """This machine goes. ``stays``: it has the store, the job is over, and all that came are to know before it is gone."""
    until = time.monotonic() + FAREWELL
    with suppress(RuntimeError):  # it is gone with its machine
        store.add(GONE, 1)
        while stays and store.add(GONE, 0) < store.add(CAME, 0) and time.monotonic() < until:
            time.sleep(0.05)


def how_lost(endings: dict[int, Ending], codes: dict[int, int]) -> str | None:
    """Which rank ended without a word, and how; not by the SIGTERM with which the agent ends the others."""
    if silent := {rank: ending.silent for rank, ending in sorted(endings.items()) if ending.silent}:
        who = f"ranks {', '.join(map(str, silent))} have" if len(silent) > 1 else f"rank {next(iter(silent))} has"
        return f"{who} said nothing for {max(silent.values()):g} s"
    for rank, code in codes.items():
        if rank not in endings and code not in (0, -signal.SIGTERM):
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"rank {rank} was killed by {signal.Signals(-code).name}{memory}" if code < 0 else f"rank {rank} ended with code {code}"
    return None


def waited_for_each_other(endings: dict[int, Ending], codes: dict[int, int]) -> bool:
    """Whether all ranks were there, and none has heard what it waited for: they did not do the same."""
    return any(ending.waited for ending in endings.values()) and how_lost(endings, codes) is None


def codes_of(result: RunResult) -> dict[int, int]:
    """The exit codes of the ranks that failed, by rank; first those that failed first, last those that had to be ended."""
    in_order = sorted(result.failures.items(), key=lambda each: (each[1].timestamp, each[0]))
    return {rank: failure.exitcode for rank, failure in in_order}
