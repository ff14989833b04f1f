"""Tensors that are shared out among ranks (DTensor), and the same tensors whole: what a checkpoint keeps, so that any strategy can go on from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # a torch that was built without torch.distributed
    DTensor = ()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: all of one that is not shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(state, keep: bool = True):
    """A state of any nesting with its tensors whole. All ranks have to ask at once; one that does not ``keep`` them gets None in their place."""
    if isinstance(state, DTensor):
        tensor = state.full_tensor()
        return tensor if keep else None
    if isinstance(state, Mapping):
        return {key: whole(value, keep) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole(value, keep) for value in state)
    return state


def shared_out_like(tensor, model: torch.Tensor):
    """A whole tensor, which all ranks have, shared out as ``model`` is; whatever is not of its shape is left alone."""
    if not isinstance(model, DTensor) or not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor) or tensor.shape != model.shape:
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)
