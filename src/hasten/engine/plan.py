"""Builds a run: folds every hook of every method once, stage by stage.

The result is a Program of plain functions. No method object is consulted after this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, hooks_of
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.run_context import EngineServices, ParallelContext, RunContext, TrainPlan
from hasten.core.task import Task, optimizer_and_schedule, takes_steps
from hasten.core.types import BackwardFn, Batch, BatchFn, ContextFactory, ForwardFn, OptimizerFactory, StepFn
from hasten.distributed.batch_sharding import ShardLog, check_replica_inputs, with_loss_weights
from hasten.distributed.deferred_init import deferred_init
from hasten.engine import data_adapters
from hasten.engine.composition import applicable_methods
from hasten.engine.forward import accumulate_gradients, forward_of, own_loss, refuse_loss
from hasten.engine.metrics import higher_is_better
from hasten.engine.resources import available_cpus, free_memory
from hasten.utils import batch as batches
from hasten.utils.rng import derive_seed, preserve_rng_state, set_seeds


@dataclass(frozen=True)
class Program:
    """A run, ready to train. Everything happens inside ``process_context()``; the training loop calls the rest.

    Attributes:
        task: the task as it was given, with opened data: what judges the run, whatever a method did to ``run.task``.
        run: what the methods were built with.
        plan: how long the run trains.
        process_context: global state of the process: thread counts, allocator.
        train: the training batches of this rank.
        source: the same, without the communication between ranks before each step.
        validation: the validation batches.
        to_device: ``(batch) -> batch``: copies a batch to the device and transforms it.
        forward: ``(batch) -> loss``.
        forward_backward: ``(batch) -> loss``: both passes over all microbatches.
        grad_transform, optimizer_step, zero_grad: ``() -> None``: what follows in a step.
        schedule: the learning-rate schedule, which steps once a training step; or None.
        export: ``() -> module``: the model that is evaluated and saved.
    """

    task: Task
    run: RunContext
    plan: TrainPlan
    process_context: ContextFactory
    train: BatchSource
    source: BatchSource
    validation: BatchSource | None
    to_device: BatchFn
    forward: ForwardFn
    forward_backward: ForwardFn
    grad_transform: StepFn
    optimizer_step: StepFn
    zero_grad: StepFn
    schedule: Any
    export: Callable[[], torch.nn.Module]


def build(
    task: Task,
    methods: Sequence[Method] = (),
    *,
    device: str = "cpu",
    seed: int = 0,
    ranks: ProcessGroupInfo = SINGLE_PROCESS,
) -> Program:
    """Builds the program of a task under a set of methods. The order in which the methods are given never matters.

    Raises:
        Refusal: methods that conflict, or a task whose parts do not fit together.
    """
    parallel = None if ranks.is_single_process else ParallelContext(ranks)
    services = EngineServices(partial(higher_is_better, task), available_cpus, free_memory)
    run = RunContext(torch.device(device), task, seed=seed, parallel=parallel, services=services)
    methods = applicable_methods(methods, run)
    fold = partial(_fold, methods, run)

    for method in methods:
        method.setup(run)
    process_context = fold("process_context", _device_context(run.device))
    with process_context():
        set_seeds(seed)
        task = data_adapters.load_data(task)
        plan = run.plan = fold("plan", data_adapters.initial_plan(task))
        log = ShardLog()
        source, validation = _build_data(task, methods, run, log)
        run.unwrapped_model = _build_model(task, fold, run)
        model = run.model = fold("parallelize", run.unwrapped_model)
        run.optimizer, schedule = _build_optimizer(task, fold, run)
        to_device = fold(
            "batch_transform", _identity if run.device.type == "cpu" else partial(_copy_to_device, run.device)
        )
        forward = fold("forward", forward_of(model, fold("loss", task.loss or own_loss), own=task.loss is None))
        forward_backward = _build_forward_backward(forward, fold, run)
        run.services.peek_batch = (
            None  # or the run and its batches would form a reference cycle that keeps worker processes alive
        )
        _seed_model_randomness(run, source)
        return Program(
            task=task,
            run=run,
            plan=plan,
            process_context=process_context,
            train=_shard_batches(source, methods, run, log),
            source=source,
            validation=validation,
            to_device=to_device,
            forward=forward,
            forward_backward=forward_backward,
            grad_transform=fold("grad_transform", _nothing),
            optimizer_step=fold("optimizer_step", run.optimizer.step),
            zero_grad=fold("zero_grad", run.optimizer.zero_grad),
            schedule=schedule,
            export=lambda: fold("export", model),
        )


def _fold(methods: Sequence[Method], run: RunContext, hook: str, thing: Any) -> Any:
    """Wraps ``thing`` by every method that overrides the hook; a replacement goes innermost."""
    for method in sorted(methods, key=lambda m: hook not in m.card.replaces):
        if hook in hooks_of(method):
            thing = getattr(method, hook)(thing, run)
    return thing


def _device_context(device: torch.device) -> ContextFactory:
    return partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext


def _build_data(
    task: Task, methods: Sequence[Method], run: RunContext, log: ShardLog
) -> tuple[BatchSource, BatchSource | None]:
    """(training, validation) batches. Completes the plan's number of steps, and lets methods look at a batch from here on."""
    plan, pp_size = run.plan, run.parallel.pp_size if run.parallel else 1
    train = data_adapters.training(task, plan.batch_size, run.seed, _readers(run), log, pp_size)
    validation = data_adapters.validation(
        task, data_adapters.initial_plan(task).batch_size, run.seed
    )  # in the task's own batch size, always
    with preserve_rng_state():  # a method may read samples to inspect them
        for method in methods:
            if "data" in hooks_of(method):
                train, validation = (
                    each if each is None else data_adapters.apply_data_hook(method, each, run)
                    for each in (train, validation)
                )
    if plan.steps is None and train.length is not None:
        plan.steps = max(1, round(plan.epochs * train.length))
    run.services.peek_batch = lambda: _copy_to_device(run.device, data_adapters.first_batch(train, validation))
    return train, validation


def _build_model(task: Task, fold: Callable, run: RunContext) -> torch.nn.Module:
    """The model where the ``parallelize`` hooks want to receive it: on the device, in host memory, or on the meta device."""
    make = partial(_make_model, task, partial(fold, "model"))
    init_device = run.parallel.init_device if run.parallel else "device"
    if init_device == "meta":
        model, run.parallel.materialize = deferred_init(make)
        return model
    return make().to(run.device) if init_device == "device" else make()


def _make_model(task: Task, surgery: Callable) -> torch.nn.Module:
    model = task.model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"Task(model=) must return an nn.Module; it returned a {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError("the model has no parameters to train")
    return surgery(model)


def _build_optimizer(task: Task, fold: Callable, run: RunContext) -> tuple[torch.optim.Optimizer, Any]:
    """(optimizer, schedule or None)."""
    make = fold("optimizer", _with_steps(task.optimizer, run.plan.steps))
    optimizer, schedule = optimizer_and_schedule(make(run.unwrapped_model))
    if not (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad") and hasattr(optimizer, "param_groups")):
        raise ConfigurationError(
            f"Task(optimizer=) must return a torch optimizer, or (optimizer, schedule); it returned a {type(optimizer).__name__}"
        )
    if schedule is not None and not hasattr(schedule, "step"):
        raise ConfigurationError(
            f"Task(optimizer=) may return (optimizer, schedule); it returned a {type(schedule).__name__} as the schedule"
        )
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau waits for a metric, but a schedule steps after every optimizer step; choose one that counts steps"
        )
    return optimizer, schedule


def _with_steps(make_optimizer: Callable, steps: int | None) -> OptimizerFactory:
    """``(model) -> optimizer``, whichever of its two forms the task gave."""
    if not takes_steps(make_optimizer):
        return make_optimizer
    if steps is None:
        raise ConfigurationError(
            "the optimizer's schedule needs the number of steps, but the training data has no length; give the dataset a __len__"
        )
    return lambda model: make_optimizer(model, steps)


def _build_forward_backward(forward: ForwardFn, fold: Callable, run: RunContext) -> ForwardFn:
    """Forward and backward pass of a whole batch."""
    progress, microbatches = run.progress, run.plan.microbatches

    def weighted_backward(loss: torch.Tensor) -> None:
        (loss * (progress.microbatch_fraction * progress.loss_weight)).backward()

    plain: BackwardFn = torch.Tensor.backward if run.parallel is None and microbatches == 1 else weighted_backward
    backward = fold("backward", plain)

    def forward_backward(batch: Batch) -> torch.Tensor:
        loss = forward(batch)
        if not isinstance(loss, torch.Tensor):
            refuse_loss(loss)
        backward(loss)
        return loss

    wrapped = fold("forward_backward", forward_backward)
    return (
        wrapped
        if microbatches == 1
        else accumulate_gradients(wrapped, microbatches, progress, _readers(run).world_size)
    )


def _seed_model_randomness(run: RunContext, train: BatchSource) -> None:
    """Gives ranks that compute different samples different random numbers, where the source of batches does not draw from them."""
    if run.parallel is None:
        return
    index = run.ranks.rank // run.parallel.tp_size
    if index and train.seekable:
        set_seeds(derive_seed(run.seed, index))
    elif index and run.device.type == "cuda":  # a source draws on the host only
        torch.cuda.manual_seed(derive_seed(run.seed, index))


def _shard_batches(source: BatchSource, methods: Sequence[Method], run: RunContext, log: ShardLog) -> BatchSource:
    """The batches of this rank, with what the ranks tell each other about them before every step."""
    size = run.parallel.model_parallel_size if run.parallel else 1
    replicas_differ = any("replicated_weights" in method.card.invalidates for method in methods)
    return check_replica_inputs(
        with_loss_weights(source, _readers(run), run.plan, run.progress, log, replicas_differ), run.ranks, size
    )


def _readers(run: RunContext) -> ProcessGroupInfo:
    """The ranks that read different samples."""
    return run.ranks.data_parallel_view(run.parallel.model_parallel_size) if run.parallel else run.ranks


def _copy_to_device(device: torch.device, batch: Batch) -> Batch:
    return batches.map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def _identity(batch: Batch) -> Batch:
    return batch


def _nothing() -> None:
    pass
