"""This process among the ranks of its job: joins those that torchrun started, and lends their words to the run.

torchrun tells a process who it is by its environment (https://docs.pytorch.org/docs/stable/elastic/run.html). What the engine itself
has to say to the other ranks goes over a gloo group of its own, on the CPU, so that it never mixes with what a method sends.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from hasten._torch_compat import default_process_group_timeout, peer_failure
from hasten.core.errors import CollectiveTimeout, ConfigurationError, PeerFailure, RunError, format_error
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S, ProcessGroupInfo

PEER_GONE = "another rank has ended without a word"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def init_process_group(device: str, timeout: float = DEFAULT_TIMEOUT_S) -> Iterator[ProcessGroupInfo]:
    """The ranks of the job that this process was started in; itself alone where there is none.

    Args:
        patience: seconds to wait for a rank that says nothing.

    Raises:
        Refusal: the environment tells half of a job.
        Aftermath: the others cannot be reached, or one of them has gone, or says nothing.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_initialized() and world == "1":
        yield ProcessGroupInfo()
        return
    own_group = not dist.is_initialized()
    with _default_signal_handlers(), _translate_peer_errors(timeout):
        if own_group:
            _init(device, timeout)
        group = _connect(lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
    well = False
    try:
        with _translate_peer_errors(timeout), default_process_group_timeout(timeout):
            yield _process_group_info(group)
        well = True
    finally:
        with suppress(RuntimeError, ValueError):  # of a group whose other ranks are gone
            dist.destroy_process_group(group)
        if own_group and (
            well or "nccl" not in dist.get_backend_config()
        ):  # NCCL would wait for ranks that wait for this one
            dist.destroy_process_group()


def on_main_process(ranks: ProcessGroupInfo, make: Callable):
    """What ``make()`` gives on rank 0, None elsewhere; what is refused there ends all of them.

    Raises:
        Refusal, Failure: what ``make`` raised. Aftermath: on the other ranks.
    """
    made = trouble = None
    if ranks.is_main_process:
        try:
            made = make()
        except (ConfigurationError, RunError) as error:
            trouble = error
    told = ranks.broadcast(b"" if trouble is None else (str(trouble) or type(trouble).__name__).encode()).decode()
    if trouble is not None:
        raise trouble
    if told:
        raise PeerFailure(told)
    return made


def check_ranks_agree(ranks: ProcessGroupInfo, told: dict[str, str]) -> None:
    """Makes sure that all ranks are about to do the same.

    Args:
        told: what has to be alike on all of them, by what people call it.

    Raises:
        Refusal: some rank differs; which, and in what.
    """
    answers = [json.loads(answer) for answer in ranks.all_gather(json.dumps(told).encode())]
    for rank, answer in enumerate(answers):
        for what, here in answers[0].items():
            if answer[what] != here:
                raise ConfigurationError(
                    f"rank {rank} has another {what} than rank 0: {answer[what]:.80} instead of {here:.80}; start all ranks alike"
                )


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error says no more than that another rank has gone, or says nothing."""
    return peer_failure(error) is not None


@contextmanager
def _translate_peer_errors(timeout: float) -> Iterator[None]:
    """What gloo or NCCL say of another rank, in our words."""
    try:
        yield
    except Exception as error:
        if peer_failure(error) == "timeout":
            raise CollectiveTimeout(timeout) from error
        if peer_failure(error) == "gone":
            raise PeerFailure(PEER_GONE) from error
        raise


def _init(device: str, timeout: float) -> None:
    if missing := [name for name in NAMES if name not in os.environ]:
        raise ConfigurationError(
            f"WORLD_SIZE says that this is one process of several, but {missing[0]} is not set; start them with hasten or torchrun"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    _connect(lambda: dist.init_process_group(backend, timeout=timedelta(seconds=timeout)))


def _connect(connect: Callable):
    """What ``connect()`` gives, for which all ranks have to be there."""
    try:
        return connect()
    except Exception as error:
        if peer_failure(error) == "timeout":
            raise
        raise PeerFailure(f"rank {os.environ['RANK']} does not reach the others: {format_error(error)}") from None


@contextmanager
def _default_signal_handlers() -> Iterator[None]:
    """Inside, a signal ends this process as if nobody minded: it waits for others, maybe in vain, and has nothing to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _process_group_info(group: dist.ProcessGroup) -> ProcessGroupInfo:
    rank, world = dist.get_rank(), dist.get_world_size()

    def reduced(numbers: Sequence[float], how: dist.ReduceOp) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, how, group=group)
        return tensor.tolist()

    def first(given: bytes) -> bytes:
        length = int(reduced([len(given) if rank == 0 else 0], dist.ReduceOp.SUM)[0])
        tensor = _tensor(given) if rank == 0 else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(tensor, 0, group=group)
        return tensor.numpy().tobytes()

    def every(given: bytes) -> list[bytes]:
        lengths, padded, room = spread(given)
        dist.all_gather(room, padded, group=group)
        return [tensor.numpy().tobytes()[:length] for tensor, length in zip(room, lengths, strict=True)]

    def to_first(given: bytes) -> list[bytes]:
        lengths, padded, room = spread(given, on=(0,))
        dist.gather(padded, room or None, group=group)
        return [tensor.numpy().tobytes()[:length] for tensor, length in zip(room, lengths, strict=bool(room))]

    def spread(given: bytes, on: Sequence[int] = range(world)) -> tuple[list[int], torch.Tensor, list[torch.Tensor]]:
        """(how much everybody has to say, this rank's words at the length of the longest, room for everybody's on some ranks)."""
        lengths = [
            int(n) for n in reduced([len(given) if place == rank else 0 for place in range(world)], dist.ReduceOp.SUM)
        ]
        padded = _tensor(given + bytes(max(lengths) - len(given)))
        return lengths, padded, [torch.empty_like(padded) for _ in range(world)] if rank in on else []

    return ProcessGroupInfo(
        rank,
        world,
        int(os.environ.get("LOCAL_RANK", rank)),
        all_reduce_sum=lambda numbers: reduced(numbers, dist.ReduceOp.SUM),
        all_reduce_max=lambda numbers: reduced(numbers, dist.ReduceOp.MAX),
        broadcast=first,
        all_gather=every,
        gather=to_first,
    )


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
