"""Measures how much other processes disturbed a measurement."""

import os
from pathlib import Path

STEAL = 7  # index in /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal


class SystemNoise:
    """Begins when it is created; ``summary`` returns the figures since then."""

    def __init__(self) -> None:
        self.ticks = _cpu_ticks()

    def summary(self, spread_percent: float, involuntary_switches: float) -> dict[str, float | str | None]:
        """Both arguments, CPU time stolen by the hypervisor since the start (percent), and load average (1 minute)."""
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
    """The first 8 columns of the line for all CPUs in /proc/stat; [] if there is no such file."""
    try:
        return [int(column) for column in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return []
