"""When a run pauses between two steps, and for what: progress, the log, a checkpoint, the end.

A run alone looks at the progress after every step. The ranks of a job cannot, since all of them have to pause at the same step: there the first
one's progress says at each pause which step the next one is at; the slower their network, the later.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from time import perf_counter

from hasten.contract.run_context import RunContext
from hasten.engine.observers import PROGRESS_EVERY

STEPS_BETWEEN_LOGS = 1000
SECONDS_BETWEEN_LOGS = 1.0
MOST_AHEAD = 100  # steps to the next pause of several ranks; steps may become slower meanwhile
SHARE_FOR_CHECKPOINTS = SHARE_FOR_WORDS = 0.01  # of the run's time


@dataclass(frozen=True)
class Wishes:
    """What a pause is for."""

    stop: bool
    log: bool
    save: bool


class Pauses:
    """The pauses of one run.

    Args:
        asked: grows when somebody asks this process to stop.
        every: seconds between two checkpoints, at least; 0: at every step.
        keeps: somebody keeps checkpoints.
    """

    def __init__(self, run: RunContext, asked: list, every: float, keeps: bool):
        self.progress, self.ranks, self.asked, self.every, self.keeps = run.progress, run.ranks, asked, every, keeps
        self.together, self.parent = not run.ranks.is_single_process, os.getppid()
        self.logged = self.saved = self.latest = self.next = perf_counter()
        self.latest_step = self.next_step = run.progress.step
        self.saving = 0.0  # seconds that the latest checkpoint took
        self.word = 0.0  # seconds that ranks take at least to tell each other

    def is_time(self, unread: int) -> bool:
        """Whether to pause now, with so many losses not fetched yet."""
        if self.together:
            return self.progress.step >= self.next_step
        return bool(self.asked) or unread >= STEPS_BETWEEN_LOGS or perf_counter() >= self.next

    def wishes(self, unread: int) -> Wishes:
        """What to do in this pause; anybody's wish to stop is everybody's."""
        now, asked = perf_counter(), self.is_asked()
        log = unread >= STEPS_BETWEEN_LOGS or now >= self.logged + SECONDS_BETWEEN_LOGS
        save = self.keeps and (asked or now >= self._next_save())
        if not self.together:
            return Wishes(asked, log, save)
        first = (log, save, self._steps_ahead(now)) if self.ranks.is_main_process else (False, False, 0)
        began = perf_counter()
        stop, log, save, steps = self.ranks.all_reduce_max([asked, *first])
        self.word = min(self.word or math.inf, perf_counter() - began)
        self.latest, self.latest_step = now, self.progress.step
        self.next_step = self.progress.step + int(steps)
        return Wishes(stop > 0, log > 0, self.keeps and (stop > 0 or save > 0))

    def is_asked(self) -> bool:
        """Whether this process itself is to stop."""
        return bool(self.asked) or (self.together and os.getppid() != self.parent)  # nobody is left to tell

    def over(self) -> None:
        """The pause is over."""
        later = perf_counter() + PROGRESS_EVERY
        self.next = min(later, self._next_save()) if self.keeps else later

    def _next_save(self) -> float:
        return self.saved + (max(self.every, self.saving / SHARE_FOR_CHECKPOINTS) if self.every else 0.0)

    def _steps_ahead(self, now: float) -> int:
        pace = (self.progress.step - self.latest_step) / max(now - self.latest, 1e-6)
        seconds = max(PROGRESS_EVERY, self.word / SHARE_FOR_WORDS)
        return min(max(round(pace * seconds), 1), MOST_AHEAD) if self.every else 1
