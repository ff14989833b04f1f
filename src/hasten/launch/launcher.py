"""Starts the ranks of a job on this node with torchrun's agent, and reports in one line how the job ended.

The agent (https://docs.pytorch.org/docs/stable/elastic/agent.html) finds the other nodes, sets the environment of each
rank, and ends all ranks when one fails. Each rank runs the same command. If ranks or nodes are lost, all resume from
the newest checkpoint.
"""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.core.method import Method
from hasten.engine.data_adapters import check_process_count
from hasten.engine.resources import OUR_THREADS, available_cpus, free_memory, warn_oversubscribed
from hasten.engine.tasks import TaskRef
from hasten.launch import elastic
from hasten.launch.rank_results import PARENT, RESUME_DIR, read_results, run_directory
from hasten.launch.rendezvous import LOOPBACK, TIMEOUT_S, hosts_rendezvous, interface_of, local_address
from hasten.utils.signals import handle_signals

RENDEZVOUS_TIMEOUT_S = 900  # for the nodes to find each other, and for a lost node to come back
RANK_MEMORY_BYTES = 200_000_000  # of a process that has imported torch
STORE_ANSWER_S = 30  # for a store to answer as one
THREAD_EXIT_S = 2  # a thread that returns from torch while Python ends would abort the process
LAST_CALL_S = 10  # in which fewer nodes than MAX wait for more
MISMATCH = "they did not call the same collectives, e.g. because the data decide which layers a batch passes"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # handled by torch's agent
STORE_LOST = (RendezvousConnectionError, dist.DistError)


@dataclass(frozen=True)
class _Job:
    """The arguments of ``launch``, the directory of the ranks' results and the IP address of this node."""

    argv: list[str]
    nproc_per_node: int
    nnodes: tuple[int, int]
    rdzv_endpoint: str | None
    max_restarts: int
    directory: str
    address: str


def launch(
    argv: list[str],
    nproc_per_node: int,
    nnodes: tuple[int, int] = (1, 1),
    rdzv_endpoint: str | None = None,
    max_restarts: int = 0,
) -> int:
    """Runs ``hasten ARGV`` in ``nproc_per_node`` processes on this node. Each other node must call it alike.

    Args:
        argv: arguments of the command.
        nproc_per_node: ranks on each node.
        nnodes: minimum and maximum number of nodes that train together.
        rdzv_endpoint: HOST:PORT where the nodes meet; HOST is one of them. None for a single node.
        max_restarts: how often all ranks may be restarted after one was lost.

    Returns:
        The exit code of the command.

    Raises:
        ConfigurationError, RunError: the error of the first rank that failed, with its rank.
    """
    _check_memory(nproc_per_node)
    for name in [*logging.Logger.manager.loggerDict]:  # ``launch`` reports each event of torch's agent in one line
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    address = LOOPBACK if rdzv_endpoint is None else local_address(rdzv_endpoint)
    # a launcher that is killed leaves the directory, as torchrun leaves its log directory
    with (
        TemporaryDirectory(prefix="hasten-job-") as directory,
        _rank_environment(nproc_per_node, address),
        _signals_as_errors(directory),
    ):
        job = _Job(argv, nproc_per_node, nnodes, rdzv_endpoint, max_restarts, directory, address)
        result = _run_with_new_stores(job)
        if result is None:
            warnings.warn("the job is over; it had enough nodes without this one", HastenWarning, stacklevel=2)
            return 0
        if result.state in elastic.ENDED:
            raise _job_error(directory, elastic.exit_codes(result), is_single_node=nnodes[1] == 1)
        return max((result.code for result in read_results(directory).values()), default=0)


def preflight_check(
    task: str, processes: int, methods: Iterable[Method], nnodes: int = 1, is_elastic: bool = False
) -> None:
    """ConfigurationError, before ranks are started, if the task is unknown or memory does not suffice to start them.

    If ``processes``, those of this node, outnumber its CPUs: a warning, and ConfigurationError if a batch has fewer
    samples than all ``nnodes`` nodes (the most that may join) have processes; of an elastic job always, since the
    ranks would find it when a node joins, and end.
    """
    _check_memory(processes)
    ref = TaskRef.of(task)
    if processes <= available_cpus() and not is_elastic:
        return
    try:
        loaded = ref.load()
    except (ConfigurationError, RunError):  # the task may read its rank, which is set only in a rank
        return
    check_process_count(loaded, processes * nnodes, methods)
    warn_oversubscribed(processes)


def _check_memory(processes: int) -> None:
    """Raises ``ConfigurationError`` if the node lacks the memory to start so many processes."""
    needed, free = processes * RANK_MEMORY_BYTES, free_memory()
    if needed > free:
        problem = f"{processes} processes take {needed / 1e9:.3g} GB before they begin, and {free / 1e9:.3g} are free"
        raise ConfigurationError(f"{problem}; take {free // RANK_MEMORY_BYTES} or fewer")


def _run_with_new_stores(job: _Job) -> RunResult | None:
    """Runs this node's ranks; if the store's node is lost, waits for it while restarts are left, else RunError."""
    timeout, restarts = TIMEOUT_S, job.max_restarts
    while True:
        hosts = job.rdzv_endpoint is None or hosts_rendezvous(job.rdzv_endpoint, timeout)
        try:
            return _run_agent(job, restarts, hosts)
        except STORE_LOST:
            lost = f"{job.rdzv_endpoint} does not answer any more"
            if restarts == 0:
                problem = f"{lost}: the node that hosts the rendezvous is lost, no restart is left"
                raise RunError(f"{problem}; {_how_to_start_again(job.directory)}") from None
        restarts, timeout = restarts - 1, RENDEZVOUS_TIMEOUT_S
        warnings.warn(f"{lost}; waiting for the same command on that node", HastenWarning, stacklevel=3)


def _run_agent(job: _Job, restarts: int, hosts: bool) -> RunResult | None:
    """Runs the ranks of this node until the job is over, with so many ``restarts``; None if the job did not need it."""
    endpoint = job.rdzv_endpoint or f"{LOOPBACK}:0"
    timeouts = {"join_timeout": RENDEZVOUS_TIMEOUT_S, "last_call_timeout": LAST_CALL_S}
    parameters = RendezvousParameters("c10d", endpoint, "hasten", *job.nnodes, job.address, is_host=hosts, **timeouts)
    backend, store = _create_backend(parameters)
    nnodes, nproc, max_restarts = ":".join(map(str, job.nnodes)), str(job.nproc_per_node), str(job.max_restarts)
    shared_options = {"--nnodes": nnodes, "--nproc-per-node": nproc, "--max-restarts": max_restarts}
    elastic.check_same_launch_options(store, shared_options)
    handler = create_handler(store, backend, parameters)
    spec = WorkerSpec(
        "hasten",
        job.nproc_per_node,
        handler,
        entrypoint=sys.executable,
        args=("-m", "hasten", *job.argv),
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    redirects = dict.fromkeys(range(1, job.nproc_per_node), Std.ALL)  # rank 0 keeps the terminal
    logs = DefaultLogsSpecs(log_dir=job.directory, redirects=redirects)
    agent = elastic.ElasticAgent(spec, logs, job.directory, store)
    store.add(elastic.JOINED, 1)
    ends_job = has_store = True
    try:
        return cast("RunResult | None", agent.run())
    except STORE_LOST:
        has_store = False
        raise
    except SignalException as error:
        ends_job = error.sigval == signal.SIGINT  # other signals remove this node, and the others may continue
        raise
    except RendezvousClosedError:
        raise _job_error(job.directory, {}, "the job has ended on another node") from None
    except RendezvousTimeoutError:
        problem = f"fewer than {job.nnodes[0]} nodes have come to {job.rdzv_endpoint} in {RENDEZVOUS_TIMEOUT_S} s"
        raise RunError(f"{problem}; {_how_to_start_again(job.directory)}") from None
    finally:
        has_met = agent.get_worker_group().group_world_size is not None
        ends_job &= hosts or has_met  # a node that has only waited does not end the job
        if has_store:
            if ends_job:
                handler.shutdown()
            elastic.leave_rendezvous(store, waits=hosts and ends_job)


def _how_to_start_again(directory: str) -> str:
    run = run_directory(directory)
    return "start the same command on all nodes" + (f" with --out {run} --resume" if run else "")


def _create_backend(parameters: RendezvousParameters) -> tuple[RendezvousBackend, dist.Store]:
    """Creates the rendezvous backend and its store; ConfigurationError if another program listens at the endpoint.

    In a thread, because the client of ``dist.TCPStore`` ignores its timeout while a server accepts connections and does
    not answer (torch 2.13; tests/launch/test_elastic.py).
    """
    created: Future[tuple[RendezvousBackend, dist.Store]] = Future()

    def create() -> None:
        try:
            created.set_result(create_backend(parameters))
        except Exception as error:
            created.set_exception(error)

    thread = threading.Thread(target=create, daemon=True)
    thread.start()
    try:
        return created.result(STORE_ANSWER_S)
    except (RendezvousConnectionError, TimeoutError):
        problem = f"the nodes cannot meet at {parameters.endpoint}: another program has that port"
        raise ConfigurationError(f"{problem}; choose another port, the same on all nodes") from None
    finally:
        thread.join(THREAD_EXIT_S)


def _job_error(
    directory: str,
    codes: dict[int, int],
    default: str = "the ranks ended without an error message",
    is_single_node: bool = False,
) -> Exception:
    """The root cause: the error of the first rank that failed by itself, or how a rank ended that reported nothing."""
    results = read_results(directory)
    failed = [(rank, result, result.message) for rank, result in results.items() if result.message]
    has_root_cause = any(not result.is_peer_failure for _, result, _ in failed)
    if not has_root_cause and (lost := elastic.describe_lost_rank(results, codes)):
        run = run_directory(directory)
        return RunError(f"{lost}; the other ranks were ended{f'; resume with --out {run} --resume' if run else ''}")
    if not has_root_cause and is_single_node and elastic.is_mutual_timeout(results, codes):
        waited = max(result.waited for result in results.values())
        return RunError(f"the ranks have waited {waited:g} s for each other: {MISMATCH}")
    if not failed:
        return RunError(default)
    if not has_root_cause:  # all ranks were asked to end
        return RunError(min(failed)[2])
    rank, first, message = min(failed, key=lambda item: (item[1].is_peer_failure, item[1].timestamp))
    if first.code == 2:  # most often a request that all ranks refuse
        is_unique = [other for *_, other in failed].count(message) == 1
        return ConfigurationError(f"{message} (rank {rank})" if rank and is_unique else message)
    return RunError(f"rank {rank}: {message}")


@contextmanager
def _signals_as_errors(directory: str) -> Iterator[None]:
    """Context manager: a signal raises torch's ``SignalException``, which is reported as a RunError of one line.

    torch installs its handlers when it starts the ranks: without this, a signal would kill a launcher that still waits
    for other nodes without a message (test_agents), and SIGHUP would end a command under ``nohup``.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise SignalException("", signal.Signals(number))

    handled = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in handled)
    try:
        with handle_signals(handled, interrupt):
            yield
    except SignalException as error:
        raise _job_error(directory, {}, f"stopped by {signal.Signals(error.sigval).name}") from None


@contextmanager
def _rank_environment(processes: int, address: str) -> Iterator[None]:
    """Sets the environment that the ranks inherit, and restores that of this process at the end."""
    before = dict(os.environ)
    os.environ.pop(RESUME_DIR, None)
    os.environ[PARENT] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch keeps the address of a store whose node was lost
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = os.environ[OUR_THREADS] = str(max(1, available_cpus() // processes))
    os.environ.setdefault("PYTHONHASHSEED", "0")  # else each rank would iterate over a set of strings in another order
    if interface := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # the host name may resolve to another interface
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
