"""Memory of a process under ``ddp`` and ``zero`` against the formula, at 2 and 4 processes.

A network of 39 million weights in float32 under Adam; batches are so small that only the state counts. Memory is the
resident set size (RSS) when the gradients exist and the update is next, minus the same for a network of negligible
size; the allocator first returns its unused memory. The formula in bytes per weight of a network sharded over n ranks:

    ddp            4 (weights) + 4 (gradients) + 8 (Adam)    16
    zero stage 1                                             8 + 8/n
    zero stage 2                                             16/n and during the backward pass all weights, 4 + 16/n
    zero stage 3                                             16/n and during the backward pass the weights of a block

Figure: within 10 % of the formula, every stage at 2 and 4 processes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import psutil
import torch
from _common import finish, parser, print_line, print_progress, show
from torch import nn
from torch.nn.functional import mse_loss

WANTED = 0.10
WIDTH, SMALL, LAYERS, STEPS = 900, 128, 48, 3
FORMULAS = {
    "ddp": lambda n: 16.0,
    "zero:stage=1": lambda n: 8 + 8 / n,
    "zero:stage=2": lambda n: 16 / n,
    "zero:stage=3": lambda n: 16 / n,
}
ANSWER = "ZERO_MEMORY_ANSWER"  # environment variable: the file into which rank 0 writes the measurement
STRATEGY = "ZERO_MEMORY_STRATEGY"


def main() -> int:
    if "RANK" in os.environ:
        return measure()
    options = parser(__doc__)
    options.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    options = options.parse_args()
    rows, found = [], {}
    for world in options.processes:
        for strategy, formula in FORMULAS.items():
            print_progress(f"{strategy}, {world} processes")
            measured = in_ranks(strategy, world)
            off = max(abs(each / formula(world) - 1) for each in measured)
            found[f"{strategy} at {world}"] = {"bytes a weight": measured, "formula": formula(world), "off": off}
            rows.append(
                (
                    strategy,
                    world,
                    f"{min(measured):.2f} to {max(measured):.2f}",
                    f"{formula(world):.2f}",
                    f"{100 * off:.1f} %",
                )
            )
    show(("strategy", "processes", "bytes a weight, by rank", "formula", "farthest off"), rows)
    print_line("")
    off = max(each["off"] for each in found.values())
    return finish(
        options,
        f"within {100 * WANTED:g} % of the formula; the farthest is {100 * off:.1f} % off",
        off <= WANTED,
        found,
    )


def in_ranks(strategy: str, world: int) -> list[float]:
    """Returns bytes per weight on each rank."""
    with tempfile.NamedTemporaryFile("r") as answer:
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        subprocess.run(
            [*agent, __file__], env=os.environ | {"OMP_NUM_THREADS": "1", ANSWER: answer.name, STRATEGY: strategy}
        )
        return json.loads(answer.read())  # of ranks that returned, whatever the exit code of their interpreters


def measure() -> int:
    from hasten import Task
    from hasten.core.recipe import Recipe
    from hasten.distributed.process_group import init_process_group
    from hasten.engine.loop import train_steps
    from hasten.engine.plan import build
    from hasten.engine.registry import make_methods

    def trained(width: int, ranks) -> int:
        """Returns the resident memory just before an update of a network of this width."""
        rows, readings = torch.randn(64, width), []
        task = Task(
            model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))),
            train_data=torch.utils.data.TensorDataset(rows, rows),
            loss=mse_loss,
            optimizer=lambda model: torch.optim.Adam(model.parameters()),
            metric="loss",
            batch_size=8,
            epochs=10**6,
        )
        program = build(task, make_methods(Recipe.coerce(os.environ[STRATEGY])), ranks=ranks)

        def update() -> None:
            readings.append(resident())
            program.optimizer_step()

        for _ in islice(train_steps(dataclasses.replace(program, optimizer_step=update)), STEPS):
            pass
        return readings[-1]

    with init_process_group("cpu") as ranks:
        before = trained(SMALL, ranks)  # including everything imported on the way
        own = (trained(WIDTH, ranks) - before) / (LAYERS * (WIDTH + 1) * WIDTH)
        everybodys = [json.loads(each) for each in ranks.all_gather(json.dumps(own).encode())]
        if ranks.is_main_process:
            Path(os.environ[ANSWER]).write_text(json.dumps(everybodys))
    return 0


def resident() -> int:
    """Returns resident bytes after the allocator has returned its unused memory."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    sys.exit(main())
