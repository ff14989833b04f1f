"""Observers: functions that receive the records of a run and only read.

An observer is called at log points, once a second or every 1,000 steps, with plain records::

    {"step": 12, "loss": 0.41}
    {"step": 12, "samples": 768, "metric": 0.93, "validation_loss": 0.22}

Losses stay on the device until a log point copies all of them at once; no step waits for the device.
"""

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from hasten.core.progress import ProgressCallback

Observer = Callable[[list[dict[str, Any]]], None]
PROGRESS_INTERVAL_S = 0.1


def losses_to_host(losses: Sequence[Any]) -> list[float]:
    """Losses as Python floats, copied from the device at once."""
    if all(type(loss) is torch.Tensor for loss in losses):
        stacked: Any = torch.stack(list(losses)).reshape(-1)
        return stacked.tolist()
    return [float(loss) for loss in losses]


def finite_or_none(value: float | None) -> float | None:
    """The value itself; None for NaN and infinity, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None


def progress_reporter(callback: ProgressCallback, fraction_done: Callable[[], float]) -> Callable[[], None]:
    """A function that passes the fraction done and the seconds left to ``callback``, ten times a second at most."""
    began, first, last = perf_counter(), fraction_done(), 0.0

    def report() -> None:
        nonlocal last
        now = perf_counter()
        if now - last < PROGRESS_INTERVAL_S:
            return
        last, done = now, fraction_done()
        callback("training", done, (now - began) * (1 - done) / (done - first) if done > first else None)

    return report
