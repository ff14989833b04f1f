"""Threads of one process share every batch out among the GPUs of a machine: torch's DataParallel, for comparison with ``ddp``.

Every step copies the model to all GPUs and gathers the outputs on the first, while one interpreter drives them all; torch itself advises against it
(https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html). It needs no second process, and that is its use.
"""

import warnings
from dataclasses import dataclass

import torch

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.distributed.collectives import warn_local_batch_norm

WARNING = "data_parallel copies the model to every GPU in every step; ddp (--processes) does the same training with less, nearly always faster"


@dataclass(frozen=True)
class DataParallel(Method):
    card = Card(
        summary="the batch shared out among the GPUs of one process, by threads",
        exactness=Exactness.EQUIVALENT_MATH,
        source="torch.nn.DataParallel",
        gain_when="there are several GPUs and no way to start several processes",
        accelerates={"forward", "backward"},
        applies_to={"cuda"},
        requires={"monolithic_forward"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
    )

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if run.parallel is not None:
            raise ConfigurationError("data_parallel is for one process; with several take ddp")
        if why := _nothing(run):
            run.report_no_effect(self, why)
            return model
        if run.task.loss is None:
            raise ConfigurationError(
                "data_parallel gathers outputs, not the losses that models return themselves; give Task(loss=), or take ddp"
            )
        warnings.warn(WARNING, HastenWarning, stacklevel=2)
        warn_local_batch_norm(model, part="each GPU's part of a batch")
        return torch.nn.DataParallel(model, device_ids=[run.device, *_others(run.device)])

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return model if _nothing(run) else model.module


def _nothing(run: RunContext) -> str | None:
    """Why there is nothing to share a batch out among, if so."""
    if run.device.type != "cuda":
        return f"it is for GPUs; this run is on {run.device}"
    return None if torch.cuda.device_count() > 1 else "there is one GPU only"


def _others(device: torch.device) -> list[torch.device]:
    own = torch.cuda.current_device() if device.index is None else device.index
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count()) if number != own]
