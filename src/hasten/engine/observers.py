"""Observers: functions that are told what happened and can only read.

An observer is called at log points, a few times a second at most, with plain records::

    {"step": 12, "loss": 0.41}
    {"step": 12, "samples": 768, "metric": 0.93, "validation_loss": 0.22}

The losses stay on the device until a log point fetches them all at once; nothing waits for the device
in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import torch

from hasten.core.progress import ProgressCallback

Observer = Callable[[list[dict]], None]
PROGRESS_EVERY = 0.1  # seconds


def numbers_of(losses: list) -> list[float]:
    """Losses as plain numbers, fetched from the device in one go."""
    if all(type(loss) is torch.Tensor for loss in losses):
        return torch.stack(losses).reshape(-1).tolist()
    return [float(loss) for loss in losses]


def number_or_none(value: float | None) -> float | None:
    """A number that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


def progress(watch: ProgressCallback, share: Callable[[], float]) -> Callable[[], None]:
    """A function to call now and then: it tells ``watch`` the share done and the seconds left, ten times a second at most."""
    began, first, last = perf_counter(), share(), 0.0

    def tell() -> None:
        nonlocal last
        now = perf_counter()
        if now - last < PROGRESS_EVERY:
            return
        last, done = now, share()
        watch("training", done, (now - began) * (1 - done) / (done - first) if done > first else None)

    return tell
