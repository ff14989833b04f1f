"""The loop. It knows functions, not methods.

``steps`` is the training loop as a generator, so that whoever drives it (a run, a timed block, a test)
decides what happens between two steps. Nothing inside is consulted, logged or synchronised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from hasten.core.errors import RunError
from hasten.engine.forward import call_model, own_loss
from hasten.engine.metrics import EvaluationResult, MetricAccumulator
from hasten.engine.plan import Program
from hasten.utils.batch import batch_size, map_tensors
from hasten.utils.rng import preserve_rng_state


def train_steps(program: Program) -> Iterator[torch.Tensor]:
    """Trains from the current progress to the end of the plan; yields each step's loss: a number, but still on the device."""
    while not is_finished(program):
        before = program.run.progress.step
        yield from train_epoch(program)
        if program.run.progress.step == before:
            raise empty_data_error(program.run.progress.epoch)


def empty_data_error(number: int) -> RunError:
    """What there is to say about a pass, counted from 1, over data that gave nothing."""
    if number == 1:
        return RunError(
            "the training data gave no batch: they are empty, or a generator that was read before; give a dataset or a function"
        )
    return RunError(
        f"the training data gave no batch in pass {number}; a generator can be read only once, give a dataset or a function"
    )


def is_finished(program: Program) -> bool:
    """Whether the plan has been carried out."""
    progress, plan = program.run.progress, program.plan
    return progress.epoch >= plan.epochs or (plan.steps is not None and progress.step >= plan.steps)


def train_epoch(program: Program) -> Iterator[torch.Tensor]:
    """As ``steps``, to the end of the current epoch."""
    progress, plan, schedule = program.run.progress, program.plan, program.schedule
    to_device, forward_backward, grad_transform = program.to_device, program.forward_backward, program.grad_transform
    optimizer_step, zero_grad = program.optimizer_step, program.zero_grad
    last_step = plan.steps if plan.steps is not None else float("inf")
    for batch in program.train.epoch(progress.epoch, progress.batch):
        batch = to_device(batch)
        loss = None  # the graph of the step before goes now: freed before its own update, it costs 10 microseconds
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


def evaluate(program: Program) -> EvaluationResult:
    """The metric over the validation data, by the exported model; leaves no trace on the run.

    All ranks have to ask at once. The first one measures and tells the others, unless the model computes only where all ranks do.

    Raises:
        Failure: a metric that is not a number.
    """
    model, ranks = program.export(), program.run.ranks
    measured = _measured(program, model) if ranks.is_main_process or _all_ranks_evaluate(program) else None
    return (
        measured
        if ranks.is_single_process
        else EvaluationResult(
            **json.loads(ranks.broadcast(json.dumps(vars(measured)).encode() if ranks.is_main_process else b""))
        )
    )


def _all_ranks_evaluate(program: Program) -> bool:
    parallel = program.run.parallel
    return parallel is not None and parallel.eval_needs_all_ranks


def _measured(program: Program, model: torch.nn.Module) -> EvaluationResult:
    task = program.task
    metric, own = MetricAccumulator(task), task.loss is None
    modes = [(module, module.training) for module in model.modules()]  # parts may be frozen in evaluation mode
    loss_of, device = own_loss if own else task.loss, program.run.device
    # a sharded model gathers weights, and trains on with them: not in inference mode
    without_gradients = torch.no_grad if _all_ranks_evaluate(program) else torch.inference_mode

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    model.eval()
    try:
        with preserve_rng_state(), without_gradients():
            for batch in program.validation.epoch(0, 0):
                batch = map_tensors(to_device, batch)  # not program.to_device: that one may augment
                output, target = call_model(model, batch, own)
                metric.update(output, target, loss_of(output, target), batch_size(batch))
        return metric.result()
    finally:
        for module, training in modes:
            module.training = training
