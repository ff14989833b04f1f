"""Epochs through worker processes, one of which is killed (``SIGKILL``) at random moments, for 20 minutes.

Recorded for every epoch: whether its batches equal those of a single process, and the memory of the parent and its
workers together. Shared pages count once (PSS): counted per process, a leak of the parent would hide in the pages that
its forked workers share. Mapped files, mainly libraries, do not count, because their share depends on other processes.
Memory is flat if the medians of the second and the last quarter of the epochs differ by at most 5 %; the first quarter
fills the buffers.

Checked at the end: new names in ``/dev/shm`` that no process uses, anonymous shared memory and open files of the
parent, threads, processes, and files in the temporary directory, which only the soak uses.

Figure: every epoch exact, memory flat within 5 %, nothing left. ``--quick`` runs for 20 s.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import torch
from _common import finish, interval, parser, print_progress, show

FIGURE = 0.05
QUICK = 20 / 60  # minutes
ROWS, WIDTH, BATCH, WORKERS = 20_000, 1024, 256, 2
SHARED, NAMELESS = Path("/dev/shm"), "memfd:hasten-data"
PAUSES = 0.3, 2.0  # seconds between two kills
SPARED = 2  # number of checks during which a replacement worker is not killed
FEWEST = 8  # epochs required to judge whether memory is flat
OWN = ("Pss_Anon:", "Pss_Shmem:")  # memory of a process without mapped files, in kB


def pipeline():
    from hasten.data import arrays

    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8, generator=rng)
    return arrays(x, torch.arange(ROWS)).shuffle(seed=1).batch(BATCH).map(noisy)


def noisy(batch, rng):
    x, y = batch
    return x.float().mul_(1 / 255).add_(rng.uniform(1)), y


def digest(batches: Iterable) -> str:
    """Returns a digest of a batch: some values unchanged, and a sum of all."""
    hashed = hashlib.blake2b()
    for x, y in batches:
        hashed.update(x[:, ::64].contiguous().numpy())
        hashed.update(str(x.view(torch.int32).sum(dtype=torch.int64).item()).encode())
        hashed.update(y.numpy())
        del x, y  # as a training step would
    return hashed.hexdigest()


class Deaths(threading.Thread):
    """Kills a worker process at random intervals.

    The replacement of a killed process is spared for a while, because a batch at which two processes die is an error.
    """

    def __init__(self, seed: int):
        super().__init__(daemon=True)
        self.random, self.over, self.count = random.Random(seed), threading.Event(), 0

    def run(self) -> None:
        seen, spared, killed = set(), {}, False
        while not self.over.wait(self.random.uniform(*PAUSES)):
            alive = {each.pid: each for each in psutil.Process().children() if is_alive(each)}
            spared = {pid: looks - 1 for pid, looks in spared.items() if looks > 1}
            if killed:
                spared |= dict.fromkeys(alive.keys() - seen, SPARED)
            seen, killed = set(alive), False
            with suppress(IndexError, psutil.NoSuchProcess):  # between two epochs there are no workers
                alive[self.random.choice(sorted(alive.keys() - spared.keys()))].kill()
                killed = True
                self.count += 1


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def held() -> int:
    """Returns the bytes that this process and its workers hold together."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(OSError):  # the process has just died
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(OWN))
    return total


def epoch_with_deaths(made, number: int) -> tuple[str, int]:
    """Returns (digest of the epoch's batches, bytes held in it: the median of three measurements, as a worker may be
    dead).
    """
    looks, taken = {len(made) * part // 4 for part in (1, 2, 3)}, []

    def watched() -> Iterator:
        for place, batch in enumerate(made.epoch(number)):
            if place in looks:
                taken.append(held())
            yield batch
            del batch

    return digest(watched()), int(statistics.median(taken))


def growth_of(memory: list[int]) -> tuple[float, float, float] | None:
    """Returns (median of the second quarter, of the last one, their ratio - 1); None if there are too few epochs."""
    if len(memory) < FEWEST:
        return None
    quarter = len(memory) // 4
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return second, last, last / second - 1


def names_in_shared_memory() -> set[str]:
    return set(os.listdir(SHARED)) if SHARED.is_dir() else set()


def unused(names: set[str]) -> list[str]:
    """Returns the names in ``/dev/shm`` that no process uses; other programs may work on this machine, too."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended or belongs to another user
            used += maps.read_text(errors="replace")
    return sorted(name for name in names if f"{SHARED}/{name}" not in used)


def opened() -> tuple[int, int]:
    """(files that this process has open, its threads)."""
    return psutil.Process().num_fds(), psutil.Process().num_threads()


def left(names: set[str], before: tuple[int, int]) -> dict[str, int]:
    """Returns what is left; ``names`` in ``/dev/shm`` and ``opened`` files existed before the first epoch."""
    gc.collect()
    files, threads = (max(0, now - then) for now, then in zip(opened(), before, strict=True))
    return {
        "names in /dev/shm": len(unused(names_in_shared_memory() - names)),
        "shared memory without a name": Path("/proc/self/maps").read_text().count(NAMELESS),
        "open files": files,
        "threads": threads,
        "processes": len(psutil.Process().children(recursive=True)),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=20.0)
    options.add_argument("--seed", type=int, default=0, help="of the deaths")
    options.add_argument("--quick", action="store_true", help="20 s")
    options = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-soak-") as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        return soak(options)


def soak(options) -> int:
    seconds = 60 * (QUICK if options.quick else options.minutes)
    torch.set_num_threads(1)
    single_process = pipeline()
    workers = single_process.prefetch(4, processes=WORKERS, timeout=60)
    digest(workers.epoch(0))  # files that are opened once are open now
    names, before = names_in_shared_memory(), opened()
    deaths = Deaths(options.seed)
    deaths.start()
    began, epochs, wrong, last_report = time.monotonic(), [], 0, time.monotonic()
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        try:
            while (passed := time.monotonic() - began) < seconds or len(epochs) < FEWEST:
                found, memory = epoch_with_deaths(workers, len(epochs))
                wrong += found != digest(single_process.epoch(len(epochs)))
                epochs.append((passed, memory))
                if time.monotonic() - last_report > 10:
                    last_report = time.monotonic()
                    print_progress(
                        f"{passed:.0f} s: {len(epochs)} epochs, {deaths.count} deaths, {wrong} wrong, "
                        f"{memory / 1e6:.0f} MB"
                    )
        finally:
            deaths.over.set()
            deaths.join()
    noticed = sum("was killed" in str(notice.message) for notice in notices)
    memory = [each for _, each in epochs]
    growth, leftovers = growth_of(memory), left(names, before)
    show(
        ("of the soak", ""),
        [
            ("epochs", len(epochs)),
            ("of them wrong", wrong),
            ("workers killed", deaths.count),
            ("deaths that interrupted a batch and were reported", noticed),
            (
                "memory, all epochs",
                f"{interval(each / 1e6 for each in memory):.1f} MB, at most {max(memory) / 1e6:.1f} MB",
            ),
            *zip(("memory, second quarter", "memory, last quarter", "more"), _format_growth(growth), strict=True),
            *((f"left: {what}", count) for what, count in leftovers.items()),
        ],
    )
    flat = growth is not None and abs(growth[2]) <= FIGURE
    reached = noticed > 0 and not wrong and flat and not any(leftovers.values())
    return finish(
        options,
        f"{seconds / 60:.3g} minutes of killed workers: exact, memory flat within {FIGURE:.0%}, nothing left; "
        f"{wrong} of {len(epochs)} epochs wrong after {deaths.count} deaths, "
        f"memory {_format_growth(growth)[2]}, left {sum(leftovers.values())}",
        None if growth is None else reached,
        {
            "epochs": epochs,
            "deaths": deaths.count,
            "noticed": noticed,
            "wrong": wrong,
            "growth": growth,
            "left": leftovers,
        },
    )


def _format_growth(growth: tuple[float, float, float] | None) -> tuple[str, str, str]:
    if growth is None:
        return ("too few epochs to print_progress",) * 3
    return f"{growth[0] / 1e6:.1f} MB", f"{growth[1] / 1e6:.1f} MB", f"{growth[2]:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
