"""Builds a run: asks every method once, hook by hook, and returns a Program of plain functions.

No method object is consulted after ``build``.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch

from hasten.core.data import BatchSource
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, hooks_of
from hasten.core.process_group_info import SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.run_context import EngineServices, ParallelContext, RunContext, TrainPlan
from hasten.core.task import Task
from hasten.core.types import BackwardFn, Batch, BatchFn, ContextFactory, ForwardFn, StepFn
from hasten.distributed.batch_sharding import (
    EvaluationShards,
    ShardLog,
    check_replica_inputs,
    share_evaluation,
    with_loss_weights,
)
from hasten.distributed.collectives import has_local_batch_norm
from hasten.distributed.deferred_init import deferred_init
from hasten.engine import data_adapters
from hasten.engine.composition import applicable_methods, check_fits_task, fold_hook
from hasten.engine.effects import EffectObserver
from hasten.engine.forward import accumulate_gradients, loss_type_error, make_forward, own_loss
from hasten.engine.metrics import MetricAccumulator, higher_is_better
from hasten.engine.optimizer import build_optimizer, with_clipping
from hasten.engine.own_step import OwnStep
from hasten.engine.resources import available_cpus, free_memory
from hasten.utils.batch import copy_to_device
from hasten.utils.optimizers import OptimizerList
from hasten.utils.rng import derive_seed, preserve_rng_state, set_seeds

Fold = Callable[[str, Any], Any]  # (hook, thing) -> the thing, wrapped by every method that overrides the hook
_made: WeakSet[torch.nn.Module] = WeakSet()  # what Task(model=) returned in this process, while it lives
_states: WeakKeyDictionary[torch.nn.Module, dict[str, Any]] = WeakKeyDictionary()  # of losses, before their first run


@dataclass(frozen=True)
class Program:
    """A run, ready to train. Everything happens inside ``process_context()``; the training loop calls the functions."""

    task: Task  # the user's, with loaded data; defines the metric even if a method changed ``run.task``
    run: RunContext  # the context that the methods were built with
    plan: TrainPlan  # how long the run trains
    process_context: ContextFactory  # global state of the process, such as thread counts
    train: BatchSource  # the training batches of this rank
    source: BatchSource  # the same, without the communication between ranks before each step
    validation: BatchSource | None
    evaluation_shards: EvaluationShards | None  # how the ranks share the validation batches; None: they do not
    to_device: BatchFn  # copies a batch to the device and transforms it
    forward: ForwardFn
    forward_backward: ForwardFn  # over all microbatches
    grad_transform: StepFn  # between backward and optimizer step
    optimizer_step: StepFn
    zero_grad: StepFn
    schedule: Any  # the learning-rate schedule, stepped when ``plan.schedule_interval`` says; or None
    export: Callable[[], torch.nn.Module]  # the model that is evaluated and saved
    effects: EffectObserver  # observes the effect of each method in one step


def build(
    task: Task,
    methods: Sequence[Method] = (),
    *,
    device: str = "cpu",
    seed: int = 0,
    ranks: ProcessGroupInfo = SINGLE_PROCESS,
    trains: bool = True,
) -> Program:
    """The program of a task under a set of methods on a device of this process; ConfigurationError if they conflict, or
    if the model is that of an earlier program, unless this one never ``trains``.
    """
    parallel = None if ranks.is_single_process else ParallelContext(ranks)
    services = EngineServices(partial(higher_is_better, task), available_cpus, free_memory)
    run = RunContext(torch.device(device), task, seed=seed, parallel=parallel, services=services)
    methods = applicable_methods(methods, run)
    check_fits_task(methods, run)
    fold = partial(fold_hook, methods, run)
    on_gpu = run.device.type == "cuda"
    for method in methods:
        method.setup(run)
    process_context = fold("process_context", partial(torch.cuda.device, run.device) if on_gpu else nullcontext)
    with process_context():
        set_seeds(seed)
        task = data_adapters.load_data(task)
        plan = run.plan = fold("plan", data_adapters.initial_plan(task))
        log = ShardLog()
        source, validation, shards = _build_data(task, methods, run, log)
        run.unwrapped_model = _build_model(task, fold, run, trains)
        _prepare_loss(task, run)
        log.smallest = _smallest_shard(run)
        if has_local_batch_norm(run.unwrapped_model, torch.nn.BatchNorm1d):
            data_adapters.check_last_batch(task, plan, source.length, _data_ranks(run), log.smallest)
        model = run.model = fold("parallelize", run.unwrapped_model)
        run.optimizer, schedule = build_optimizer(task, fold, run)
        own_step = OwnStep(run) if task.step is not None else None
        to_device = fold("batch_transform", partial(copy_to_device, device=run.device) if on_gpu else _identity)
        forward = fold("forward", _build_forward(task, fold, run, own_step))
        forward_backward = _build_forward_backward(forward, fold, run)
        # else the run and its batches would form a reference cycle that keeps worker processes alive
        run.services.peek_batch = None  # pyright: ignore[reportAttributeAccessIssue]  # only while building
        _seed_model_randomness(run, source)
        grad_transform = with_clipping(fold("grad_transform", _nothing), task.clip_grad_norm, run)
        update = grad_transform, fold("optimizer_step", run.optimizer.step), fold("zero_grad", run.optimizer.zero_grad)
        if isinstance(run.optimizer, OptimizerList) and own_step is not None:
            forward_backward, update = own_step.update_each(forward_backward, *update), (_nothing,) * 3
        grad_transform, optimizer_step, zero_grad = update
        return Program(
            task=task,
            run=run,
            plan=plan,
            process_context=process_context,
            train=_shard_batches(source, methods, run, log),
            source=source,
            validation=validation,
            evaluation_shards=shards,
            to_device=to_device,
            forward=forward,
            forward_backward=forward_backward,
            grad_transform=grad_transform,
            optimizer_step=optimizer_step,
            zero_grad=zero_grad,
            schedule=schedule,
            export=lambda: fold("export", model),
            effects=EffectObserver(run, methods),
        )


def _build_data(
    task: Task, methods: Sequence[Method], run: RunContext, log: ShardLog
) -> tuple[BatchSource, BatchSource | None, EvaluationShards | None]:
    """(training, validation, shards of validation). Sets ``run.plan.steps`` from their length, and ``peek_batch``."""
    plan, pp_size = run.plan, run.parallel.pp_size if run.parallel else 1
    train = data_adapters.training(task, plan.batch_size, run.seed, _data_ranks(run), log, pp_size)
    in_worker = any("workers" in method.card.applies_to for method in methods)
    data_adapters.check_same_samples(train, run.ranks, in_worker)
    task_batch_size = data_adapters.initial_plan(task).batch_size  # of the validation, whatever a method changes
    validation, shards = data_adapters.validation(task, task_batch_size, run.seed), None
    own_evaluation = task.evaluate is not None  # it reads all batches
    adds_up = not run.ranks.is_single_process and not own_evaluation and MetricAccumulator(task).adds_up
    if validation is not None and adds_up and not _replicas_differ(methods):
        possible = EvaluationShards(run.ranks)
        if (shared := share_evaluation(validation, possible)) is not None:
            validation, shards = shared, possible
    with preserve_rng_state():  # a method may read samples to inspect them
        for method in methods:
            if "data" in hooks_of(method):
                train = data_adapters.apply_data_hook(method, train, run)
                if validation is not None:
                    validation = data_adapters.apply_data_hook(method, validation, run)
    if plan.steps is None and train.length is not None:
        plan.steps = max(1, round(plan.epochs * train.length))
    run.services.peek_batch = lambda: copy_to_device(data_adapters.first_batch(train, validation), run.device)
    return train, validation, shards


def _build_model(task: Task, fold: Fold, run: RunContext, trains: bool) -> torch.nn.Module:
    """The model after the ``model`` hooks, on ``init_device`` of the ParallelContext: run's device, CPU or meta."""

    def make() -> torch.nn.Module:
        model: Any = task.model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(f"Task(model=) must return an nn.Module; it returned a {type(model).__name__}")
        if trains and model in _made:
            what = "Task(model=) returned the same object again, which an earlier run or measurement may have trained"
            advice = "make it in that function, or return a copy of one that was never trained"
            raise ConfigurationError(f"{what}; {advice}")
        _made.add(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigurationError("the model has no parameters to train")
        return fold("model", model)

    if run.parallel and run.parallel.init_device == "meta":
        model, run.parallel.materialize = deferred_init(make)
        return model
    return make() if run.parallel and run.parallel.init_device == "cpu" else make().to(run.device)


def _prepare_loss(task: Task, run: RunContext) -> None:
    """Moves a loss that is a module to the device: it may hold class weights. Its state is that before its first run
    in this process, and part of checkpoints.
    """
    if isinstance(task.loss, torch.nn.Module):
        task.loss.to(run.device)  # in place: the optimizer may have its parameters
        if state := task.loss.state_dict():
            task.loss.load_state_dict(_states.setdefault(task.loss, copy.deepcopy(state)))
            run.checkpoint_state["loss"] = task.loss


def _build_forward(task: Task, fold: Fold, run: RunContext, own_step: OwnStep | None) -> ForwardFn:
    """``(batch) -> loss``: the step of the task, else model and loss; before the ``forward`` hooks."""
    if own_step is None:
        return make_forward(run.model, fold("loss", task.loss or own_loss), own=task.loss is None)
    return own_step.next_loss if isinstance(run.optimizer, OptimizerList) else own_step.forward


def _build_forward_backward(forward: ForwardFn, fold: Fold, run: RunContext) -> ForwardFn:
    """``(batch) -> loss``: forward and backward of a batch, in ``plan.microbatches``, through the methods' hooks."""
    progress, microbatches = run.progress, run.plan.microbatches

    def weighted_backward(loss: torch.Tensor) -> None:
        weighted: Any = loss * (progress.microbatch_fraction * progress.loss_weight)
        weighted.backward()

    plain = cast(BackwardFn, torch.Tensor.backward)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    unweighted = run.parallel is None and microbatches == 1
    backward: BackwardFn = fold("backward", plain if unweighted else weighted_backward)

    def forward_backward(batch: Batch) -> torch.Tensor:
        loss: Any = forward(batch)
        if not isinstance(loss, torch.Tensor):
            raise loss_type_error(loss)
        backward(loss)
        return loss

    wrapped = fold("forward_backward", forward_backward)
    if microbatches == 1:
        return wrapped
    return accumulate_gradients(wrapped, microbatches, progress, _data_ranks(run).world_size)


def _seed_model_randomness(run: RunContext, train: BatchSource) -> None:
    """Seeds ranks of different samples differently (dropout), unless the sample order comes from that generator."""
    if run.parallel is None:
        return
    index = run.ranks.rank // run.parallel.tp_size
    if index and train.seekable:
        set_seeds(derive_seed(run.seed, index))
    elif index and run.device.type == "cuda":  # a batch source draws on the CPU only
        torch.cuda.manual_seed(derive_seed(run.seed, index))


def _shard_batches(source: BatchSource, methods: Sequence[Method], run: RunContext, log: ShardLog) -> BatchSource:
    """The batches, whose sizes and fingerprints the ranks compare; sets this rank's loss weight for each step."""
    differ = _replicas_differ(methods)
    weighted = with_loss_weights(source, _data_ranks(run), run.plan, run.progress, log, differ)
    return check_replica_inputs(weighted, run.ranks, run.parallel.model_parallel_size if run.parallel else 1)


def _smallest_shard(run: RunContext) -> int:
    """Samples that a shard must have: batch normalization of one vector fails. 1 if all batches are as small."""
    if not run.plan.is_batch_size_known:  # all may be as small, and the pixels of one image suffice for BatchNorm2d
        return 2 if has_local_batch_norm(run.unwrapped_model, torch.nn.BatchNorm1d) else 1
    is_small = run.plan.batch_size < 2 * _data_ranks(run).world_size
    return 2 if has_local_batch_norm(run.unwrapped_model) and not is_small else 1


def _replicas_differ(methods: Sequence[Method]) -> bool:
    """Whether ranks may hold different weights between two steps."""
    return any("replicated_weights" in method.card.invalidates for method in methods)


def _data_ranks(run: RunContext) -> ProcessGroupInfo:
    """The process group counted in model replicas: the ranks of one replica read the same samples."""
    return run.ranks.data_parallel_view(run.parallel.model_parallel_size) if run.parallel else run.ranks


def _nothing() -> None:
    pass


def _identity(batch: Batch) -> Batch:
    return batch
