"""Shared by the benchmarks of data loading: measures loaders in turns and prints tables of their rates."""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, repeat
from pathlib import Path

from _common import Interval, in_turns, installed, interval, print_progress, show

PACKAGES = (
    "pyarrow",
    "simplejpeg",
    "torchdata",
    "spdl",
    "grain",
    "tensorflow-cpu",
    "litdata",
    "webdataset",
    "datasets",
)

_start_up: dict[str, float] = {}  # seconds until the first batch of a loader; not part of rates, shown in tables


@dataclass(frozen=True)
class Loader:
    """One arm.

    Attributes:
        make: Sets it up and returns an iterable; each iteration is an epoch of batches.
        module: The module that it requires; None for none.
    """

    make: Callable[[], Iterable]
    module: str | None = None


class Passes:
    """An iterable whose epochs are what ``function`` yields."""

    def __init__(self, function: Callable[[], Iterator]):
        self.function = function

    def __iter__(self):
        return self.function()


def set_up(loaders: dict[str, Loader], fits: Callable[[object], bool]) -> tuple[dict[str, Iterable], dict[str, str]]:
    """Returns (loaders whose batches are right, reasons why the others are not). Loaders without a module must work."""
    ready, missing = {}, {}
    for name, loader in loaders.items():
        print_progress(f"set up: {name}")
        try:
            if loader.module and (why := installed(loader.module)):
                missing[name] = why
                continue
            began = time.perf_counter()
            made = loader.make()
            if not fits(next(iter(made))):
                raise ValueError("its batches have the wrong shape or dtype")
            _start_up[name] = time.perf_counter() - began
            ready[name] = made
        except Exception as error:
            if loader.module is None:
                raise
            missing[name] = f"does not run: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
    return ready, missing


def rates(ready: dict[str, Iterable], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Returns samples/s of each loader, by round."""
    return in_turns({name: (lambda made=made: rate(made, seconds)) for name, made in ready.items()}, rounds)


def rate(made: Iterable, seconds: float) -> float:
    """Returns samples/s over successive epochs, from the first batch on: start-up is not included."""
    batches = chain.from_iterable(repeat(made))
    with closing(batches):
        next(batches)
        count, began = 0, time.perf_counter()
        for batch in batches:
            count += rows_in(batch)
            del batch  # a training loop does the same
            if (took := time.perf_counter() - began) >= seconds:
                return count / took


def seconds_of_a_pass(make: Callable[[], Iterable]) -> float:
    """Returns seconds from opening a loader to the end of its first epoch."""
    began, count = time.perf_counter(), 0
    for batch in make():
        count += rows_in(batch)
        del batch
    return time.perf_counter() - began


@contextmanager
def closing(batches):
    """Closes a generator that is in the middle of an epoch."""
    try:
        yield
    finally:
        with suppress(AttributeError):
            batches.close()


def rows_in(batch) -> int:
    while isinstance(batch, (dict, tuple, list)):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return int(batch.shape[0])


def over(taken: dict[str, list[float]], ours: str, theirs: str) -> Interval | None:
    """Returns the speedup of ``ours``, by round; None if the other loader did not run."""
    if theirs not in taken:
        return None
    return interval(a / b for a, b in zip(taken[ours], taken[theirs], strict=True))


def best_of(taken: dict[str, list[float]], names: Iterable[str]) -> str | None:
    """Returns the fastest of these loaders that ran."""
    return max((name for name in names if name in taken), key=lambda name: interval(taken[name]).median, default=None)


def table(taken: dict[str, list[float]], missing: dict[str, str], ours: str, unit: str, start_up: bool = True) -> None:
    """Prints rates with their spread, and the speedup of ``ours``.

    Args:
        taken: Rates by loader and round.
        missing: Reasons why other loaders did not run.
        ours: The loader that the others are compared with.
        unit: Of the rates.
        start_up: Whether to print the seconds until the first batch.
    """
    headings = ("loader", unit, "best round", f"{ours}: speedup")
    rows = [
        (
            name,
            f"{interval(values):,.0f}",
            f"{max(values):,.0f}",
            "" if name == ours else f"{over(taken, ours, name):.2f}",
        )
        for name, values in taken.items()
    ] + [(name, why, "", "") for name, why in missing.items()]
    if start_up:
        headings = (*headings, "start-up, s")
        rows = [(*row, f"{_start_up[row[0]]:.2f}" if row[0] in _start_up else "") for row in rows]
    show(headings, rows)


def versions() -> dict[str, str]:
    """Returns the versions of the measured packages that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def words(ratio: Interval | None) -> str:
    return "not measured" if ratio is None else f"{ratio:.2f}x"


def on_one_core() -> int:
    """Pins this process, and all that it starts, to its last core. Call it before torch is imported."""
    os.environ["OMP_NUM_THREADS"] = "1"
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def quiet() -> None:
    """Silences the other packages."""
    warnings.filterwarnings("ignore")
    logging.getLogger("spdl").setLevel(logging.CRITICAL)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("DISABLE_OPTIMIZED_PROGRESS", "1")


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory for the files of the measurement and the caches of all packages."""
    with tempfile.TemporaryDirectory(prefix="hasten-benchmark-") as directory:
        os.environ["HASTEN_CACHE"] = str(Path(directory) / "cache")
        os.environ["HF_HOME"] = str(Path(directory) / "hugging-face")
        yield Path(directory)


def data(directory: str) -> Path | None:
    """Returns a directory of the real data below HASTEN_DATA, or None if it does not exist."""
    path = Path(os.environ.get("HASTEN_DATA", "")) / directory
    return path if "HASTEN_DATA" in os.environ and path.is_dir() else None
