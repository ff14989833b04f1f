"""Checks once per run, after the warm-up, that every method acts.

A method registers a check with ``run.observe_effect``. One training step is then trained under the checks of all
methods; the other steps cost nothing. The step computes what it would compute without them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Generator, Iterator, Sequence
from inspect import isgeneratorfunction
from itertools import islice
from time import perf_counter
from typing import TypeVar

from hasten.core.errors import NoEffectError, RunError, format_error
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import EffectCheck
from hasten.utils.op_recorder import NOT_CHECKED

WARMUP_STEPS = 2  # steps of this process before the one that is observed: compiling and first batches are over
SLOW_CHECK_S = 1.0  # a check that takes longer is reported with its seconds
NO_EFFECT = "has no effect"  # in the message of the error; the tuner recognizes it
CHECK_FAILED = "its effect check failed"
T = TypeVar("T")


class EffectObserver:
    """Observes the effect of each of the ``methods`` of a built ``run`` in one step; empties ``run.effect_checks``.

    Attributes:
        evidence: Method -> what its check saw, in one line; "effect not checked" for a method without a check.
        require_effect: Whether a method without effect ends the run.
        check_seconds: Method -> seconds that its check took, besides the step that it observed.
    """

    def __init__(self, run: RunContext, methods: Sequence[Method]):
        self.run, self.require_effect = run, False
        inactive = {name for name, _ in run.no_effect}
        self.evidence = {method.name: NOT_CHECKED for method in methods if method.name not in inactive}
        self.checks = {name: check for name, check in run.effect_checks.items() if name in self.evidence}
        self.running: dict[str, Generator[None, None, str]] = {}  # checks that have begun
        modules = {method.name: type(method).__module__ for method in methods}
        self.files = {name: getattr(sys.modules.get(m), "__file__", None) or m for name, m in modules.items()}
        self.check_seconds = dict.fromkeys(self.checks, 0.0)
        run.effect_checks = {}  # its checks refer to the run
        for name in self.checks:
            self.evidence[name] = f"{NOT_CHECKED}: the run was too short"
        steps = run.plan.steps
        self.warmup_steps = WARMUP_STEPS if steps is None else min(WARMUP_STEPS, max(0, steps - 1))

    def observed(self, steps: Generator[T]) -> Generator[T]:
        """Yields from ``steps``, which trains a step whenever it advances, and observes the one after the warm-up.
        RunError as in ``check``.
        """
        return self._observed(steps) if self.checks else steps

    def check(self) -> None:
        """Raises a RunError if a method is known to have no effect, and ``require_effect`` is set."""
        if self.require_effect and self.run.no_effect:
            raise RunError("; ".join(f"{method} {NO_EFFECT}: {reason}" for method, reason in self.run.no_effect))

    def _observed(self, steps: Generator[T]) -> Generator[T]:
        while self.warmup_steps and (items := [*islice(steps, 1)]):
            yield from items
            self.warmup_steps -= 1
        if not self.warmup_steps:
            for item in self._observe_next(steps):
                self.check()
                yield item
            yield from steps

    def _observe_next(self, steps: Iterator[T]) -> list[T]:
        """Trains one step under all checks; returns what it yielded, in a list that is empty if there was none."""
        try:
            self.begin()
            items = [*islice(steps, 1)]
            if items:
                self.end()
            return items
        finally:
            self._close()

    def begin(self) -> None:
        """Starts all checks; the training step between this call and ``end`` is the observed one."""
        for name, check in self.checks.items():
            self.running[name] = _as_generator(check)
            self._advance(name)

    def end(self) -> None:
        """Ends all checks, and fills in ``evidence``."""
        for name in reversed([*self.running]):  # contexts that the checks opened close in reverse order
            self._advance(name)
        for name in self.running:
            self.evidence[name] = f"{NOT_CHECKED}: the check yields twice, or is no generator function"
        self.checks = {}
        self._close()

    def _close(self) -> None:
        running, self.running = self.running, {}
        for generator in reversed([*running.values()]):
            generator.close()

    def _advance(self, name: str) -> None:
        """Runs a check to its yield, or to its end; a check that ended leaves ``running``."""
        began = perf_counter()
        try:
            next(self.running[name])
            return
        except StopIteration as end:
            text = end.value
            no_text = f"{NOT_CHECKED}: the check returned {text!r}, not a text that says what it saw"
            self.evidence[name] = text if isinstance(text, str) and text.strip() else no_text
        except NoEffectError as error:
            self._report(name, str(error))
        except (Exception, SystemExit) as error:
            self._report(name, f"{CHECK_FAILED} at {self._place(name, error)}: {format_error(error)}")
        finally:
            self.check_seconds[name] += perf_counter() - began
        del self.running[name]
        if name in self.evidence and self.check_seconds[name] > SLOW_CHECK_S:
            self.evidence[name] += f"; the check took {self.check_seconds[name]:.1f} s"

    def _place(self, name: str, error: BaseException) -> str:
        """``file:line`` of the innermost frame in the method's file; the file alone if there is none."""
        frames, file = traceback.extract_tb(error.__traceback__), self.files[name]
        return next((f"{file}:{frame.lineno}" for frame in reversed(frames) if frame.filename == file), file)

    def _report(self, name: str, reason: str) -> None:
        self.evidence.pop(name, None)
        if name not in dict(self.run.no_effect):  # the method may have reported a better reason itself
            self.run.no_effect.append((name, reason))


def _as_generator(check: EffectCheck) -> Generator[None, None, str]:
    if not bool(isgeneratorfunction(check)):  # bool: a type checker would forget what the generator returns
        yield
    result = check()
    return (yield from result) if isinstance(result, Generator) else result
