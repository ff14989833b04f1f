"""The parameter server against all-reduced gradients (``ddp``): seconds per step on 2 and 4 processes, one thread each.

All arms live in the same processes and take turns, a leg of some steps each, timed by the slowest rank; the network is
the loopback interface of one machine. Three cases:

* *no slow rank*;
* *one slow rank*: rank 1 sleeps 20 ms in every third step. No rank can finish before it, so only less communication
  saves time;
* *slow in turns*: every rank sleeps 20 ms in every third step, another one each time. ``ddp`` waits in each of these
  steps, a server in few.

Figure: with two processes slow in turns, 2 steps of staleness are at least 1.1x as fast as ddp. The other cases are
printed without a required figure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _common import finish, in_turns, interval, parser, print_line, print_progress, show
from ddp_scaling import ANSWER, data, leg, model, optimizer
from torch.nn.functional import cross_entropy

WANTED, SLEEP, EVERY = 1.1, 0.020, 3
BATCH = 32  # samples per process and step
RING, BEST, ROOM = "ddp", "parameter_server:staleness=2", "parameter_server:staleness=8"
RECIPES = (RING, "parameter_server:staleness=0", BEST, ROOM)
TURNS = "in turns"
CASES = {
    "no slow rank": lambda rank, step: False,
    "one is": lambda rank, step: rank == 1 and step % EVERY == 0,
    TURNS: lambda rank, step: step % EVERY == rank % EVERY,
}


def build_program(recipe: str, ranks):
    from hasten import Task
    from hasten.core.recipe import Recipe
    from hasten.engine.plan import build
    from hasten.engine.registry import make_methods

    task = Task(
        model=model,
        train_data=data(),
        loss=cross_entropy,
        optimizer=optimizer,
        metric="accuracy",
        batch_size=BATCH * ranks.world_size,
        epochs=10**6,
    )
    return build(task, make_methods(Recipe.coerce(recipe)), ranks=ranks)


def sleeping(steps, slow, rank: int):
    """Yields the steps; this rank sleeps before some of them."""
    for number, _ in enumerate(steps):
        if slow(rank, number):
            time.sleep(SLEEP)
        yield


def rank_of_a_job(options) -> None:
    """Measures every recipe in every case; rank 0 writes the results to a file."""
    from contextlib import ExitStack

    from hasten.distributed.process_group import init_process_group
    from hasten.engine.loop import train_steps

    torch.set_num_threads(1)
    with init_process_group("cpu") as ranks, ExitStack() as stack:
        if not ranks.is_main_process:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  only rank 0 prints
        taken = {}
        programs = {recipe: build_program(recipe, ranks) for recipe in RECIPES}
        for program in programs.values():
            stack.enter_context(program.process_context())
        trainings = {recipe: train_steps(program) for recipe, program in programs.items()}
        for case, slow in CASES.items():
            arms = {recipe: sleeping(training, slow, ranks.rank) for recipe, training in trainings.items()}
            ways = {recipe: lambda arm=arm: leg(arm, options.steps, ranks, idle=False) for recipe, arm in arms.items()}
            for way in ways.values():
                way()
            print_progress(f"{ranks.world_size} processes, {case}")
            taken[case] = in_turns(ways, options.rounds)
        if ranks.is_main_process:
            Path(os.environ[ANSWER]).write_text(json.dumps(taken))


def measured(world: int) -> dict[str, dict[str, list[float]]]:
    """Returns the measurements of that many processes, started with torchrun, by case and recipe."""
    with tempfile.NamedTemporaryFile("r") as answer:
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        subprocess.run([*agent, *sys.argv], env=os.environ | {"OMP_NUM_THREADS": "1", ANSWER: answer.name}, check=True)
        return json.loads(answer.read())


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--steps", type=int, default=24, help="of a leg")
    options.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    options = options.parse_args()
    if "RANK" in os.environ:
        rank_of_a_job(options)
        return 0
    taken = {world: measured(world) for world in options.processes}
    faster = {
        world: {
            case: {
                recipe: interval(ring / own for ring, own in zip(legs[RING], legs[recipe], strict=True))
                for recipe in RECIPES[1:]
            }
            for case, legs in cases.items()
        }
        for world, cases in taken.items()
    }
    rows = [
        (
            world,
            case,
            recipe,
            f"{1e3 * interval(times).median:.1f}",
            f"{faster[world][case][recipe]:.2f}" if recipe != RING else "",
        )
        for world, cases in taken.items()
        for case, legs in cases.items()
        for recipe, times in legs.items()
    ]
    show(("processes", "slow ranks", "recipe", "ms per step", "times as fast as ddp"), rows)
    best = faster[2][TURNS][BEST] if 2 in faster else None
    print_line()
    speedup = f"{best:.2f}" if best else "unknown"
    figure = f"with two processes slow in turns, at least {WANTED:g}x as fast as ddp; it is {speedup}"
    return finish(options, figure, best and best.median >= WANTED, {"seconds a step": taken, "times as fast": faster})


if __name__ == "__main__":
    sys.exit(main())
