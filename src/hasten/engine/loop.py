"""The training loop. It calls plain functions; no method, observer or log is consulted.

``train_steps`` is a generator, so that its caller (a run, a timed block, a test) decides what happens between two
steps.
"""

from collections.abc import Generator

import torch

from hasten.engine.error_messages import empty_data_error
from hasten.engine.plan import Program
from hasten.utils.batch import batch_size


def train_steps(program: Program) -> Generator[torch.Tensor]:
    """Trains to the end of the plan; yields each step's loss, a scalar on the device. RunError if an epoch is empty."""
    while not is_finished(program):
        before = program.run.progress.step
        yield from train_epoch(program)
        if program.run.progress.step == before:
            raise empty_data_error(program.run.progress.epoch)


def is_finished(program: Program) -> bool:
    """Whether the run has reached the epochs, or the optimizer steps, of its plan."""
    progress, plan = program.run.progress, program.plan
    return progress.epoch >= plan.epochs or (plan.steps is not None and progress.step >= plan.steps)


def train_epoch(program: Program) -> Generator[torch.Tensor]:
    """Trains to the end of the current epoch (or of the plan); yields the loss of each step, as ``train_steps``."""
    progress, plan = program.run.progress, program.plan
    schedule = program.schedule if plan.schedule_interval == "step" else None
    to_device, forward_backward, grad_transform = program.to_device, program.forward_backward, program.grad_transform
    optimizer_step, zero_grad = program.optimizer_step, program.zero_grad
    last_step = plan.steps if plan.steps is not None else float("inf")
    for batch in program.train.epoch(progress.epoch, progress.batch):
        batch = to_device(batch)
        loss = None  # frees the previous step's graph now; freed before that step's update, it costs 10 microseconds
        loss = forward_backward(batch)
        grad_transform()
        optimizer_step()
        zero_grad()
        if schedule is not None:
            schedule.step()
        progress.step += 1
        progress.batch += 1
        progress.samples += progress.global_batch_size or batch_size(batch)
        yield loss.detach()
        if progress.step >= last_step:
            return
    progress.epoch += 1
    progress.batch = 0
    if program.schedule is not None and plan.schedule_interval == "epoch":
        program.schedule.step()
