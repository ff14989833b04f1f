"""Times every phase of the real step, with a method whose hooks are the outermost wrappers and change nothing.

On the CPU a timestamp is the clock. On a GPU it is a CUDA event in the stream, so that nothing is synchronized: the
time between two events passed on the device, including its idle time while the host was late.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.data import BatchSource
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import Batch, OptimizerFactory
from hasten.engine.registry import method_names
from hasten.utils.optimizers import optimizer_and_schedule
from hasten.utils.phase_timer import PhaseTimer


def _timed(phase: str) -> Callable[..., Callable[..., Any]]:
    """A hook of a method, which wraps its function so that each call is timed under ``phase``."""
    return lambda method, function, run: _timer(run).timed(phase, function)


class TimePhases(Method):
    """Times the phases of a run; its PhaseTimer is ``run.checkpoint_state["phase_timer"]``."""

    card = Card(
        summary="times every phase of the step",
        exactness=Exactness.BIT_EXACT,
        order=WrapOrder.LAST,
        after=tuple(method_names()),  # outermost: what another method adds to a phase belongs to that phase
    )

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        """Times the wait for each training batch."""
        if not batches.training:
            return batches
        timer = run.checkpoint_state["phase_timer"] = PhaseTimer(run.device)

        def epoch(index: int, start: int) -> Iterator[Batch]:
            began, end = timer.now(), object()
            iterator = iter(batches.epoch(index, start))
            while (batch := next(iterator, end)) is not end:
                timer.record("input", began)
                yield batch
                began = timer.now()
            timer.record("input", began)

        return dataclasses.replace(batches, epoch=epoch)

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        """Times the learning-rate schedule, as part of the optimizer step."""

        def make_timed(model: torch.nn.Module) -> Any:
            optimizer, schedule = optimizer_and_schedule(make(model))
            if schedule is not None:
                schedule.step = _timer(run).timed("optimizer_step", schedule.step)
            return optimizer, schedule

        return make_timed

    batch_transform = _timed("copy")
    forward = _timed("forward")
    backward = _timed("backward")
    forward_backward = _timed("forward_backward")
    grad_transform = _timed("grad_transform")
    optimizer_step = zero_grad = _timed("optimizer_step")


def _timer(run: RunContext) -> PhaseTimer:
    return run.checkpoint_state["phase_timer"]
