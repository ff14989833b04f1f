"""Epoch after epoch through worker processes, one of which is killed (``SIGKILL``) at random moments, for 20 minutes.

After every epoch: were its batches those that one process makes alone, how much memory do the parent and its workers hold for
themselves, what lies in ``/dev/shm``. Memory is flat if the medians of the second and the last quarter of the time differ by at
most 5 %; the first quarter fills the buffers.

Figure: every epoch exact, memory flat within 5 %, no shared memory and no process left. ``--minutes 1`` is the short form.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import torch
from _common import finish, parser, show, tell

FIGURE = 0.05
ROWS, WIDTH, BATCH, WORKERS = 20_000, 1024, 256, 2
SHARED = Path("/dev/shm")
PAUSES = 0.3, 2.0  # seconds between two deaths


def pipeline():
    from hasten.data import arrays

    chance = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8, generator=chance)
    return arrays(x, torch.arange(ROWS)).shuffle(seed=1).batch(BATCH).map(noisy)


def noisy(batch, chance):
    x, y = batch
    return x.float().mul_(1 / 255).add_(chance.uniform(1)), y


def digest(batches) -> str:
    hashed = hashlib.blake2b()
    for x, y in batches:
        hashed.update(x[:, ::64].contiguous().numpy())
        hashed.update(y.numpy())
    return hashed.hexdigest()


class Deaths(threading.Thread):
    """Kills one of our worker processes now and then."""

    def __init__(self, seed: int):
        super().__init__(daemon=True)
        self.random, self.over, self.count = random.Random(seed), threading.Event(), 0

    def run(self) -> None:
        while not self.over.wait(self.random.uniform(*PAUSES)):
            with suppress(IndexError, psutil.NoSuchProcess):  # between two epochs there is none
                self.random.choice(psutil.Process().children()).kill()
                self.count += 1


def held() -> int:
    """Bytes that this process and its workers have for themselves."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            total += process.memory_full_info().uss
    return total


def epoch_with_deaths(made, number: int) -> tuple[str, int]:
    """(digest of the epoch's batches, bytes held in its middle)."""
    middle, taken = len(made) // 2, []

    def watched():
        for place, batch in enumerate(made.epoch(number)):
            if place == middle:
                taken.append(held())
            yield batch

    return digest(watched()), taken[0]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=20.0)
    options.add_argument("--seed", type=int, default=0, help="of the deaths")
    options.add_argument("--quick", action="store_true", help="the same as --minutes 1")
    options = options.parse_args()
    seconds = 60 * (1 if options.quick else options.minutes)
    torch.set_num_threads(1)
    before = set(os.listdir(SHARED)) if SHARED.is_dir() else None
    alone = pipeline()
    workers = alone.prefetch(4, processes=WORKERS, timeout=60)
    deaths = Deaths(options.seed)
    deaths.start()
    began, epochs, wrong, told = time.monotonic(), [], 0, time.monotonic()
    try:
        with warnings.catch_warnings(action="ignore"):  # every death is told
            while (passed := time.monotonic() - began) < seconds:
                found, memory = epoch_with_deaths(workers, len(epochs))
                wrong += found != digest(alone.epoch(len(epochs)))
                epochs.append((passed, memory))
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    tell(f"{passed:.0f} s: {len(epochs)} epochs, {deaths.count} deaths, {wrong} wrong, {memory / 1e6:.0f} MB")
    finally:
        deaths.over.set()
        deaths.join()
    quarter = [statistics.median(memory for at, memory in epochs if part <= 4 * at / seconds < part + 1) for part in (1, 3)]
    growth = quarter[1] / quarter[0] - 1
    left = None if before is None else sorted(set(os.listdir(SHARED)) - before)
    processes = len(psutil.Process().children())
    show(
        ("epochs", "deaths", "wrong epochs", "MB, second quarter", "MB, last quarter", "growth", "left in /dev/shm", "processes left"),
        [
            (
                len(epochs), deaths.count, wrong, *(f"{each / 1e6:.1f}" for each in quarter), f"{growth:+.1%}",
                "not a folder here" if left is None else len(left), processes,
            )
        ],
    )  # fmt: skip
    reached = deaths.count > 0 and not wrong and abs(growth) <= FIGURE and not left and not processes
    return finish(
        options,
        f"{seconds / 60:g} minutes of dying workers: exact, memory flat within {FIGURE:.0%}, nothing left; {wrong} of {len(epochs)} epochs wrong "
        f"after {deaths.count} deaths, memory {growth:+.1%}",
        reached,
        {"epochs": epochs, "deaths": deaths.count, "wrong": wrong, "growth": growth, "left": left, "processes": processes},
    )


if __name__ == "__main__":
    sys.exit(main())
