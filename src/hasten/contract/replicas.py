"""Whole copies of a model, one a process, that are kept alike by averaging their gradients: what strategies have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from hasten.contract.errors import Notice
from hasten.contract.method import Clock


def notice_batch_norm(model: torch.nn.Module) -> None:
    """Says so where batch normalisation would see less than in one process."""
    norms = [part for part in model.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    if any(not isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms):
        told = "batch normalisation sees each process's part of a batch alone: not the same formula as in one; sync_batch_norm gives that"
        warnings.warn(told, Notice, stacklevel=3)


def make_alike(model: torch.nn.Module) -> None:
    """Gives every rank the first one's weights and buffers: a task may have drawn them from a generator that nobody seeds."""
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values():
            dist.broadcast(tensor, 0)


def talking_last(micro: Callable, clock: Clock, silence: Callable[[], AbstractContextManager]) -> Callable:
    """``micro``, whose gradients are exchanged after the last piece of a batch only."""

    def quiet_but_for_the_last(piece):
        if clock.last_piece:
            return micro(piece)
        with silence():
            return micro(piece)

    return quiet_but_for_the_last
