"""Joins this process to the ranks that torchrun or hasten started, and provides the collectives of the run.

torchrun passes rank and world size in the environment (https://docs.pytorch.org/docs/stable/elastic/run.html). The
engine communicates over a gloo group of its own, on the CPU, so that its messages never mix with those of a method.
"""

import atexit
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hasten._torch_compat import default_process_group_timeout, peer_failure
from hasten.core.errors import CollectiveTimeout, ConfigurationError, PeerFailure, RunError, format_error
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S, ProcessGroupInfo
from hasten.utils.signals import handle_signals

T = TypeVar("T")
PEER_GONE = "another rank ended without reporting an error"
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_stores: dict[tuple[str, ...], tuple[dist.Store, Iterator[int]]] = {}  # by job; the newest one


@contextmanager
def init_process_group(device: str, timeout: float = DEFAULT_TIMEOUT_S) -> Iterator[ProcessGroupInfo]:
    """The process group of the job that this process was started in; a single process where there is none.

    ``device`` "cuda..." initializes NCCL as well. A collective waits ``timeout`` seconds for a rank. ConfigurationError
    if the environment is incomplete, PeerFailure if ranks cannot be reached, have ended or do not answer.
    """
    if not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") == "1":
        yield ProcessGroupInfo()
        return
    owns_default_group = not dist.is_initialized()
    # a process that waits for other ranks has nothing to save yet: SIGINT and SIGTERM end it
    with handle_signals((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL), translate_peer_errors(timeout):
        if owns_default_group:
            if missing := [name for name in ENVIRONMENT if name not in os.environ]:
                advice = "start the processes with hasten or torchrun"
                raise ConfigurationError(f"WORLD_SIZE is above 1, but {missing[0]} is not set; {advice}")
            backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
            _connect(lambda: _init_default_group(backend, timedelta(seconds=timeout)))
            # A group that ended is freed with the model that refers to it. Its threads need the interpreter for that,
            # and would abort the process while it ends.
            atexit.unregister(gc.collect)
            atexit.register(gc.collect)
        group = _connect(lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
    succeeded = False
    try:
        with translate_peer_errors(timeout), default_process_group_timeout(timeout):
            yield _process_group_info(group)
        succeeded = True
    finally:
        with suppress(RuntimeError, ValueError):  # of a group whose other ranks are gone
            dist.destroy_process_group(group)
        # after an error, NCCL would wait for ranks that wait for this one
        if owns_default_group and (succeeded or "nccl" not in dist.get_backend_config()):
            dist.destroy_process_group()


def on_main_process(ranks: ProcessGroupInfo, function: Callable[[], T]) -> T | None:
    """Calls ``function`` on rank 0 only; returns its result there, None on others. If it raises an error of hasten, the
    other ranks raise PeerFailure with its message. All ranks must call it.
    """
    result = error = None
    if ranks.is_main_process:
        try:
            result = function()
        except (ConfigurationError, RunError) as raised:
            error = raised
    message = ranks.broadcast("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    if message:
        raise PeerFailure(message)
    return result


def check_ranks_agree(ranks: ProcessGroupInfo, values: dict[str, str]) -> None:
    """Raises ConfigurationError, which names rank and value, if ``values`` (by name) are not equal on all ranks."""
    first, *others = ranks.all_gather(values)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                difference = f"{other[name]:.80} instead of {value:.80}"
                advice = "start all ranks alike"
                raise ConfigurationError(f"rank {rank} has another {name} than rank 0: {difference}; {advice}")


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error reports only that another rank has ended or does not answer."""
    return peer_failure(error) is not None


@contextmanager
def translate_peer_errors(timeout: float, message: str = PEER_GONE) -> Iterator[None]:
    """Replaces errors of gloo and NCCL about another rank by ``PeerFailure``, with ``message``, and
    ``CollectiveTimeout``.
    """
    try:
        yield
    except Exception as error:
        if peer_failure(error) == "timeout":
            raise CollectiveTimeout(timeout) from error
        if peer_failure(error) == "gone":
            raise PeerFailure(message) from error
        raise


def _init_default_group(backend: str, timeout: timedelta) -> None:
    """Initializes torch's default group with keys of its own in the store of the job.

    A later group of the same processes would otherwise read the addresses of the earlier one, where nothing answers.
    """
    job = tuple(os.environ[name] for name in ENVIRONMENT)
    if job not in _stores:
        _stores.clear()
        _stores[job] = next(rendezvous("env://", timeout=timeout))[0], count()
    store, numbers = _stores[job]
    store = dist.PrefixStore(f"hasten/{next(numbers)}", store)
    store.set_timeout(timeout)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)


def _connect(connect: Callable[[], Any]) -> Any:
    """Returns ``connect()``, which waits for all ranks; any error except a timeout becomes ``PeerFailure``."""
    try:
        return connect()
    except Exception as error:
        if peer_failure(error) == "timeout":
            raise
        rank = os.environ["RANK"]
        problem = f"rank {rank} cannot connect to the other ranks: {format_error(error)}"
        raise PeerFailure(f"{problem}; check the network, and that all ranks were started") from None


def _process_group_info(group: Any) -> ProcessGroupInfo:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def all_reduce(numbers: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=group)
        return tensor.tolist()

    def broadcast(value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, 0, group)
        return values[0]

    def all_gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * world_size
        dist.all_gather_object(values, value, group)
        return values

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * world_size if rank == 0 else []
        dist.gather_object(value, values or None, 0, group)
        return values

    return ProcessGroupInfo(
        rank,
        world_size,
        all_reduce_sum=lambda numbers: all_reduce(numbers, dist.ReduceOp.SUM),
        all_reduce_max=lambda numbers: all_reduce(numbers, dist.ReduceOp.MAX),
        broadcast=broadcast,
        all_gather=all_gather,
        gather=gather,
    )
