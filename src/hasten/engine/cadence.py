"""When a run pauses between two steps, and for what: progress, the log, a checkpoint, the end.

A single process compares the time after every step. Several ranks must all pause at the same step: at each pause rank 0 decides, from its
time, at which step the next pause is; the higher the latency of the network, the later.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from time import perf_counter

from hasten.core.run_context import RunContext
from hasten.engine.observers import PROGRESS_EVERY

LOG_EVERY_STEPS = 1000
LOG_EVERY_S = 1.0
MOST_AHEAD = 100  # steps to the next pause of several ranks; steps may become slower meanwhile
SHARE_FOR_CHECKPOINTS = SHARE_FOR_WORDS = 0.01  # of the run's time


@dataclass(frozen=True)
class PauseActions:
    """What the run does in a pause."""

    stop: bool
    log: bool
    save: bool


class PauseSchedule:
    """When one run pauses.

    Args:
        asked: grows when this process is asked to stop.
        every: seconds between two checkpoints, at least; 0: at every step.
        keeps: whether rank 0 writes checkpoints.
    """

    def __init__(self, run: RunContext, asked: list, every: float, keeps: bool):
        self.progress, self.ranks, self.asked, self.every, self.keeps = run.progress, run.ranks, asked, every, keeps
        self.together, self.parent = not run.ranks.is_single_process, os.getppid()
        self.logged = self.saved = self.latest = self.next = perf_counter()
        self.latest_step = self.next_step = run.progress.step
        self.saving = 0.0  # seconds that the latest checkpoint took
        self.word = 0.0  # seconds of the fastest exchange between the ranks

    def is_time(self, unread: int) -> bool:
        """Whether to pause now, while ``unread`` losses are still on the device."""
        if self.together:
            return self.progress.step >= self.next_step
        return bool(self.asked) or unread >= LOG_EVERY_STEPS or perf_counter() >= self.next

    def actions(self, unread: int) -> PauseActions:
        """What to do in this pause; all ranks stop where one is asked to."""
        now, asked = perf_counter(), self.is_asked()
        log = unread >= LOG_EVERY_STEPS or now >= self.logged + LOG_EVERY_S
        save = self.keeps and (asked or now >= self._next_save())
        if not self.together:
            return PauseActions(asked, log, save)
        first = (log, save, self._steps_ahead(now)) if self.ranks.is_main_process else (False, False, 0)
        began = perf_counter()
        stop, log, save, steps = self.ranks.all_reduce_max([asked, *first])
        self.word = min(self.word or math.inf, perf_counter() - began)
        self.latest, self.latest_step = now, self.progress.step
        self.next_step = self.progress.step + int(steps)
        return PauseActions(stop > 0, log > 0, self.keeps and (stop > 0 or save > 0))

    def is_asked(self) -> bool:
        """Whether this process is asked to stop, or its launcher is gone."""
        return bool(self.asked) or (self.together and os.getppid() != self.parent)

    def over(self) -> None:
        """Ends the pause and sets the time of the next one."""
        later = perf_counter() + PROGRESS_EVERY
        self.next = min(later, self._next_save()) if self.keeps else later

    def _next_save(self) -> float:
        return self.saved + (max(self.every, self.saving / SHARE_FOR_CHECKPOINTS) if self.every else 0.0)

    def _steps_ahead(self, now: float) -> int:
        pace = (self.progress.step - self.latest_step) / max(now - self.latest, 1e-6)
        seconds = max(PROGRESS_EVERY, self.word / SHARE_FOR_WORDS)
        return min(max(round(pace * seconds), 1), MOST_AHEAD) if self.every else 1
