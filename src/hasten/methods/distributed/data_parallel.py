"""Threads of one process split each batch over the GPUs of a machine: torch's DataParallel, for comparison with
``ddp``.

Every step copies the model to all GPUs and gathers the outputs on the first one, while a single interpreter drives all
of them; torch itself advises against it (https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
Its advantage is that it needs no second process.
"""

import warnings
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from hasten import Card, ConfigurationError, Exactness, HastenWarning, Method, NoEffectError, RunContext, WrapOrder
from hasten.distributed.collectives import warn_local_batch_norm

WARNING = "data_parallel copies the model to every GPU in every step; ddp (--processes N) is nearly always faster"


@dataclass(frozen=True)
class DataParallel(Method):
    """Wraps the model in ``torch.nn.DataParallel``."""

    card = Card(
        summary="splits each batch over the GPUs of one process, with threads",
        exactness=Exactness.EQUIVALENT_MATH,
        source="torch.nn.DataParallel",
        gain_when="there are several GPUs and several processes cannot be started",
        accelerates={"forward", "backward"},
        applies_to={"cuda", "several_gpus"},
        not_searched="it takes all GPUs of the machine, also those that the run was not given; ask for it by name",
        requires={"monolithic_forward"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
    )

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if run.parallel is not None:
            raise ConfigurationError("data_parallel is for a single process; use ddp with several")
        if run.device.type != "cuda":
            return run.report_no_effect(self, f"it is for GPUs; this run is on {run.device}", model)
        if torch.cuda.device_count() < 2:
            return run.report_no_effect(self, "there is only one GPU", model)
        if run.task.loss is None:
            raise ConfigurationError(
                "data_parallel gathers outputs, not losses that the model computes itself; pass Task(loss=) or use ddp"
            )
        warnings.warn(WARNING, HastenWarning, stacklevel=2)
        warn_local_batch_norm(model, part="each GPU's part of a batch")
        first = run.device.index if "cuda:" in str(run.device) else torch.cuda.current_device()
        others = [index for index in range(torch.cuda.device_count()) if index != first]
        wrapped = torch.nn.DataParallel(model, device_ids=[first, *others])
        run.observe_effect(self, partial(_observe, wrapped))
        return wrapped

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return cast(Any, model).module if isinstance(model, torch.nn.DataParallel) else model


def _observe(model: torch.nn.DataParallel[torch.nn.Module]) -> Generator[None, None, str]:
    """Effect check: the copies of the model, which share its hooks, are called on several GPUs."""
    devices: set[int] = set()

    def note(*_: Any) -> None:
        devices.add(torch.cuda.current_device())

    handle = model.module.register_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    if len(devices) < 2:
        raise NoEffectError(f"the step called the model on {len(devices)} GPU")
    return f"the batch was split over {len(devices)} GPUs"
