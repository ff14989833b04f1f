"""Starts the ranks of a job on this machine with torchrun's own agent, and says in one line what became of them.

The agent (https://docs.pytorch.org/docs/stable/elastic/agent.html) finds the other machines, tells each process who it is, and ends all of
them when one fails. Each rank runs the same command. Where ranks or machines are lost without a word, all go on from the newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NoReturn

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
from hasten.launch.elastic import (
    CAME,
    ENDED,
    ElasticAgent,
    check_same_launch_options,
    describe_lost_rank,
    exit_codes,
    is_mutual_timeout,
    leave_rendezvous,
)
from hasten.launch.rank_results import GOES_ON, PARENT, job_directory, read_results
from hasten.launch.rendezvous import HERE, TIMEOUT_S, hosts_rendezvous, interface_of, local_address

MEETING = 900  # seconds that the machines have to find each other, and a machine that was lost to come back
OF_A_RANK = 200_000_000  # bytes of a process that has imported torch
ANSWER = 30  # seconds that a store has to say that it is one
LET_GO = 2  # more, on the way out: a thread that comes back from torch while Python ends would abort the process
LAST_CALL = 10  # seconds that fewer machines than could come wait for more
NOT_ALIKE = "they do not do the same, as where the data decide which layers a batch goes through"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # which torch's agent heeds
LOST = (RendezvousConnectionError, dist.DistError)  # whoever has the store is gone


def launch(
    words: list[str], processes: int, nodes: tuple[int, int] = (1, 1), rendezvous: str | None = None, restarts: int = 0
) -> int:
    """Runs ``hasten WORDS`` in so many processes on this machine, and on as many of each other node; the exit code of the command.

    Args:
        nodes: the fewest machines that train, and the most.
        rendezvous: HOST:PORT where the machines meet; one of them is HOST. None: there is one machine only.
        restarts: so many times all ranks are started again, to go on, when one was lost without a word.

    Raises:
        Refusal, Failure: what the first rank that failed had to say, and which it was.
    """
    _refuse_what_does_not_fit(processes)
    _silence_the_agent()
    address = HERE if rendezvous is None else local_address(rendezvous)
    with job_directory() as folder, _environment(processes, address), _ended_by_signals(folder):
        timeout = TIMEOUT_S
        shape = {
            "--nnodes": ":".join(map(str, nodes)),
            "--processes": str(processes),
            "--max-restarts": str(restarts),
        }  # as given, however many are left
        while True:
            hosts = rendezvous is None or hosts_rendezvous(rendezvous, timeout)
            try:
                result = _elastic(words, processes, nodes, rendezvous, restarts, address, hosts, folder, shape)
                break
            except LOST:
                if restarts == 0:
                    how = "its machine, where all meet, is gone, and no restart is left; start the same command on all again, with --resume"
                    raise RunError(f"{rendezvous} does not answer any more: {how}") from None
            restarts, timeout = restarts - 1, MEETING
            warnings.warn(
                f"{rendezvous} does not answer any more; waiting for the same command there, to go on together",
                HastenWarning,
                stacklevel=2,
            )
        if result is None:
            warnings.warn(
                "the job is over; it had all the machines that it takes, and did without this one",
                HastenWarning,
                stacklevel=2,
            )
            return 0
        if result.state in ENDED:
            raise _verdict(folder, exit_codes(result), here_alone=nodes[1] == 1)
        return max((ending.code for ending in read_results(folder).values()), default=0)


def preflight_check(task: str, processes: int, methods: Iterable[Method], machines: int = 1) -> None:
    """Where more processes than cores begin one after the other, what they would find at last is found before any begins.

    Raises:
        Refusal: there is no such task, or a batch of it has fewer samples; the machine has no memory for so many.
    """
    _refuse_what_does_not_fit(processes)
    named = TaskRef.of(task)
    if processes <= available_cpus():
        return
    try:
        loaded = named.load()
    except (ConfigurationError, RunError):  # it may ask which rank it is in, and only a rank has an answer
        return
    check_process_count(loaded, processes * machines, methods)
    warn_oversubscribed(processes)


def _refuse_what_does_not_fit(processes: int) -> None:
    """So many that the machine would be lost before any of them could say that a batch has fewer samples."""
    if processes * OF_A_RANK > (free := free_memory()):
        raise ConfigurationError(
            f"{processes} processes take {processes * OF_A_RANK / 1e9:.3g} GB before they begin, and {free / 1e9:.3g} are free; "
            f"take {free // OF_A_RANK} or fewer"
        )


def _elastic(
    words,
    processes: int,
    nodes: tuple[int, int],
    rendezvous,
    restarts: int,
    address: str,
    hosts: bool,
    folder: str,
    shape: dict,
) -> RunResult | None:
    """How the ranks of this machine ended at last; None where it was not needed. ``shape``: what all machines have to be given alike."""
    parameters = RendezvousParameters(
        "c10d",
        rendezvous or f"{HERE}:0",
        "hasten",
        *nodes,
        address,
        is_host=hosts,
        join_timeout=MEETING,
        last_call_timeout=LAST_CALL,
    )
    backend, store = _backend(parameters)
    check_same_launch_options(store, shape)
    handler = create_handler(store, backend, parameters)
    spec = WorkerSpec(
        "hasten",
        processes,
        handler,
        entrypoint=sys.executable,
        args=("-m", "hasten", *words),
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    agent = ElasticAgent(
        spec, DefaultLogsSpecs(log_dir=folder, redirects=dict.fromkeys(range(1, processes), Std.ALL)), folder, store
    )
    store.add(CAME, 1)
    ends_the_job, there = True, True
    try:
        return agent.run()
    except LOST:
        there = False
        raise
    except SignalException as error:
        ends_the_job = (
            error.sigval == signal.SIGINT
        )  # who asks otherwise takes this machine away, and the others may go on
        raise
    except RendezvousClosedError:
        raise _verdict(folder, {}, "the job has ended on another machine") from None
    except RendezvousTimeoutError:
        raise RunError(
            f"fewer than {nodes[0]} machines have come to {rendezvous} for {MEETING} s; start the same command on all"
        ) from None
    finally:
        ends_the_job &= hosts or agent.get_worker_group().group_world_size is not None  # not who has only waited
        if there and ends_the_job:
            handler.shutdown()
        if there:
            leave_rendezvous(store, stays=hosts and ends_the_job)


def _backend(parameters: RendezvousParameters) -> tuple[RendezvousBackend, dist.Store]:
    """The rendezvous backend and its store.

    Connected in a thread: the client of ``dist.TCPStore`` heeds no timeout while a server accepts and stays silent (seen on
    torch 2.13; test_elastic: a port that another program has).

    Raises:
        Refusal: it is somebody else.
    """
    made: Future = Future()

    def make() -> None:
        try:
            made.set_result(create_backend(parameters))
        except Exception as error:
            made.set_exception(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        return made.result(ANSWER)
    except (RendezvousConnectionError, TimeoutError):
        advice = "choose another port, the same on all machines"
        raise ConfigurationError(
            f"the machines cannot meet at {parameters.endpoint}: another program has that port; {advice}"
        ) from None
    finally:
        thread.join(LET_GO)


def _verdict(
    folder: str, codes: dict[int, int], otherwise: str = "the ranks ended without a word", here_alone: bool = False
) -> Exception:
    """What the rank has to say that failed first, by its own fault; of one that could not speak, how it ended."""
    endings = read_results(folder)
    failed = [(rank, ending) for rank, ending in endings.items() if ending.line]
    by_itself = any(not ending.aftermath for _, ending in failed)
    if not by_itself and (lost := describe_lost_rank(endings, codes)):
        return RunError(f"{lost}; the other ranks were ended")
    if not by_itself and here_alone and is_mutual_timeout(endings, codes):
        waited = max(ending.waited for ending in endings.values())
        return RunError(f"the ranks have waited for each other for {waited:g} s: {NOT_ALIKE}")
    if not failed:
        return RunError(otherwise)
    rank, first = min(failed, key=lambda each: (each[1].aftermath, each[1].when) if by_itself else each[0])
    if not by_itself:  # they were all asked to end
        return RunError(first.line)
    if first.code == 2:  # most often what all were asked for
        alone = [ending.line for _, ending in failed].count(first.line) == 1
        return ConfigurationError(f"{first.line} (rank {rank})" if rank and alone else first.line)
    return RunError(f"rank {rank}: {first.line}")


def _silence_the_agent() -> None:
    """What there is to tell is told by us, in one line."""
    for name in [*logging.Logger.manager.loggerDict]:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _ended_by_signals(folder: str) -> Iterator[None]:
    """Inside, a signal raises the exception of torch's agent, and becomes one line.

    torch installs its handlers when it starts the ranks. A launcher that still waits for other nodes would be killed
    without a line (test_agents: a machine too many), and SIGHUP would end what ``nohup`` protects.

    Raises:
        Failure: there was one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def told(number: int, frame) -> NoReturn:
        raise SignalException("", signal.Signals(number))

    heeded = [
        each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN
    ]  # ``nohup`` stays what it is
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(each.name for each in heeded)
    before = {each: signal.signal(each, told) for each in heeded}
    try:
        yield
    except SignalException as error:
        raise _verdict(folder, {}, f"stopped by {signal.Signals(error.sigval).name}") from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _environment(processes: int, address: str) -> Iterator[None]:
    """What the ranks find in their environment; ours is as before when they are gone."""
    before = dict(os.environ)
    os.environ.pop(GOES_ON, None)
    os.environ[PARENT] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # torch keeps the address of a store even after its machine was lost
    )
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = os.environ[OUR_THREADS] = str(max(1, available_cpus() // processes))
    if interface := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # a machine's own name may lead elsewhere
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
