"""How disturbed the machine was while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Noise:
    """Starts watching when it is made; ``told`` gives the figures."""

    def __init__(self):
        self.began, self.ticks = time.monotonic(), _ticks()

    def told(self, spread_percent: float, involuntary_switches: int) -> dict:
        """Spread of the blocks, involuntary switches of the first arm, time stolen by the hypervisor, load."""
        after = _ticks()
        total = sum(after) - sum(self.ticks)
        stolen = 100 * (after[7] - self.ticks[7]) / total if total and len(after) > 7 else None
        return {
            "spread_percent": spread_percent,
            "involuntary_switches": involuntary_switches,
            "steal_percent": stolen,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }


def _ticks() -> list[int]:
    """The first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, ..."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return []
