"""What recording costs: ``train()`` with progress bar, step log and checkpoints against the bare loop, at steps of about 1 ms.

Everything is as a user gets it: the bar redrawn on a (null) terminal, every loss in the log, a checkpoint every
thirty seconds; none of these is held up while the others have their turn (``_steps.py``), so a second of training is
charged with those of four. The model is widened until a step takes about 1 ms.

Figure: at most 1 % of the step.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from _common import finish, interval, parser, show
from _steps import CLASSES, as_task, by_hand, relay
from torch import nn

BATCH = 32
INPUTS = 64
WIDTHS = (64, 128, 256, 384, 512, 768, 1024, 1536)
WANTED = 1e-3  # seconds a step
FIGURE = 1.0  # per cent


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))


def fitting_width() -> int:
    """The width whose step comes nearest to the wanted one, by the time of the processor: others may be using it."""
    arms = {width: lambda loader, width=width: by_hand(model(width), loader) for width in WIDTHS}
    taken = relay(arms, INPUTS, BATCH, steps=100, legs=3)
    return min(WIDTHS, key=lambda width: abs(min(cpu for _, cpu in taken[width]) - WANTED))


def recorded(width: int, checkpoint_seconds: float):
    """``train()`` as the command line calls it, with its bar and a folder."""

    def train(loader) -> None:
        import hasten
        from hasten.cli.progress import watching

        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(Terminal()), watching(quiet=False) as watch:
            task = as_task(lambda: model(width), loader)
            hasten.train(task, out=Path(folder) / "run", device="cpu", watch=watch, checkpoint_seconds=checkpoint_seconds)

    return train


def silent(width: int):
    def train(loader) -> None:
        import hasten

        hasten.train(as_task(lambda: model(width), loader), device="cpu")

    return train


class Terminal(io.TextIOWrapper):
    """Takes the bar for real and shows it to nobody."""

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
        "train(), nothing recorded": silent(width),
        "with bar, step log and checkpoints": recorded(width, options.checkpoint_seconds),
    }
    taken = relay(trains, INPUTS, BATCH, steps=int(options.seconds / WANTED), legs=options.legs)
    wall, cpu = ({name: [1e3 * leg[clock] for leg in legs] for name, legs in taken.items()} for clock in (0, 1))
    first, *_, last = wall
    extra, of_processor = (
        {name: interval(100 * (a / b - 1) for a, b in zip(legs, clock[first], strict=True)) for name, legs in clock.items()}
        for clock in (wall, cpu)
    )
    show(
        ("arm", "ms a step", "more than by hand, %", "of the processor, %"),
        [
            (name, f"{interval(legs).median:.3f}", *((f"{extra[name]:.2f}", f"{of_processor[name]:.2f}") if name != first else ("", "")))
            for name, legs in wall.items()
        ],
    )
    figure = f"recording at most {FIGURE:g} % at steps of {interval(wall[first]).median:.2f} ms; it is {extra[last]:.2f} % (bound: 0)"
    return finish(
        options,
        figure,
        extra[last].median <= FIGURE,
        {"width": width, "wall_ms": wall, "cpu_ms": cpu, "extra_percent": extra},
    )


if __name__ == "__main__":
    sys.exit(main())
