"""Cost of recording: ``train()`` with progress bar, step log and checkpoints against the bare loop, at steps of about 1
ms.

All settings are the defaults: the bar is redrawn on a (null) terminal, every loss is logged, a checkpoint is written
every thirty seconds. Recording continues while the other engines have their turns (``_steps.py``), so one second of
training carries the recording of four. The model is widened until a step takes about 1 ms.

Two identical trainings differ by a few per cent for their whole life, depending on the addresses of their weights; the
row "by hand, again" shows it. Therefore the work between two steps (bar, log, checkpoints) is also timed directly.

Figure: at most 1 % of the time, by the direct measurement.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from _common import finish, interval, parser, print_line, show
from _steps import CLASSES, as_task, by_hand, relay
from torch import nn

import hasten
from hasten.cli.progress import progress_display
from hasten.engine.trainer import Trainer

BATCH = 32
INPUTS = 64
WIDTHS = (64, 128, 256, 384, 512, 768, 1024, 1536)
WANTED = 1e-3  # seconds per step
FIGURE = 1.0  # per cent


def model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def fitting_width() -> int:
    """Returns the width whose step takes closest to the wanted CPU time; wall-clock time depends on other programs."""
    arms = {width: lambda loader, width=width: by_hand(model(width), loader) for width in WIDTHS}
    taken = relay(arms, INPUTS, BATCH, steps=100, legs=3)
    return min(WIDTHS, key=lambda width: abs(min(cpu for _, cpu in taken[width]) - WANTED))


class BetweenSteps:
    """Measures the total time that a recorded run spends between steps: for the bar, the log and the checkpoints."""

    def __init__(self):
        self.seconds, self.look_up = 0.0, Trainer._pause
        Trainer._pause = lambda trainer: self.timed(trainer)  # pyright: ignore[reportAttributeAccessIssue]

    def timed(self, trainer: Trainer) -> None:
        began = perf_counter()
        self.look_up(trainer)
        if trainer.persistence.directory:
            self.seconds += perf_counter() - began


def recorded(width: int, checkpoint_seconds: float):
    """Runs ``train()`` as the command line does, with its progress bar and a run directory."""

    def train(loader) -> None:
        with (
            tempfile.TemporaryDirectory() as directory,
            contextlib.redirect_stderr(Terminal()),
            progress_display(quiet=False) as on_progress,
        ):
            task = as_task(lambda: model(width), loader)
            hasten.train(
                task,
                out=Path(directory) / "run",
                device="cpu",
                on_progress=on_progress,
                checkpoint_seconds=checkpoint_seconds,
            )

    return train


def unrecorded(width: int):
    def train(loader) -> None:
        hasten.train(as_task(lambda: model(width), loader), device="cpu")

    return train


class Terminal(io.TextIOWrapper):
    """A terminal for the progress bar that discards its output."""

    def __init__(self):
        super().__init__(open(os.devnull, "wb"))  # noqa: SIM115  closed with the wrapper

    def isatty(self) -> bool:
        return True


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--legs", type=int, default=100, help="of each arm")
    options.add_argument("--seconds", type=float, default=1.0, help="length of a leg")
    options.add_argument("--checkpoint-seconds", type=float, default=30.0, help="between two checkpoints")
    options = options.parse_args()
    torch.set_num_threads(1)
    width = fitting_width()
    trains = {
        "the loop by hand": lambda loader: by_hand(model(width), loader),
        "by hand, again": lambda loader: by_hand(model(width), loader),
        "train(), no recording": unrecorded(width),
        "with bar, step log and checkpoints": recorded(width, options.checkpoint_seconds),
    }
    between, steps = BetweenSteps(), int(options.seconds / WANTED)
    taken = relay(trains, INPUTS, BATCH, steps=steps, legs=options.legs)
    wall, cpu = ({name: [1e3 * leg[clock] for leg in legs] for name, legs in taken.items()} for clock in (0, 1))
    first, *_, last = wall
    extra, of_processor = (
        {
            name: interval(100 * (a / b - 1) for a, b in zip(legs, clock[first], strict=True))
            for name, legs in clock.items()
        }
        for clock in (wall, cpu)
    )
    show(
        ("arm", "ms a step", "more than by hand, %", "of the processor, %"),
        [
            (
                name,
                f"{interval(legs).median:.3f}",
                *((f"{extra[name]:.2f}", f"{of_processor[name]:.2f}") if name != first else ("", "")),
            )
            for name, legs in wall.items()
        ],
    )
    # including the leg that is dropped
    seconds = sum(leg * 1e-3 * steps for leg in wall[last]) * (options.legs + 1) / options.legs
    share = 100 * between.seconds / seconds
    print_line(f"\nbetween the steps, by a on_progress of its own: {share:.2f} % of {seconds:.0f} s")
    figure = (
        f"recording at most {FIGURE:g} % at steps of {interval(wall[first]).median:.2f} ms; it is "
        f"{share:.2f} % (bound: 0)"
    )
    return finish(
        options,
        figure,
        share <= FIGURE,
        {"width": width, "wall_ms": wall, "cpu_ms": cpu, "extra_percent": extra, "between_steps_percent": share},
    )


if __name__ == "__main__":
    sys.exit(main())
