"""ProcessGroupInfo for tests: forked from this process, which has imported torch, and told who they are as torchrun tells it."""

import os
import socket
import traceback
from pathlib import Path

import torch._dynamo  # these, too, so that not every rank of every test takes seconds for them
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel  # noqa: F401
from forked import FORK, PATIENCE

from hasten.engine.train import train
from hasten.launch.endings import Ending, write_ending


def together(world: int, function, *arguments) -> list:
    """What ``function(rank, *arguments)`` returns, or raises, in each of so many ranks."""
    told, port = FORK.SimpleQueue(), free_port()

    def run(rank: int):
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ |= {name: str(value) for name, value in names.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
        try:
            answer = function(rank, *arguments)
        except Exception as error:
            answer = error if type(error).__module__.startswith("hasten") else RuntimeError(traceback.format_exc())
        told.put((rank, answer))

    processes = [FORK.Process(target=run, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    answers = {}
    while len(answers) < world:
        assert told._reader.poll(PATIENCE), f"only ranks {sorted(answers)} of {world} have answered"
        rank, answers_of_rank = told.get()
        answers[rank] = answers_of_rank
    for process in processes:
        process.join()
    return [answers[rank] for rank in range(world)]


def leave_of(rank: int, ending: Ending, folder: str | Path) -> None:
    """Leaves the error file of a rank, as the agent has named it."""
    error_file = Path(folder, "hasten_x", "attempt_0", str(rank), "error.json")
    error_file.parent.mkdir(parents=True, exist_ok=True)
    write_ending(error_file, rank, ending)


def training(rank: int, task, recipe=None, **options) -> dict:
    return train(task, recipe, device="cpu", **options)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
