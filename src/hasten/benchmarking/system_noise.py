"""Measures how much other processes disturbed a measurement."""

import os
from contextlib import suppress
from pathlib import Path

import psutil

STEAL, IDLE = 7, (3, 4)  # columns of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal


class SystemNoise:
    """Begins when it is created; ``summary`` returns the figures since then."""

    def __init__(self, pid: int | None = None) -> None:
        """``pid``: of the process whose work, and that of all that it started, is no disturbance; None: this one."""
        # a launcher of another user may be hidden
        self.pid = pid if pid is not None and os.access(f"/proc/{pid}/stat", os.R_OK) else None
        self.ticks, self.own = _cpu_ticks(), _own_cpu_seconds(self.pid)

    def summary(self, spread_percent: float, involuntary_switches: float) -> dict[str, float | str | None]:
        """Both arguments, and the figures of the machine since the start.

        ``steal_percent`` is the time that the hypervisor took, ``others_percent`` that which other programs used, of
        the time of all processors that this process may run on. ``load`` is the load average of the last minute.
        """
        ticks = [after - before for after, before in zip(_cpu_ticks(), self.ticks, strict=False)]
        total = sum(ticks)
        return {
            "spread_percent": spread_percent,
            "involuntary_switches": involuntary_switches,
            "steal_percent": 100 * ticks[STEAL] / total if total else None,
            "others_percent": self._others_percent(ticks) if total else None,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }

    def _others_percent(self, ticks: list[int]) -> float:
        own = (_own_cpu_seconds(self.pid) - self.own) * os.sysconf("SC_CLK_TCK")
        busy = sum(ticks) - sum(ticks[column] for column in (*IDLE, STEAL))
        return max(0.0, 100 * (busy - own) / sum(ticks))


def _own_cpu_seconds(pid: int | None = None) -> float:
    """CPU seconds of a process (None: this one) and of all that it started, the ended ones included."""
    process, seconds = psutil.Process(pid), 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            times = one.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _cpu_ticks() -> list[int]:
    """The first 8 columns of /proc/stat, added up over the processors of this process; [] if there is no such file."""
    try:
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        columns = [[int(ticks) for ticks in row[1:9]] for row in rows if row[0] in mine]
        return [sum(column) for column in zip(*columns, strict=True)]
    except (OSError, ValueError):
        return []
