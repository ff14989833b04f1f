"""Parts of effect checks that several methods share; see ``RunContext.observe_effect``."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator
from typing import Any

import torch

from hasten._torch_compat_compile import is_compiled
from hasten.core.errors import NoEffectError
from hasten.core.run_context import RunContext
from hasten.utils.op_recorder import CONVERSION, NOT_CHECKED, OpRecorder


def observe_precision(run: RunContext, dtype: torch.dtype) -> Generator[None, None, str]:
    """Effect check of a method that computes in a lower precision: the share of FLOPs that ran in it.

    Raises:
        NoEffectError: Nothing but conversions ran in ``dtype``, although the step has matrix products or convolutions,
            or an uncompiled step on a CPU has none of these.
    """
    with OpRecorder() as recorder:
        yield
    name = str(dtype).removeprefix("torch.")
    ops = recorder.ops.items()
    others = sum(stats.count for (op, kind), stats in ops if kind == dtype and not op.startswith(CONVERSION))
    if others and not recorder.flops(dtype):  # such as a recurrent layer, or kernels of a compiled graph
        return f"{others} operations ran in {name}; none of them is a matrix product or convolution of known FLOPs"
    if not recorder.flops():
        if run.device.type == "cpu" and not any(is_compiled(module) for module in run.model.modules()):
            raise NoEffectError("the step has no matrix product or convolution")
        return f"{NOT_CHECKED}: the step shows no matrix product or convolution, as in a CUDA graph"
    share = recorder.flops(dtype) / recorder.flops()
    if not share:
        raise NoEffectError(f"no matrix product or convolution ran in {name}")
    return f"{share:.0%} of the FLOPs of matrix products and convolutions ran in {name}"


def observe_gradients(
    run: RunContext, changed: list[torch.nn.Parameter], inspect: Callable[[list[torch.Tensor], int], str]
) -> Generator[None, None, str]:
    """Effect check of a method that changes gradients, as the optimizer sees them.

    Args:
        run: The run.
        changed: Parameters whose gradients the method changes; the optimizer may have others, such as the loss's.
        inspect: ``(their dense gradients, number of all gradients) -> evidence``, called just before the update; raises
            NoEffectError.
    """
    seen: list[str | Exception] = []
    known = set(changed)

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        try:
            sharded = any(type(parameter.grad) is not torch.Tensor for parameter in parameters)
            gradients = [p.grad for p in parameters if p in known and p.grad is not None and not p.grad.is_sparse]
            seen.append(f"{NOT_CHECKED}: the gradients are sharded" if sharded else inspect(gradients, len(parameters)))
        except Exception as error:  # raised here, it would end the training
            seen.append(error)

    try:
        handle = run.optimizer.register_step_pre_hook(look)
    except AttributeError:  # a class of its own, or one that has not called the constructor of torch.optim.Optimizer
        yield
        return f"{NOT_CHECKED}: a {type(run.optimizer).__name__} is no torch optimizer"
    try:
        yield
    finally:
        handle.remove()
    if not seen:
        return f"{NOT_CHECKED}: the optimizer did not update the parameters in this step"
    result = seen.pop()  # a list with an error would form a reference cycle with its traceback
    if isinstance(result, Exception):
        try:
            raise result
        finally:
            del result
    return result


def observe_workers(count: int) -> Generator[None, None, str]:
    """Effect check of a method that starts ``count`` worker processes: some are alive before or after the step.

    Fewer than ``count`` are no failure: an epoch of few batches needs fewer, and workers end when they have read all.

    Raises:
        NoEffectError: None is alive.
    """
    before = len(multiprocessing.active_children())
    yield
    alive = min(count, max(before, len(multiprocessing.active_children())))
    if not count:
        return "the batches are read without worker processes"
    if not alive:
        raise NoEffectError(f"no worker process is alive, expected {count}")
    return f"{alive} worker process{'es are' if alive > 1 else ' is'} alive" + f", of {count}" * (alive < count)


def observe_collectives(*names: str) -> Generator[None, None, str]:
    """Effect check of a method that communicates: the step calls one of some collectives.

    Args:
        names: Beginnings of the names of c10d operations, such as "allreduce_".

    Raises:
        NoEffectError: The step called none of them.
    """
    with OpRecorder() as recorder:
        yield
    calls = {name: recorder.count(name) for name in names}
    if not any(calls.values()):
        raise NoEffectError(f"the step called no {' or '.join(name.strip('_') for name in names)}")
    return ", ".join(f"{count} x {name.strip('_')}" for name, count in calls.items() if count) + " in the observed step"


def observe_seldom_communication(period: int) -> Generator[None, None, str]:
    """Effect check of a method with which ranks communicate every ``period`` steps only: counts the all-reduces of the
    observed step, and never fails.
    """
    with OpRecorder() as recorder:
        yield
    calls = recorder.count("allreduce_")
    exchanged = f"the observed step called {calls} x allreduce" if calls else "the observed step called no allreduce"
    return f"{exchanged}; the ranks average their weights every {period} steps"
