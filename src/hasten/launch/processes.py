"""Starts the ranks of a job on this machine with torchrun's own agent, and says in one line what became of them.

The agent (https://docs.pytorch.org/docs/stable/elastic/agent.html) finds the other machines, tells each process who it is, and ends all of
them when one fails. Each rank runs the same command.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hasten.contract.errors import Failure, Refusal, one_line
from hasten.engine.budget import usable_cores
from hasten.launch.endings import FOLDER, Ending, left
from hasten.launch.meeting import HERE, interface_of, is_host, own_address

GRACE = 60  # seconds that the ranks have to save and to end once one has failed, or they were asked to stop
MEETING = 300  # seconds that the machines have to find each other


def start(words: list[str], processes: int, nodes: int = 1, rendezvous: str | None = None) -> int:
    """Runs ``hasten WORDS`` in so many processes on this machine, and on as many of each other node; the exit code of the command.

    Args:
        rendezvous: HOST:PORT where the machines meet; one of them is HOST. None: there is one machine only.

    Raises:
        Refusal, Failure: what the first rank that failed had to say, and which it was.
    """
    address, hosts = (HERE, True) if rendezvous is None else (own_address(rendezvous), is_host(rendezvous))
    _silence_the_agent()
    with tempfile.TemporaryDirectory(prefix="hasten-job-") as folder, _environment(folder, processes, address):
        config = LaunchConfig(
            min_nodes=nodes, max_nodes=nodes, nproc_per_node=processes, run_id="hasten", max_restarts=0, monitor_interval=0.1,
            rdzv_backend="c10d", rdzv_endpoint=rendezvous or f"{HERE}:0", rdzv_configs={"timeout": MEETING, "is_host": hosts}, local_addr=address,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=dict.fromkeys(range(1, processes), Std.ALL)),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)("-m", "hasten", *words)
        except ChildFailedError as error:
            raise _verdict(left(folder), {rank: failure.exitcode for rank, failure in error.failures.items()}) from None
        except SignalException as error:
            raise _verdict(left(folder), {}, f"stopped by {signal.Signals(error.sigval).name}") from None
        except KeyboardInterrupt:
            raise _verdict(left(folder), {}, "stopped") from None
        except Exception as error:
            raise Failure(f"the {nodes} nodes did not meet at {rendezvous}: {one_line(error)}" if rendezvous else one_line(error)) from None
        return max((ending.code for ending in left(folder).values()), default=0)


def _verdict(endings: dict[int, Ending], codes: dict[int, int], otherwise: str = "the ranks ended without a word") -> Exception:
    """What the rank has to say that failed first, by its own fault; of one that could not speak, how it ended."""
    for rank, code in sorted(codes.items()):
        if rank not in endings and code not in (0, -signal.SIGTERM):  # the agent ends the others by SIGTERM
            cause = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
            return Failure(f"rank {rank}: {cause}{' (out of memory?)' if code == -signal.SIGKILL else ''}; the other ranks were ended")
    failed = [(rank, ending) for rank, ending in endings.items() if ending.line]
    if not failed:
        return Failure(otherwise)
    rank, first = min(failed, key=lambda each: (each[1].aftermath, each[1].when))
    return Refusal(first.line) if first.code == 2 else Failure(f"rank {rank}: {first.line}")


def _silence_the_agent() -> None:
    """What there is to tell is told by us, in one line."""
    for name in [*logging.Logger.manager.loggerDict]:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _environment(folder: str, processes: int, address: str) -> Iterator[None]:
    """What the ranks find in their environment; ours is as before when they are gone."""
    before = dict(os.environ)
    os.environ[FOLDER] = folder
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    if interface := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # a machine's own name may lead elsewhere
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
