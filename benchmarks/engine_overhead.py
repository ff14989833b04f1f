"""Cost of an engine without methods: microseconds per step over a hand-written loop.

A minimal step (Linear 8x8, batch 4, SGD, CPU, one thread) leaves only the engine's cost. All engines read the same
DataLoader, are timed by their dataset, and take turns every few tenths of a second (``_steps.py``). Peers are
configured as lean as their documentation allows. The row "by hand, again" shows the measurement error.

Figure: hasten's engine without a method costs at most 5 microseconds per step.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from _common import finish, installed, interval, parser, show
from _steps import CLASSES, as_task, by_hand, relay, sgd
from torch import nn

WIDTH, BATCH = 8, 4
FIGURE = 5.0  # microseconds


def model() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def hasten_engine(loader) -> None:
    from hasten.engine.loop import train_steps
    from hasten.engine.plan import build

    program = build(as_task(model, loader))
    with program.process_context():
        for _ in train_steps(program):
            pass


def hasten_train(loader) -> None:
    from hasten import train

    train(as_task(model, loader), device="cpu")


def ignite(loader) -> None:
    """With a step function of its own, which is leaner than ``create_supervised_trainer``."""
    from ignite.engine import Engine

    net = model()
    optimizer = sgd(net)

    def step(engine, batch):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Engine(step).run(loader, max_epochs=1)


def accelerate(loader) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, sgd(net), loader)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def lightning(loader) -> None:
    """``barebones=True``: no progress bar, logger, checkpoints or checks."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

        def training_step(self, batch, _):
            inputs, targets = batch
            return nn.functional.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self):
            return sgd(self)

    L.Trainer(barebones=True, max_epochs=1, accelerator="cpu", devices=1).fit(Module(), loader)


def composer(loader) -> None:
    """No algorithm, callback or logger. Its last release runs, but does not support this version of PyTorch."""
    from composer import ComposerModel, Trainer

    class Module(ComposerModel):
        def __init__(self):
            super().__init__()
            self.net = model()

        def forward(self, batch):
            return self.net(batch[0])

        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch[1])

    net = Module()
    Trainer(
        model=net,
        train_dataloader=loader,
        optimizers=sgd(net),
        max_duration="1ep",
        device="cpu",
        algorithms=[],
        callbacks=[],
        loggers=[],
        progress_bar=False,
        console_log_interval="1000ep",
    ).fit()


OURS = {
    "by hand": lambda loader: by_hand(model(), loader),
    "by hand, again": lambda loader: by_hand(model(), loader),
    "hasten, engine": hasten_engine,
    "hasten, train()": hasten_train,
}
PEERS = {"ignite": ignite, "accelerate": accelerate, "lightning": lightning, "composer": composer}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--legs", type=int, default=100, help="of each arm")
    options.add_argument("--steps", type=int, default=1000, help="of a leg")
    options = options.parse_args()
    _quieten()
    missing = {name: why for name in PEERS if (why := installed(name))}
    arms = OURS | {name: arm for name, arm in PEERS.items() if name not in missing}
    for name, arm in list(arms.items()):  # a peer that cannot run here is listed with the reason
        try:
            relay({name: arm}, WIDTH, BATCH, steps=10, legs=1)
        except Exception as error:
            if name in OURS:
                raise
            missing[name] = f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
            del arms[name]

    taken = relay(arms, WIDTH, BATCH, options.steps, options.legs)
    wall, cpu = ({name: [1e6 * leg[clock] for leg in legs] for name, legs in taken.items()} for clock in (0, 1))
    extra, of_processor = _over_by_hand(wall), _over_by_hand(cpu)
    rows = [
        (
            name,
            f"{interval(legs).median:.1f}",
            f"{min(legs):.1f}",
            *(_format_intervals(extra[name], of_processor[name]) if name != "by hand" else ("", "")),
        )
        for name, legs in wall.items()
    ]
    rows += [(name, why, "", "", "") for name, why in missing.items()]
    show(("engine", "us a step", "fastest leg", "more than by hand, us", "of the processor, us"), rows)
    ours = extra["hasten, engine"]
    figure = f"hasten's engine at most {FIGURE:g} us a step over the loop by hand; it is {ours:.1f} (bound: 0)"
    return finish(
        options,
        figure,
        ours.median <= FIGURE,
        {"wall_us": wall, "cpu_us": cpu, "extra": extra, "extra_cpu": of_processor, "missing": missing},
    )


def _over_by_hand(micro: dict[str, list[float]]) -> dict:
    """Returns, by leg, the additional time of each arm over the hand-written loop."""
    return {name: interval(a - b for a, b in zip(legs, micro["by hand"], strict=True)) for name, legs in micro.items()}


def _format_intervals(*intervals) -> tuple[str, ...]:
    return tuple(f"{each:.1f}" for each in intervals)


def _quieten() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "composer", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
