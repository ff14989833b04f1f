"""Ranks for tests: a pool of processes, forked once from this one and reused, that run functions as the ranks of a job.

The processes stay; each call creates and destroys its own process group through ``hasten``, as a job under torchrun
does. That takes 0.03 s, and through it the end of one rank reaches the others, which many tests check.
"""

import atexit
import ctypes
import gc
import os
import secrets
import signal
import socket
import sys
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import cloudpickle
import torch
import torch._dynamo  # imported before the pool is forked, so that ranks need not
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from hasten.benchmarking.process_state import restored
from hasten.core.errors import ConfigurationError, ProgressWarning, RunError
from hasten.distributed.process_group import init_process_group
from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.engine.train import train
from hasten.launch.rank_results import RankResult, write_result
from helpers import tower_tasks
from helpers.process import FORK, TIMEOUT_S

PR_SET_PDEATHSIG = 1


def run_ranks(world: int, function, *arguments) -> list:
    """Calls ``function(rank, *arguments)`` on each rank of a job of ``world`` processes.

    Args:
        world: number of ranks, 1 or more.
        function: any function; those of a test module are sent by name, lambdas and local functions by value.
        arguments: of the function; each rank gets a copy.

    Returns:
        What each rank returned, by rank. Where it raised an exception of hasten, the exception; for any other exception
        a RuntimeError that contains the traceback.

    Raises:
        AssertionError: a rank has not returned after ``TIMEOUT_S`` seconds, or has died.
    """
    return _pool(world).run(function, arguments)


class RankPool:
    """Processes that wait for functions, forked by the first call with the modules that this process had imported."""

    def __init__(self, world: int):
        self.ours, theirs = zip(*(FORK.Pipe() for _ in range(world)), strict=True)
        self.processes = [FORK.Process(target=_serve, args=(connection,)) for connection in theirs]
        for process, connection in zip(self.processes, theirs, strict=True):
            process.start()
            connection.close()
        self.owner, self.usable = os.getpid(), True

    def run(self, function, arguments) -> list:
        world, self.usable = len(self.ours), False  # until all ranks have returned
        job = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank, connection in enumerate(self.ours):
            environment = dict(os.environ) | {
                name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()
            }
            connection.send_bytes(cloudpickle.dumps((os.getcwd(), environment, sys.path, function, (rank, *arguments))))
        answers = {}
        while pending := [rank for rank in range(world) if rank not in answers]:
            ready = wait(
                [end for rank in pending for end in (self.ours[rank], self.processes[rank].sentinel)], TIMEOUT_S
            )
            assert ready, f"only ranks {sorted(answers)} of {world} have answered after {TIMEOUT_S:.0f} s"
            for rank in pending:
                died = self.processes[rank].sentinel in ready
                with suppress(EOFError):
                    if self.ours[rank].poll():
                        answers[rank], died = cloudpickle.loads(self.ours[rank].recv_bytes()), False
                assert not died, f"rank {rank} of {world} has died; ranks {sorted(answers)} have answered"
        self.usable = all(reusable for _, reusable in answers.values())
        return [answers[rank][0] for rank in range(world)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.ours:
            connection.close()


_pools: dict[int, RankPool] = {}


def _pool(world: int) -> RankPool:
    """The pool of so many ranks; a new one if the last is in an unknown state or belongs to the parent process."""
    pool = _pools.get(world)
    if pool and pool.owner == os.getpid() and not pool.usable:
        pool.close()
    if not pool or pool.owner != os.getpid() or not pool.usable:
        _pools[world] = pool = RankPool(world)
    return pool


@atexit.register
def close_pools() -> None:
    for pool in _pools.values():
        if pool.owner == os.getpid():
            pool.close()
    _pools.clear()


def _serve(connection) -> None:
    """Runs functions until the parent process has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _pools.clear()
    gc.freeze()  # objects of the test session: visiting them in each collection would take 0.3 s
    while True:
        try:
            content = connection.recv_bytes()
        except EOFError:
            return
        answer = _run(content)
        connection.send_bytes(cloudpickle.dumps(answer))
        if not answer[1]:
            os._exit(0)


def _run(content: bytes) -> tuple[object, bool]:
    """Returns (result or exception of the function, whether this process can run another one)."""
    reusable = True
    with restored(), warnings.catch_warnings():
        directory, environment, sys.path[:], function, arguments = cloudpickle.loads(content)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        torch.manual_seed(0)
        try:
            answer = function(*arguments)
            cloudpickle.dumps(answer)
        except Exception as error:
            ours = type(error).__module__.startswith("hasten")
            answer = error.with_traceback(None) if ours else RuntimeError(traceback.format_exc())
            reusable = isinstance(error, ConfigurationError)
        del function, arguments
    if dist.is_initialized():
        with suppress(RuntimeError, ValueError):  # the other ranks of the group have ended
            dist.destroy_process_group()
    if not reusable:  # to collect its process group could wait forever: threads of gloo may need the interpreter
        return answer, False
    torch._dynamo.reset()
    _clear_sharding_prop_cache()  # its entries refer to destroyed groups
    gc.collect()  # modules are in reference cycles, and keep their process groups
    return answer, not dist.is_initialized()


def write_rank_result(rank: int, result: RankResult, job) -> None:
    """Writes the result of a rank into the job directory, where torchrun would have named its error file."""
    error_file = Path(job) / "run" / "attempt_0" / str(rank) / "error.json"
    error_file.parent.mkdir(parents=True, exist_ok=True)
    write_result(result, error_file, rank)


def training(rank: int, task, recipe=None, **options) -> dict:
    return train(task, recipe, device="cpu", **options)


def free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections: one of these could take it meanwhile."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def training_as_rank(rank: int, make) -> dict:
    return training(rank, lambda: make(rank))  # created in the process group, as a task is


def training_of(rank: int, make, recipe, out) -> dict:
    return training(rank, make(), recipe, out=out)


def interrupted_run(rank: int, make, out, recipe=None) -> dict:
    """A run that ends at step 30, with a checkpoint after every step."""

    def break_off(records):
        if any(record["step"] >= 30 for record in records):
            raise RunError("interrupted")

    return training(rank, make(), recipe, out=out, checkpoint_seconds=0, observers=[break_off])


def resumed_run(rank: int, make, out, recipe=None) -> dict:
    return training(rank, make(), recipe, out=out, resume=True)


def interrupted_early(rank: int, make, out, recipe) -> None:
    def break_off(records):
        if any(record["step"] >= 12 for record in records):
            raise RunError("interrupted")

    with suppress(RunError):
        training(rank, make(), recipe, out=out, checkpoint_seconds=0, observers=[break_off])


def progress_while_building(
    rank: int, strategy: str, make=tower_tasks.tower, settings: dict | None = None
) -> list[str]:
    with init_process_group("cpu") as ranks, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(make(), [make_method(strategy, settings or {})], ranks=ranks)
    return [str(each.message) for each in caught if isinstance(each.message, ProgressWarning)]
