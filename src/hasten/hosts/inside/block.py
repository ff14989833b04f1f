"""A block of steps that hasten has asked a script for: what is read at its begin and at its end, and the difference."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

from hasten.hosts.inside.answers import evaluation_seconds
from hasten.hosts.inside.code import CodeObserver

if TYPE_CHECKING:
    from hasten.hosts.inside.session import Session


class TrainingBlock:
    """Measures the steps between its construction and ``end``; on request also phases and the script's own code."""

    def __init__(self, session: Session, timed: bool, observes_code: bool):
        steps, models = session.steps, session.models
        self.session, self.timed = session, timed
        steps.losses, steps.keep_losses = [], True
        if timed:
            steps.time_updates()
            session.phases.device = session.device()
            session.phases.start()
        session.synchronize()
        self.usage = resource.getrusage(resource.RUSAGE_SELF)
        self.evaluated, self.evaluations = models.evaluated_seconds, len(models.evaluations)
        self.step = steps.count
        self.code = CodeObserver(session.sites.line, lambda: models.began is not None) if observes_code else None
        self.began = steps.last_ended = time.perf_counter()

    def end(self) -> dict[str, Any]:
        """``count`` of steps and their ``losses``; ``seconds``, ``issue_seconds``, ``cpu``, ``system``, ``faults`` and
        ``switches`` as ``Arm.train``, the first two without evaluations, whose seconds are ``untimed`` and, after each
        step, ``evaluations``. On request ``phases``, seconds by phase, or the result of ``CodeObserver.stop``.
        """
        session, steps, issued = self.session, self.session.steps, time.perf_counter()
        session.synchronize()
        now, before, after = time.perf_counter(), self.usage, resource.getrusage(resource.RUSAGE_SELF)
        evaluated = session.models.evaluated_seconds - self.evaluated
        losses, steps.keep_losses = [float(loss.real) for loss in steps.losses], False
        result = {
            "count": steps.count - self.step,
            "seconds": now - self.began - evaluated,
            "issue_seconds": issued - self.began - evaluated,
            "untimed": evaluated,
            "evaluations": evaluation_seconds(session, self.evaluations),
            "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "system": after.ru_stime - before.ru_stime,
            "faults": after.ru_minflt - before.ru_minflt,
            "switches": after.ru_nivcsw - before.ru_nivcsw,
            "losses": losses,
        }
        if self.code is not None:
            result |= self.code.stop(max(1, result["count"]))
        return result | ({"phases": session.phases.stop()} if self.timed else {})
