"""Progress of long reads, as warnings."""

import warnings
from collections.abc import Callable
from time import perf_counter

from hasten.core.errors import ProgressWarning
from hasten.core.progress import ProgressCallback

PROGRESS_INTERVAL_S, FIRST_PROGRESS_S = 30.0, 3.0


def rate_reporter(what: str, total: int, unit: str = "rows/s", size: float = 1) -> Callable[[int], None]:
    """Returns ``report(done)``, which passes ``what`` with the mean rate (``done`` / ``size`` per second, in ``unit``),
    the fraction of ``total`` that is done and the seconds left to ``progress_warner``.
    """
    on_progress, start = progress_warner(), perf_counter()

    def report(done: int) -> None:
        if done:
            elapsed = max(perf_counter() - start, 1e-9)
            rate = f"{what}, {done / elapsed / size:,.0f} {unit}"
            on_progress(rate, done / total, elapsed * (total - done) / done)

    return report


def progress_warner() -> ProgressCallback:
    """Returns a progress callback that issues a ProgressWarning, at most every 30 s and first after 3 s."""
    last = perf_counter() - PROGRESS_INTERVAL_S + FIRST_PROGRESS_S

    def on_progress(what: str, done: float, seconds_left: float | None = None) -> None:
        nonlocal last
        if perf_counter() - last >= PROGRESS_INTERVAL_S and seconds_left:
            last = perf_counter()
            warnings.warn(f"{what}: {done:.0%} done, {seconds_left:.0f} s left", ProgressWarning, stacklevel=2)

    return on_progress
