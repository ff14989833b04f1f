"""How long training stands still for a checkpoint: an asynchronous write against a synchronous one.

A network of 17 million weights under Adam, 200 MB in total, trains on all cores. Each leg is a number of steps with one
checkpoint after the first step. The arms:

* *torch.save*: a hand-written script: it saves the state, syncs the file to disk and continues. The other arms are
  compared with its time.
* *hasten*: saves as ``train`` does. Training stands still in ``begin``, and before the next update if the copy of the
  state is not ready.
* *async_save*: torch.distributed.checkpoint, which copies first and writes in a thread.
* *no checkpoint*: the same steps.

The additional time of a leg over one without a checkpoint is printed, too: on a processor that also trains, writing
costs time.

Figure: the stall is at most 5 % of one synchronous save.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from _common import finish, in_turns, interval, parser, print_line, show
from torch import nn
from torch.nn.functional import cross_entropy

WANTED = 0.05
WIDTH, BATCH = 2048, 256
BY_HAND, OURS, TORCHS, NONE = "torch.save", "hasten", "async_save", "no checkpoint"


def program():
    from hasten import Task
    from hasten.engine.plan import build

    chance = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(4 * BATCH, WIDTH, generator=chance), torch.randint(0, 10, (4 * BATCH,), generator=chance)
    )
    task = Task(
        model=lambda: nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())), nn.Linear(WIDTH, 10)
        ),
        train_data=data,
        loss=cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        metric="accuracy",
        batch_size=BATCH,
        epochs=10**6,
    )
    return build(task)


class Arms:
    """All ways to save. Each leg returns the seconds for which training stood still, and its total seconds."""

    def __init__(self, built, directory: Path, steps: int):
        from hasten.engine.async_checkpoint import AsyncCheckpointer
        from hasten.engine.loop import train_steps as training

        self.directory, self.steps, self.saving, self.waited = directory, steps, AsyncCheckpointer(), 0.0
        # as in engine/trainer.py
        self.built = dataclasses.replace(built, optimizer_step=self._updating(built.optimizer_step))
        self.training = training(self.built)

    def _updating(self, update: Callable) -> Callable:
        def updated():
            began = perf_counter()
            self.saving.before_update()
            self.waited += perf_counter() - began
            update()

        return updated

    def by_hand(self) -> Iterator[None]:
        run = self.built.run
        with open(self.directory / "by_hand.part", "wb") as file:
            torch.save({"model": run.unwrapped_model.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.directory / "by_hand.part", self.directory / "by_hand.pt")
        yield

    def ours(self) -> Iterator[None]:
        from hasten.engine import checkpoint

        checkpoints = checkpoint.Checkpoints(self.directory)
        checkpoints.good = [self.directory]  # else the first checkpoint of a run would also be read back
        self.saving.begin(
            checkpoint.get_state(self.built), checkpoint.update_only_tensors(self.built.run), checkpoints.save
        )
        yield
        self.saving.finish()

    def torchs(self) -> Iterator[None]:
        run = self.built.run
        state = {"model": run.unwrapped_model.state_dict(), "optimizer": run.optimizer.state_dict()}
        written = dcp.async_save(
            state, storage_writer=dcp.FileSystemWriter(self.directory / "dcp", overwrite=True), no_dist=True
        )
        yield
        cast(Any, getattr(written, "upload_completion", written)).result()

    def none(self) -> Iterator[None]:
        yield

    def leg(self, save: Callable[[], Iterator[None]]) -> tuple[float, float]:
        next(self.training)
        self.waited, began = 0.0, perf_counter()
        saving = save()
        next(saving)
        stood = perf_counter() - began
        for _ in range(self.steps):
            next(self.training)
        list(saving)
        return stood + self.waited, perf_counter() - began


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--steps", type=int, default=6, help="of a leg")
    options = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        arms = Arms(program(), Path(directory), options.steps)
        ways = {BY_HAND: arms.by_hand, OURS: arms.ours, TORCHS: arms.torchs, NONE: arms.none}
        legs = {name: lambda way=way: arms.leg(way) for name, way in ways.items()}
        for leg in legs.values():
            leg()
        taken = in_turns(legs, options.rounds)
    return print_result(options, taken)


def print_result(options, taken: dict[str, list[tuple[float, float]]]) -> int:
    stood = {name: [stall for stall, _ in legs] for name, legs in taken.items()}
    longer = {
        name: [leg - none for (_, leg), (_, none) in zip(legs, taken[NONE], strict=True)]
        for name, legs in taken.items()
    }
    share = {name: interval(a / b for a, b in zip(stood[name], stood[BY_HAND], strict=True)) for name in (OURS, TORCHS)}
    rows = [
        (
            name,
            f"{interval(1e3 * s for s in stood[name]):.0f}",
            f"{100 * share[name].median:.1f} %" if name in share else "",
            f"{interval(1e3 * s for s in longer[name]):.0f}",
        )
        for name in (BY_HAND, OURS, TORCHS)
    ]
    show(("saved by", "stands still, ms", "of torch.save", "leg longer by, ms"), rows)
    print_line(
        f"\nA step without a checkpoint takes {interval(1e3 * leg / options.steps for _, leg in taken[NONE]):.0f} ms."
    )
    figure = (
        f"a stall of at most {100 * WANTED:g} % of a synchronous save; it is "
        f""
        f"{100 * share[OURS].median:.1f} % ({100 * share[OURS].low:.1f} to {100 * share[OURS].high:.1f})"
    )
    return finish(
        options, figure, share[OURS].median <= WANTED, {"stood still": stood, "longer": longer, "share": share}
    )


if __name__ == "__main__":
    sys.exit(main())
