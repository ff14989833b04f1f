"""Accuracy and time of whole trainings with MaxK, by k, against the same network without it.

Both networks have two layers and 256 hidden values: GraphSAGE on sampled neighborhoods (facebook_large) and GCN on the
whole graph (cora). Every round trains all arms with the same seed, in turns. The accuracy is that of the last epoch, on
the nodes of the workload that are not for training; the margin is that of ``hasten tune``. Seconds are those of the
training steps, with sampling but without the evaluations.

Figure: with some k, the accuracy lost lies inside the margin on both graphs. Losses are part of the table.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from _common import finish, in_turns, interval, parser, print_line, show

from hasten import Task, train
from hasten.engine.tasks import TaskRef
from hasten.tuning.gate import resolve_margin

WIDTH = 256
ORIGINAL = "without"


def facebook_large() -> Task:
    """GraphSAGE of two layers."""
    from torch_geometric.nn import GraphSAGE

    task = TaskRef.of("facebook_large").load()
    inputs, outputs = _sizes(task)
    return replace(task, model=lambda: GraphSAGE(inputs, WIDTH, num_layers=2, out_channels=outputs, dropout=0.5))


def cora() -> Task:
    """GCN of two layers."""
    from torch_geometric.nn import GCN

    task = TaskRef.of("cora").load()
    inputs, outputs = _sizes(task)
    return replace(
        task,
        model=lambda: GCN(inputs, WIDTH, num_layers=2, out_channels=outputs, dropout=0.5),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4),
    )


TASKS: dict[str, Callable[[], Task]] = {"facebook_large": facebook_large, "cora": cora}


def _sizes(task: Task) -> tuple[int, int]:
    """Widths of the input and of the output of a workload's network."""
    model = task.model()
    widths = [p.shape for p in model.parameters() if p.dim() == 2]
    return widths[0][1], widths[-1][0]


def trained(make: Callable[[], Task], k: int | None, seed: int) -> tuple[float, float]:
    """(accuracy, seconds of the steps)."""
    result = train(make(), None if k is None else f"maxk:k={k}", device="cpu", seed=seed, require_effect=True)
    return result["metric"], result["split"]["training"]


def measured(make: Callable[[], Task], options) -> dict[str, list[tuple[float, float]]]:
    """(accuracy, seconds) of each arm, by seed."""
    seeds = {name: iter(range(options.rounds)) for name in (ORIGINAL, *map(str, options.k))}
    arms = {
        name: lambda name=name: trained(make, None if name == ORIGINAL else int(name), next(seeds[name]))
        for name in seeds
    }
    return in_turns(arms, options.rounds)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5, help="seeds")
    options.add_argument("--k", type=int, nargs="+", default=[8, 16, 32, 64])
    options.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options = options.parse_args()
    rows, numbers, inside = [], {}, {}
    for name in options.tasks:
        runs = numbers[name] = measured(TASKS[name], options)
        accuracies = [accuracy for accuracy, _ in runs[ORIGINAL]]
        margin, _ = resolve_margin(accuracies, None)
        for arm, taken in runs.items():
            lost = [before - after for before, (after, _) in zip(accuracies, taken, strict=True)]
            ratio = interval(other / own for (_, other), (_, own) in zip(runs[ORIGINAL], taken, strict=True))
            rows.append((
                name,
                arm,
                f"{statistics.mean(accuracy for accuracy, _ in taken):.4f}",
                "" if arm == ORIGINAL else f"{statistics.mean(lost):+.4f} ({min(lost):+.4f} to {max(lost):+.4f})",
                f"{margin:.4f}",
                f"{statistics.median(seconds for _, seconds in taken):.1f}",
                "" if arm == ORIGINAL else f"{ratio:.2f}",
            ))  # fmt: skip
            if arm != ORIGINAL:
                inside.setdefault(name, []).append(statistics.mean(lost) <= margin)
    show(("task", "k of 256", "accuracy", "lost", "margin", "seconds", "times as fast"), rows)
    print_line(f"means over {options.rounds} seeds; in brackets the smallest and the largest loss of a seed")
    reached = all(any(each) for each in inside.values())
    return finish(options, "the accuracy lost lies inside the margin for some k on each graph", reached, numbers)


if __name__ == "__main__":
    sys.exit(main())
