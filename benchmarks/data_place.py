"""Cost of tracking the position: microseconds per step over the same batches without it.

hasten: a pipeline that tracks its position, compared with one that does not; the batches exist already, so that only
the tracking is measured; and once more with ``state_dict()`` called at every step. Beside it StatefulDataLoader is
compared with DataLoader, with its default of a snapshot every step, on the same samples.

Figure: below 1 microsecond per step.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import deque

from _loaders import on_one_core, quiet, versions

on_one_core()
quiet()

import torch
from _common import finish, in_turns, installed, interval, parser, show
from torch.utils.data import DataLoader, Dataset

FIGURE = 1.0  # microseconds
BATCH = 8
TRACKED, SAVED, PLAIN = "hasten, position tracked", "hasten, state_dict() every step", "hasten, no position"
STATEFUL = {f"StatefulDataLoader, {workers} workers": (f"DataLoader, {workers} workers", workers) for workers in (0, 2)}


class ReadyRunner:
    """A runner whose batches exist already."""

    def __init__(self, batch):
        from hasten.core.data import WorkerConfig

        self.batch, self.workers = batch, WorkerConfig()

    def __call__(self, make, indices):
        return ((self.batch, ()) for _ in indices)


def pipeline(steps: int):
    from hasten.data import arrays

    return dataclasses.replace(
        arrays(torch.zeros(steps * BATCH, 1)).batch(BATCH), runner=ReadyRunner(torch.zeros(BATCH, 1))
    )


def seconds(run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def exhaust(batches) -> None:
    deque(batches, maxlen=0)


def exhaust_with_state(batches) -> None:
    for _ in batches:
        batches.state_dict()


class Batched(Dataset):
    def __init__(self, rows):
        self.x = torch.zeros(rows, 1)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, rows):
        return self.x[: len(rows)]


def identity(samples):
    return samples


def loader(kind, rows: int, workers: int):
    made = kind(
        Batched(rows), batch_size=BATCH, collate_fn=identity, num_workers=workers, persistent_workers=workers > 0
    )
    exhaust(made)  # starts the workers
    return made


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=21)
    options.add_argument("--steps", type=int, default=50_000, help="of hasten per round; the loaders do a fiftieth")
    options.add_argument("--quick", action="store_true", help="five rounds")
    options = options.parse_args()
    if options.quick:
        options.rounds = 5
    torch.set_num_threads(1)
    tracked = pipeline(options.steps)
    arms = {
        PLAIN: lambda: exhaust(tracked.epoch(0)),
        TRACKED: lambda: exhaust(tracked),
        SAVED: lambda: exhaust_with_state(tracked),
    }
    steps, against, missing = dict.fromkeys(arms, options.steps), {TRACKED: PLAIN, SAVED: PLAIN}, {}
    why = installed("torchdata.stateful_dataloader")
    for name, (plain, workers) in STATEFUL.items():
        if why:
            missing[name] = why
            continue
        from torchdata.stateful_dataloader import StatefulDataLoader

        for each, kind in ((plain, DataLoader), (name, StatefulDataLoader)):
            made = loader(kind, options.steps // 50 * BATCH, workers)
            arms[each] = lambda made=made: exhaust(made)
            steps[each] = options.steps // 50
        against[name] = plain
    taken = in_turns({name: (lambda arm=arm: seconds(arm)) for name, arm in arms.items()}, options.rounds)
    micro = {name: [1e6 * each / steps[name] for each in values] for name, values in taken.items()}
    extra = {
        name: interval(a - b for a, b in zip(micro[name], micro[without], strict=True))
        for name, without in against.items()
    }
    rows = [
        (name, f"{interval(values):.2f}", f"{extra[name]:.2f}" if name in extra else "")
        for name, values in micro.items()
    ]
    show(
        ("loader", "us per step", "added by the position, us"),
        rows + [(name, reason, "") for name, reason in missing.items()],
    )
    return finish(
        options,
        f"tracking the position below {FIGURE:g} us per step; measured "
        f"{extra[TRACKED]:.2f}, and {extra[SAVED]:.2f} with state_dict() every step (bound: 0)",
        max(extra[TRACKED].median, extra[SAVED].median) < FIGURE,
        {"micro": micro, "extra": extra, "missing": missing, "versions": versions()},
    )


if __name__ == "__main__":
    sys.exit(main())
