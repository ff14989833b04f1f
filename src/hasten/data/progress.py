"""Progress of long reads, as warnings."""

from __future__ import annotations

import warnings
from time import perf_counter

from hasten.core.errors import ProgressWarning
from hasten.core.progress import ProgressCallback

PROGRESS_INTERVAL_S, FIRST_PROGRESS_S = 30.0, 3.0


def with_rate(what: str, rows: float, seconds: float) -> str:
    """Returns the progress message ``what`` with the rate: ``rows`` / ``seconds`` in rows/s."""
    return f"{what}, {rows / max(seconds, 1e-9):,.0f} rows/s"


def progress_warner() -> ProgressCallback:
    """Returns a progress callback that reports by a ProgressWarning every 30 s, first after 3 s."""
    last = perf_counter() - PROGRESS_INTERVAL_S + FIRST_PROGRESS_S

    def watch(what: str, done: float, seconds_left: float | None = None) -> None:
        nonlocal last
        if perf_counter() - last >= PROGRESS_INTERVAL_S and seconds_left:
            last = perf_counter()
            warnings.warn(f"{what}: {done:.0%} done, {seconds_left:.0f} s left", ProgressWarning, stacklevel=2)

    return watch
