"""Builds a run: orders the methods, refuses what cannot go together, folds every hook once.

What is left is a Program of plain functions. No method object is consulted after this.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch

from hasten.contract import batch as batches
from hasten.contract.data import Batches
from hasten.contract.errors import Refusal
from hasten.contract.method import Loop, Method, Run, hooks_of, needs_of
from hasten.contract.ranks import ALONE, Ranks
from hasten.contract.task import Task, optimizer_and_schedule, takes_steps
from hasten.contract.unmade import unmade
from hasten.engine import sources
from hasten.engine.budget import free_memory, usable_cores
from hasten.engine.forward import forward_of, own_loss, refuse_loss
from hasten.engine.metrics import higher_is_better
from hasten.engine.seeds import derived, set_seeds, undisturbed
from hasten.engine.sharing import Notes, same_in_a_copy, weighed


@dataclass(frozen=True)
class Program:
    """A run, ready to go. Call ``process()`` around everything; the loop calls the rest."""

    task: Task  # as it was given: what judges the run, whatever a method did to ``run.task``
    run: Run
    loop: Loop
    process: Callable[[], AbstractContextManager]
    train: Batches
    source: Batches  # the same, without what the ranks tell each other before every step
    validation: Batches | None
    move: Callable[[Any], Any]
    forward: Callable[[Any], torch.Tensor]
    micro: Callable[[Any], torch.Tensor]
    gradients: Callable[[], None]
    update: Callable[[], None]
    clear: Callable[[], None]
    schedule: Any
    export: Callable[[], torch.nn.Module]


def build(task: Task, methods: list[Method] = (), *, device: str = "cpu", seed: int = 0, ranks: Ranks = ALONE) -> Program:
    """The program of a task under a set of methods. The order in which the methods are given never matters.

    Raises:
        Refusal: methods that cannot go together, a task whose parts do not fit.
    """
    methods = in_order(methods)
    refuse_conflicts(methods)
    run = Run(
        torch.device(device), task, seed=seed, ranks=ranks,
        higher_is_better=partial(higher_is_better, task), cores=usable_cores, free_memory=free_memory,
    )  # fmt: skip

    def fold(hook: str, thing):
        for method in sorted(methods, key=lambda m: hook not in m.card.replaces):  # a replacement goes innermost
            if hook in hooks_of(method):
                thing = getattr(method, hook)(thing, run)
        return thing

    process = fold("process", partial(torch.cuda.device, run.device) if run.device.type == "cuda" else nullcontext)
    with process():
        set_seeds(seed)
        task = sources.opened(task)
        run.loop = loop = fold("loop", sources.plan_of(task))
        notes, readers = Notes(), ranks.readers(run.replica)
        train = sources.training(task, loop.batch_size, seed, readers, notes, run.stages)
        validation = sources.validation(task, sources.plan_of(task).batch_size, seed)  # judged in the task's own batches, always
        with undisturbed():  # a method may read samples to know them
            for method in methods:
                if "data" in hooks_of(method):
                    train, validation = (each if each is None else sources.rewrapped(method, each, run) for each in (train, validation))
        if loop.steps is None and train.length is not None:
            loop.steps = max(1, round(loop.epochs * train.length))

        to_device = partial(batches.map_tensors, lambda tensor: tensor.to(run.device, non_blocking=True))
        run.sample = lambda: to_device(sources.first_batch(train, validation))
        whole = partial(_whole_model, task, partial(fold, "model"))
        run.module, run.making = unmade(whole) if run.whereabouts == "nowhere" else (whole(), enumerate)
        if run.whereabouts == "device":
            run.module = run.module.to(run.device)
        model = run.model = fold("shard", run.module)
        make = fold("optimizer", _bound(task.optimizer, loop.steps))
        run.optimizer, schedule = optimizer_and_schedule(make(run.module))
        _check_optimizer(run.optimizer, schedule)

        move = fold("batch", _as_it_is if run.device.type == "cpu" else to_device)
        loss = fold("loss", task.loss or own_loss)
        forward = fold("forward", forward_of(model, loss, own=task.loss is None))
        clock, cut = run.clock, loop.microbatches > 1
        plain = torch.Tensor.backward if ranks.alone and not cut else lambda loss: (loss * (clock.share * clock.weight)).backward()
        backward = fold("backward", plain)

        def micro(batch):
            loss = forward(batch)
            if not isinstance(loss, torch.Tensor):
                refuse_loss(loss)
            backward(loss)
            return loss

        micro = fold("micro", micro)
        run.sample = None  # or the run and its batches would hold each other, and worker processes live on
        drawer = ranks.rank // run.shards
        if drawer and train.seekable:  # what the model draws differs by rank; sources that cannot be sought draw alike
            set_seeds(derived(seed, drawer))
        elif drawer and run.device.type == "cuda":  # where no source draws
            torch.cuda.manual_seed(derived(seed, drawer))
        apart = any("like weights" in method.card.breaks for method in methods)
        return Program(
            task=task,
            run=run,
            loop=loop,
            process=process,
            train=same_in_a_copy(weighed(train, readers, loop, run.clock, notes, apart), ranks, run.replica),
            source=train,
            validation=validation,
            move=move,
            forward=forward,
            micro=_accumulated(micro, loop.microbatches, clock, readers.world) if cut else micro,
            gradients=fold("gradients", _nothing),
            update=fold("update", run.optimizer.step),
            clear=fold("clear", run.optimizer.zero_grad),
            schedule=schedule,
            export=lambda: fold("export", model),
        )


def in_order(methods: list[Method]) -> list[Method]:
    """Sorted by (level, after, name): a stable topological order that ignores the order given."""
    named = {method.name: method for method in methods}
    waiting = {name: {other for other in method.card.after if other in named} for name, method in named.items()}
    ready = [(named[name].card.order, name) for name, before in waiting.items() if not before]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, done = heapq.heappop(ready)
        ordered.append(named[done])
        for name, before in waiting.items():
            if done in before:
                before.remove(done)
                if not before:
                    heapq.heappush(ready, (named[name].card.order, name))
    if len(ordered) < len(named):
        circle = sorted(name for name, before in waiting.items() if before)
        raise Refusal(f"{' and '.join(circle)} each want to come after the other; leave one of them out")
    return ordered


def refuse_conflicts(methods: list[Method]) -> None:
    """Conflicts are computed from the cards, never listed pair by pair."""
    for a, b in combinations(methods, 2):
        go_on = a.name in b.card.after or b.name in a.card.after  # one from what the other has made
        if not go_on and (both := a.card.replaces & b.card.replaces):
            raise Refusal(f"{a.name} and {b.name} both replace {', '.join(sorted(both))}; choose one of them")
        for one, other in ((a, b), (b, a)):
            if lost := needs_of(one) & other.card.breaks:
                raise Refusal(f"{one.name} needs {', '.join(sorted(lost))}, which {other.name} takes away; choose one of them")


def _accumulated(micro, count: int, clock, readers: int = 1):
    """Forward and backward on ``count`` pieces of the batch, each weighted by its share of the samples; all ranks have as many."""

    def micro_by_micro(batch):
        total, whole = batches.size(batch), 0.0
        fewest = total if clock.whole < readers else clock.whole // readers
        pieces = batches.pieces(batch, min(count, fewest))
        for number, piece in enumerate(pieces, 1):
            clock.share, clock.last_piece = batches.size(piece) / total, number == len(pieces)
            whole = whole + micro(piece).detach() * clock.share
        return whole

    return micro_by_micro


def _whole_model(task: Task, surgery: Callable) -> torch.nn.Module:
    model = task.model()
    if not isinstance(model, torch.nn.Module):
        raise Refusal(f"Task(model=) must return an nn.Module; it returned a {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Refusal("the model has no parameters to train")
    return surgery(model)


def _bound(make_optimizer: Callable, steps: int | None) -> Callable:
    """``(model) -> optimizer`` whichever of the two forms the task gave."""
    if not takes_steps(make_optimizer):
        return make_optimizer
    if steps is None:
        raise Refusal("the optimizer's schedule wants the number of steps, but the training data has no length; give the dataset a __len__")
    return lambda model: make_optimizer(model, steps)


def _check_optimizer(optimizer, schedule) -> None:
    if not (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad") and hasattr(optimizer, "param_groups")):
        raise Refusal(f"Task(optimizer=) must return a torch optimizer, or (optimizer, schedule); it returned a {type(optimizer).__name__}")
    if schedule is not None and not hasattr(schedule, "step"):
        raise Refusal(f"Task(optimizer=) may return (optimizer, schedule); it returned a {type(schedule).__name__} as the schedule")
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise Refusal("ReduceLROnPlateau waits for a metric, but a schedule steps after every optimizer step; choose one that counts steps")


def _as_it_is(batch):
    return batch


def _nothing() -> None:
    pass
