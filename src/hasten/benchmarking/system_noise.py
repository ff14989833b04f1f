"""Measures how disturbed the machine was while something else was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

STEAL = 7  # index in /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal


class SystemNoise:
    """Starts when it is created; ``summary`` gives the figures since then."""

    def __init__(self):
        self.began, self.ticks = time.monotonic(), _cpu_ticks()

    def summary(self, spread_percent: float, involuntary_switches: int) -> dict:
        """The two arguments, which the caller has measured, the time stolen by the hypervisor, and the load."""
        after = _cpu_ticks()
        total = sum(after) - sum(self.ticks)
        has_steal = total and len(after) > STEAL
        return {
            "spread_percent": spread_percent,
            "involuntary_switches": involuntary_switches,
            "steal_percent": 100 * (after[STEAL] - self.ticks[STEAL]) / total if has_steal else None,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }


def _cpu_ticks() -> list[int]:
    """The first 8 columns of the line for all processors in /proc/stat; [] where there is none."""
    try:
        return [int(column) for column in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return []
