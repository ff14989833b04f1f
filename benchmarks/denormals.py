"""Whole trainings with and without flush_denormals, in fresh processes that take turns.

Two networks that run into denormal numbers (Adam's first moment decays wherever a gradient stays zero), and textbook
runs of workloads. How much a denormal number costs depends on the processor: many cores compute up to a hundred times
slower with them, others hardly slower. The last lines show it for this machine.

Figure: at least 1.5x on the learned data and 1.3x on the network for Fashion-MNIST.

``--predict`` instead compares the predicted seconds of a training whose steps take longer from step 500 on with its
measured ones. Figure: within 10 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from _common import finish, in_turns, interval, parser, print_line, show
from torch import nn
from torch.utils.data import TensorDataset

import hasten
from hasten import Task
from hasten.utils.denormals import smallest_denormals

RECIPES = {"as it is": "", "flushed": "flush_denormals"}
FIGURES = {"learned": 1.5, "fashion_network": 1.3}


def network(inputs: int, outputs: int) -> nn.Module:
    hidden = (nn.Linear(inputs, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, outputs))


def adam_task(name: str, data: TensorDataset, inputs: int, outputs: int, epochs: int) -> Task:
    return Task(
        name=name,
        model=partial(network, inputs, outputs),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=nn.functional.cross_entropy,
        train_data=data,
        batch_size=128,
        epochs=epochs,
    )


def learned() -> Task:
    """Data that a network learns completely: the sign of the first of 20 values."""
    x = torch.randn(4096, 20, generator=torch.Generator().manual_seed(0))
    return adam_task("learned", TensorDataset(x, (x[:, 0] > 0).long()), 20, 2, epochs=80)


def fashion_network() -> Task:
    from hasten.workloads.fashion_mnist import Clothes

    clothes = Clothes("train")
    images = torch.from_numpy(clothes.images.copy()).float().div_(255)
    labels = torch.from_numpy(clothes.labels.copy()).long()
    return adam_task("fashion_network", TensorDataset(images, labels), 784, 10, epochs=6)


class Slowed(nn.Module):
    """The network for the learned data; its forward pass takes 4 ms longer from step 500 on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = network(20, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls > 500:
            time.sleep(0.004)
        return self.net(x)


def predict(options: argparse.Namespace) -> int:
    """Predicted and measured seconds of a whole training with a planted drift."""
    errors, rows = [], []
    for number in range(options.rounds):
        task = dataclasses.replace(learned(), model=Slowed, epochs=150)
        predicted = hasten.diagnose(task, budget=60, device="cpu", seed=number)["seconds_per_run"]
        measured = hasten.train(task, device="cpu", seed=number)["seconds"]
        errors.append(predicted / measured - 1)
        rows.append((number, f"{predicted:.1f}", f"{measured:.1f}", f"{errors[-1]:+.1%}"))
    show(("round", "s predicted", "s measured", "error"), rows)
    figure = "the predicted time of a training that slows down: within 10 % in the median"
    return finish(options, figure, abs(median(errors)) < 0.1, {"errors": errors})


NETWORKS = {"learned": learned, "fashion_network": fashion_network}


def run(name: str, recipe: str) -> dict:
    """Trains in this process: seconds, metric, last loss, and (step, seconds since the start) at the log points."""
    points: list[tuple[int, float]] = []
    losses = []

    def observe(records: list[dict]) -> None:
        points.append((records[-1]["step"], time.perf_counter() - began))
        losses.extend(record["loss"] for record in records if "loss" in record)

    task = NETWORKS[name]() if name in NETWORKS else name
    began = time.perf_counter()
    result = hasten.train(task, recipe or None, device="cpu", observers=[observe])
    return {"seconds": result["seconds"], "metric": result["metric"], "loss": losses[-1], "points": points}


def in_fresh_process(name: str, recipe: str) -> dict:
    command = [sys.executable, __file__, "--run", name, "--with", recipe]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def operation_costs() -> dict[str, float]:
    """Operation -> time on denormal numbers / time on ones, with one thread."""
    torch.set_num_threads(1)
    ones, denormals = torch.ones(1 << 18), smallest_denormals(1 << 18).view(torch.int32).mul(1000).view(torch.float32)
    square = torch.ones(512, 512)
    operations = {
        "multiplication": lambda x: x * 0.9,
        "addition": lambda x: x + x,
        "matrix product": lambda x: x.view(512, 512) @ square,
        "square root (as in Adam)": lambda x: x.sqrt(),
    }
    return {name: fastest(partial(op, denormals)) / fastest(partial(op, ones)) for name, op in operations.items()}


def fastest(call) -> float:
    times = []
    for _ in range(30):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", default=[*NETWORKS, "fashion_mnist", "digits", "adult"])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--merge", nargs="+", type=Path, help="show the results of earlier runs (--json) as one")
    options.add_argument("--predict", action="store_true", help="the predicted time of a training with a drift")
    options.add_argument("--run", help="train this one in this process")
    options.add_argument("--with", dest="recipe", default="")
    options = options.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.recipe)))
        return 0
    if options.predict:
        return predict(options)
    if options.merge:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        trainings = {name: runs for part in parts for name, runs in part["trainings"].items()}
        costs = parts[0]["operations"]
    else:
        arms = {arm: partial(in_fresh_process, recipe=recipe) for arm, recipe in RECIPES.items()}
        trainings = {
            name: in_turns({arm: partial(train, name) for arm, train in arms.items()}, options.rounds)
            for name in options.names
        }
        costs = operation_costs()
    rows, reached = [], True if FIGURES.keys() <= trainings.keys() else None  # None: not measured
    for name, runs in trainings.items():
        plain, flushed = ([one["seconds"] for one in runs[arm]] for arm in RECIPES)
        ratio = interval(a / b for a, b in zip(plain, flushed, strict=True))
        outcomes = [runs[arm][0]["metric"] or runs[arm][0]["loss"] for arm in RECIPES]
        seconds = (f"{median(plain):.1f}", f"{median(flushed):.1f}", f"{ratio:.2f}")
        rows.append((name, *seconds, *(f"{value:.6g}" for value in outcomes)))
        if reached and ratio.median < FIGURES.get(name, 0.0):
            reached = False
    show(("training", "s as it is", "s flushed", "times as fast", "metric or loss as it is", "flushed"), rows)
    print_line()
    print_line("On denormal numbers, operations of this processor take, relative to ones:")
    print_line(", ".join(f"{name} {cost:.1f}x" for name, cost in costs.items()))
    figure = "flush_denormals: at least 1.5x on learned data and 1.3x on the Fashion-MNIST network"
    return finish(options, figure, reached, {"trainings": trainings, "operations": costs})


if __name__ == "__main__":
    sys.exit(main())
