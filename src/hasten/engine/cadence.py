"""When a run pauses between two steps, and why: to report progress, to log, to save a checkpoint, to stop.

A single process compares the time after every step. Several ranks must pause at the same step: in each pause rank 0
decides at which step the next one is; the higher the latency of the network, the later.
"""

import math
import os
from dataclasses import dataclass
from time import perf_counter

from hasten.core.run_context import RunContext
from hasten.engine.observers import PROGRESS_INTERVAL_S

LOG_EVERY_STEPS = 1000
LOG_EVERY_S = 1.0
MAX_STEPS_AHEAD = 100  # to the next pause of several ranks; steps may become slower meanwhile
CHECKPOINT_TIME_FRACTION = COMM_TIME_FRACTION = 0.01  # of the run's time


@dataclass(frozen=True)
class PauseActions:
    """What the run does in one pause between two steps: stop, log the losses, save a checkpoint."""

    stop: bool
    log: bool
    save: bool


class PauseSchedule:
    """Decides when a run pauses between two steps, and what it does then.

    ``stop_signals`` grows when this process is asked to stop. With ``saves``, checkpoints are due, at least
    ``checkpoint_seconds`` apart and at most 1 % of the time; 0: at every step.
    """

    def __init__(self, run: RunContext, stop_signals: list[int], checkpoint_seconds: float, saves: bool) -> None:
        self.progress, self.ranks = run.progress, run.ranks
        self.stop_signals, self.checkpoint_seconds, self.saves = stop_signals, checkpoint_seconds, saves
        self.distributed, self.parent = not run.ranks.is_single_process, os.getppid()
        self.logged_at = self.saved_at = self.latest = self.next = perf_counter()
        self.latest_step = self.next_step = run.progress.step
        self.save_seconds = 0.0  # of the latest checkpoint
        self.comm_latency_s = 0.0  # seconds of the fastest exchange between the ranks

    def is_due(self, unread: int) -> bool:
        """Whether to pause now. ``unread``: losses not yet copied from the device; too many are a reason to pause."""
        if self.distributed:
            return self.progress.step >= self.next_step
        return bool(self.stop_signals) or unread >= LOG_EVERY_STEPS or perf_counter() >= self.next

    def actions(self, unread: int) -> PauseActions:
        """What to do in this pause. All ranks must call it: if one received a stop signal, all of them stop."""
        now = perf_counter()
        asked = bool(self.stop_signals) or (self.distributed and os.getppid() != self.parent)  # its launcher has died
        log = unread >= LOG_EVERY_STEPS or now >= self.logged_at + LOG_EVERY_S
        save = self.saves and (asked or now >= self._next_save())
        if not self.distributed:
            return PauseActions(asked, log, save)
        decisions = (log, save, self._steps_ahead(now)) if self.ranks.is_main_process else (False, False, 0)
        began = perf_counter()
        stop, log, save, steps = self.ranks.all_reduce_max([asked, *decisions])
        self.comm_latency_s = min(self.comm_latency_s or math.inf, perf_counter() - began)
        self.latest, self.latest_step = now, self.progress.step
        self.next_step = self.progress.step + int(steps)
        return PauseActions(stop > 0, log > 0, self.saves and (stop > 0 or save > 0))

    def end(self) -> None:
        """Ends the pause: sets when the next one is due (all ranks: at which step)."""
        next_report = perf_counter() + PROGRESS_INTERVAL_S
        self.next = min(next_report, self._next_save()) if self.saves else next_report

    def _next_save(self) -> float:
        if not self.checkpoint_seconds:
            return self.saved_at
        return self.saved_at + max(self.checkpoint_seconds, self.save_seconds / CHECKPOINT_TIME_FRACTION)

    def _steps_ahead(self, now: float) -> int:
        steps_per_second = (self.progress.step - self.latest_step) / max(now - self.latest, 1e-6)
        seconds = max(PROGRESS_INTERVAL_S, self.comm_latency_s / COMM_TIME_FRACTION)
        return min(max(round(steps_per_second * seconds), 1), MAX_STEPS_AHEAD) if self.checkpoint_seconds else 1
