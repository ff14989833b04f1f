"""torchrun's agent, and the five decisions in which hasten's differs from it.

torchrun's own parts do the rest: rendezvous, rank numbers, starting, watching and ending the ranks, restarts, log and
error files (https://docs.pytorch.org/docs/stable/elastic/agent.html). What is overridden, and the guarantee that needs
it:

=================  ============================================  =====================================================
step               torchrun                                      here, and the test in tests/launch
=================  ============================================  =====================================================
``start_workers``  starts the same command                       also passes the run to resume, even on a node that
                                                                 joins later (test_elastic: fewer nodes continue)
``monitor``        restarts after every failure while restarts   no restart where a rank failed by its own error or
                   are left; a node that leaves costs one, and   another node has finished; a node that joins costs
                   so does one that joins, on the other nodes    none (test_elastic: joining node)
``monitor``        notices a lost node when collectives time     notices it by its missing heartbeat
                   out (minutes)                                 (test_elastic: finished node is not missed)
``close``          30 s from SIGTERM to SIGKILL                  60 s, to save a checkpoint; 20 s where a rank was
                                                                 lost, 3 s where ranks have timed out waiting for a
                                                                 silent one (test_timeout)
``exit_barrier``   waits 300 s, then gives up; a failure on      waits as long as the other nodes are alive, and
                   another node does not end the wait            notices a failure (test_elastic: finished node)
=================  ============================================  =====================================================

Everything else that the nodes must know of each other is in the store of the rendezvous.
"""

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from hasten import _torch_compat_elastic
from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.launch.rank_results import RESUME_DIR, RankResult, read_results, remove_results, run_directory

SHUTDOWN_GRACE_S = 60  # for ranks to save and to end after SIGTERM
FAILURE_GRACE_S = 20  # if a rank has failed: the others can only finish writing a checkpoint that they have begun
HANG_REPORT_S = 3.0  # in which all ranks except the hanging one report that they have timed out
HEARTBEAT_INTERVAL_S = 5.0
HEARTBEAT_TIMEOUT_S = 90.0  # after an interrupted connection TCP resumes only after twice the time that it was down
GOODBYE_S = 5.0  # for the other nodes to read that the job is over
JOIN_NOTICE_S = 1.5  # until a joining node is visible for certain: torch polls the store once a second
ENDED = (WorkerState.FAILED, WorkerState.UNHEALTHY)
# keys of the store
OPTIONS, RUN_DIR, JOINED = "hasten/options", "hasten/run_dir", "hasten/joined"
LEFT, HEARTBEAT, DONE = "hasten/left", "hasten/heartbeat", "hasten/done"
NODE_JOINED = "another node has joined; all ranks save a checkpoint and continue together"


class ElasticAgent(_torch_compat_elastic.ExtensibleElasticAgent):
    """Runs the ranks of this node. ``job``: directory of their results; ``store``: key-value store of all nodes."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, job: str, store: dist.Store):
        super().__init__(spec, logs_specs, shutdown_timeout=SHUTDOWN_GRACE_S)
        self.job, self.store = job, store
        self.done: set[int] = set()  # nodes all of whose ranks had ended when the store was last read
        self.last_check = 0.0  # ``time.monotonic()`` of the last look at the heartbeats
        self.heartbeats = {}  # (node, counter) -> when this value of the counter was first seen
        self._publish_run_directory()

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        remove_results(self.job)
        self.heartbeats, self.done = {}, set()
        if self.store.check([RUN_DIR]):
            os.environ[RESUME_DIR] = self.store.get(RUN_DIR).decode()
        return super().start_workers(worker_group)

    def close_workers(self, close: Callable[[signal.Signals, int], None], signal_number: signal.Signals) -> None:
        """Ends the remaining ranks. If a rank timed out, those that do not end within 3 s hang and are killed.

        A rank in an NCCL kernel that waits for a lost rank of the same node neither ends by itself nor runs a signal
        handler of Python, so that it is killed after FAILURE_GRACE_S.
        """
        deadline = time.monotonic() + HANG_REPORT_S
        while any(result.waited for result in read_results(self.job).values()) and None in self.exit_codes():
            if time.monotonic() > deadline:
                return close(signal.SIGKILL, SHUTDOWN_GRACE_S)
            time.sleep(0.05)
        has_failed = any(self.exit_codes()) and not any(result.stopped for result in read_results(self.job).values())
        close(signal_number, FAILURE_GRACE_S if has_failed else SHUTDOWN_GRACE_S)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        state = self._state_of(worker_group)
        while state.state == WorkerState.HEALTHY and self._ends_soon(worker_group):
            time.sleep(worker_group.spec.monitor_interval)  # and torch does not see that a node joins: it is too late
            state = self._state_of(worker_group)
        if state.state in ENDED:
            self._decide_on_restart(worker_group, exit_codes(state))
        return state

    def _decide_on_restart(self, worker_group: WorkerGroup, codes: dict[int, int]) -> None:
        """After a failure: sets and reports the restarts left; RendezvousClosedError if the job ended elsewhere."""
        results, is_single_node = read_results(self.job), worker_group.group_world_size == 1
        has_root_cause = any(result.message and not result.is_peer_failure for result in results.values())
        if has_root_cause or self._done_nodes(worker_group) or (is_single_node and is_mutual_timeout(results, codes)):
            self.remaining_restarts = 0
        elif worker_group.spec.rdzv_handler.is_closed():
            raise RendezvousClosedError
        elif not is_single_node and self._admits_node(worker_group, results):
            self.remaining_restarts += 1  # torch is about to subtract one
            warnings.warn(NODE_JOINED, HastenWarning, stacklevel=2)
        elif worker_group.spec.rdzv_handler.is_closed():  # by a node that was interrupted, once its ranks had ended
            raise RendezvousClosedError
        elif self.remaining_restarts:
            default = "a rank was asked to end" if is_single_node else "ranks of another node were lost"
            lost, most = describe_lost_rank(results, codes) or default, worker_group.spec.max_restarts
            which = f"restart {most - self.remaining_restarts + 1} of {most}"
            wait = "" if is_single_node else ", once enough nodes have met"
            what = f"{lost}; restarting all ranks from the newest checkpoint, {which}{wait}"
            warnings.warn(what, HastenWarning, stacklevel=2)

    def _state_of(self, worker_group: WorkerGroup) -> RunResult:
        """The state of the ranks; unhealthy if a node is missed. RendezvousClosedError if the job ended elsewhere."""
        result = super().monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY:
            return result
        if worker_group.spec.rdzv_handler.is_closed():
            raise RendezvousClosedError
        return RunResult(WorkerState.UNHEALTHY) if self._misses_a_node(worker_group) else result

    def _ends_soon(self, worker_group: WorkerGroup) -> bool:
        """Whether some node has finished, so that a joining node is too late and ranks are not restarted for it."""
        is_joining = num_nodes(worker_group) > 1 and worker_group.spec.rdzv_handler.num_nodes_waiting()
        return bool(self._done_nodes(worker_group) if is_joining else self.done)

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            warnings.warn(NODE_JOINED, HastenWarning, stacklevel=2)
        super().stop_workers(worker_group)
        self._publish_run_directory()

    def _publish_run_directory(self) -> None:
        """Writes the run directory to the store: nodes of the next rendezvous resume that run."""
        if directory := run_directory(self.job):
            self.store.set(RUN_DIR, directory)

    def exit_barrier(self) -> None:
        """Waits until all nodes have finished (one may still write the model); RendezvousClosedError if one has not."""
        group: Any = self.get_worker_group()
        group.store.set(f"{DONE}/{group.group_rank}", "")
        while True:
            is_closed = group.spec.rdzv_handler.is_closed()
            if len(self._done_nodes(group)) == num_nodes(group):
                return
            if is_closed or self._misses_a_node(group):
                raise RendezvousClosedError
            time.sleep(group.spec.monitor_interval)

    def _done_nodes(self, worker_group: WorkerGroup) -> set[int]:
        store: Any = worker_group.store  # of this rendezvous; its keys are gone after the next
        self.done = {node for node in range(num_nodes(worker_group)) if store.check([f"{DONE}/{node}"])}
        return self.done

    def _admits_node(self, worker_group: WorkerGroup, results: dict[int, RankResult]) -> bool:
        """Whether the ranks stopped because a node joins, which another node's agent noticed first."""
        if not results or not all(result.stopped for result in results.values()):
            return False
        deadline = time.monotonic() + JOIN_NOTICE_S
        while not (waiting := worker_group.spec.rdzv_handler.num_nodes_waiting()) and time.monotonic() < deadline:
            time.sleep(worker_group.spec.monitor_interval)
        return waiting > 0

    def _misses_a_node(self, worker_group: WorkerGroup) -> bool:
        """Whether the heartbeat of another node has stopped: the node vanished without closing its connections."""
        if num_nodes(worker_group) == 1 or time.monotonic() < self.last_check + HEARTBEAT_INTERVAL_S:
            return False
        store: Any = worker_group.store
        store.add(f"{HEARTBEAT}/{worker_group.group_rank}", 1)
        at_work = set(range(num_nodes(worker_group))) - self._done_nodes(worker_group)
        counters = [(node, store.add(f"{HEARTBEAT}/{node}", 0)) for node in at_work]
        self.last_check = time.monotonic()  # while the network is down, the calls above block
        self.heartbeats = {counter: self.heartbeats.get(counter, self.last_check) for counter in counters}
        return any(self.last_check - since > HEARTBEAT_TIMEOUT_S for since in self.heartbeats.values())


def num_nodes(group: WorkerGroup) -> int:
    """Number of nodes in the current rendezvous, which must be complete: torch's attribute is None until then."""
    assert group.group_world_size is not None, "the nodes have not met yet"
    return group.group_world_size


def check_same_launch_options(store: dist.Store, options: dict[str, str]) -> None:
    """ConfigurationError if the launch options differ from the first node's, before the nodes wait for each other."""
    first = json.loads(store.compare_set(OPTIONS, "", json.dumps(options)))
    for option, value in options.items():
        if first[option] != value:
            problem = f"this node was started with {option} {value}, another one with {option} {first[option]}"
            raise ConfigurationError(f"{problem}; give all nodes the same")


def leave_rendezvous(store: dist.Store, waits: bool) -> None:
    """Marks this node as gone in the store; with ``waits`` (it hosts the store) waits for all others, at most 5 s."""
    deadline = time.monotonic() + GOODBYE_S
    with suppress(RuntimeError):  # the store is gone with its node
        store.add(LEFT, 1)
        while waits and store.add(LEFT, 0) < store.add(JOINED, 0) and time.monotonic() < deadline:
            time.sleep(0.05)


def describe_lost_rank(results: dict[int, RankResult], codes: dict[int, int]) -> str | None:
    """Text such as "rank 1 was killed by SIGKILL", for a rank that ended without a result; None if there is none."""
    waited = max((result.waited for result in results.values()), default=0)
    silent = sorted(rank for rank, code in codes.items() if rank not in results and code == -signal.SIGKILL)
    if waited and silent:  # killed by ElasticAgent.close_workers
        ranks = f"ranks {', '.join(map(str, silent))} were" if len(silent) > 1 else f"rank {silent[0]} was"
        return f"{ranks} silent for {waited:g} s"
    for rank, code in codes.items():
        if rank in results or code in (0, -signal.SIGTERM):
            continue
        if code > 0:
            return f"rank {rank} ended with code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"rank {rank} was killed by {signal.Signals(-code).name}{hint}"
    return None


def is_mutual_timeout(results: dict[int, RankResult], codes: dict[int, int]) -> bool:
    """Whether ranks timed out although none was lost: they did not call the same collectives."""
    return any(result.waited for result in results.values()) and describe_lost_rank(results, codes) is None


def exit_codes(result: RunResult) -> dict[int, int]:
    """Rank -> exit code of each failed rank, in the order in which they ended."""
    failures = sorted(result.failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    return {rank: failure.exitcode for rank, failure in failures}
