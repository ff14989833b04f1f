"""Times every phase of the real step: a method whose hooks are the outermost wrappers and change nothing.

On the CPU a mark is the clock. On a GPU it is an event in the stream, so nothing is ever made to wait:
the time between two marks is what passed on the device, its idling while the host was late included.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import torch

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.data import BatchSource
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import BackwardFn, BatchFn, ForwardFn, OptimizerFactory, StepFn
from hasten.engine.registry import method_names

BACKWARD_OVER_FORWARD = (
    2.0  # two matrix products for every one of forward: used where a replayed graph hides which is which
)


class PhaseTimer:
    """Begin and end of every phase, written down while it runs and added up when it is read."""

    def __init__(self, device: torch.device):
        self.device, self.running = device, False
        self.marks: list[tuple] = []

    def start(self) -> None:
        self.marks, self.running = [], True

    def now(self):
        """A mark, or None where nothing is to be noted."""
        if not self.running:
            return None
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():  # what is captured runs later, out of our sight
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, phase: str, began) -> None:
        if began is not None:
            self.marks.append((phase, began, self.now()))

    def timed(self, phase: str, function):
        """``function``, noted under a phase."""

        def timed(*arguments):
            began = self.now()
            result = function(*arguments)
            self.note(phase, began)
            return result

        return timed

    def stop(self) -> dict[str, float]:
        """Seconds of every phase since ``start``."""
        self.running = False
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds: Counter[str] = Counter()
        for phase, began, ended in self.marks:
            if ended is not None:
                seconds[phase] += began.elapsed_time(ended) / 1000 if self.device.type == "cuda" else ended - began
        return _forward_and_backward(seconds)


class Timeline(Method):
    """Leaves its Tape in ``run.checkpoint_state``."""

    card = Card(
        summary="times every phase of the step",
        exactness=Exactness.BIT_EXACT,
        order=WrapOrder.LAST,
        after=tuple(method_names()),  # outermost: what another method adds to a phase belongs to that phase
    )

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if not batches.training:
            return batches
        tape = run.checkpoint_state["timeline"] = PhaseTimer(run.device)

        def epoch(number, start):
            began, end = tape.now(), object()
            iterator = iter(batches.epoch(number, start))
            while (batch := next(iterator, end)) is not end:
                tape.note("input", began)
                yield batch
                began = tape.now()
            tape.note("input", began)

        return dataclasses.replace(batches, epoch=epoch)

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        def make_timed(model):
            made = make(model)
            return (
                (made[0], _TimedSchedule(made[1], _tape(run)))
                if isinstance(made, tuple) and made[1] is not None
                else made
            )

        return make_timed

    def batch_transform(self, to_device: BatchFn, run: RunContext) -> BatchFn:
        return _tape(run).timed("copy", to_device)

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        return _tape(run).timed("forward", forward)

    def backward(self, backward: BackwardFn, run: RunContext) -> BackwardFn:
        return _tape(run).timed("backward", backward)

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        return _tape(run).timed("forward_backward", forward_backward)

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        return _tape(run).timed("grad_transform", grad_transform)

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        return _tape(run).timed("optimizer_step", optimizer_step)

    def zero_grad(self, zero_grad: StepFn, run: RunContext) -> StepFn:
        return _tape(run).timed("optimizer_step", zero_grad)


class _TimedSchedule:
    """A schedule whose steps count as part of the update."""

    def __init__(self, schedule, tape: PhaseTimer):
        self.schedule, self.step = schedule, tape.timed("optimizer_step", schedule.step)

    def __getattr__(self, name: str):
        return getattr(self.schedule, name)


def _tape(run) -> PhaseTimer:
    return run.checkpoint_state["timeline"]


def _forward_and_backward(seconds: Counter[str]) -> dict[str, float]:
    """``micro`` holds both halves: divided as they were seen inside it, or by their usual proportion."""
    whole = seconds.pop("forward_backward", 0.0)
    halves = (seconds["forward"], seconds["backward"]) if seconds["forward"] else (1.0, BACKWARD_OVER_FORWARD)
    names = ("input", "copy", "forward", "backward", "grad_transform", "optimizer_step")
    divided = {name: whole * half / sum(halves) for name, half in zip(("forward", "backward"), halves, strict=True)}
    return {name: divided.get(name, seconds[name]) for name in names}
