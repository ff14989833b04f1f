"""Tensors that are shared out among ranks (DTensor), and the same tensors whole: what a checkpoint keeps, so that any strategy can go on from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # a torch that was built without torch.distributed
    DTensor = ()

PIECE = "piece of a tensor"


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


def pieces(state, keep: bool = True):
    """A state with what this rank has of its shared tensors, and where in them that lies; of the rest one that does not ``keep`` it gets None."""
    if isinstance(state, DTensor):
        chunks = state.__create_chunk_list__()
        return {PIECE: state.to_local(), "first": list(chunks[0].offsets) if chunks else [], "shape": list(state.shape)}
    if isinstance(state, Mapping):
        return {key: pieces(value, keep) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(pieces(value, keep) for value in state)
    return state if keep else None


def put_together(states: list):
    """The whole of which all ranks have given their ``pieces``, the first of them the rest, too."""
    first = states[0]
    if isinstance(first, Mapping) and PIECE in first:
        tensor = first[PIECE].new_empty(first["shape"])
        for state in states:
            if (piece := state[PIECE]).numel():
                tensor[tuple(slice(at, at + size) for at, size in zip(state["first"], piece.shape, strict=True))] = piece
        return tensor
    if isinstance(first, Mapping):
        return {key: put_together([state[key] for state in states]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(put_together(list(values)) for values in zip(*states, strict=True))
    return first


def shared_out_like(tensor, model: torch.Tensor):
    """A whole tensor, which all ranks have, shared out as ``model`` is; whatever is not of its shape is left alone."""
    if not isinstance(model, DTensor) or not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor) or tensor.shape != model.shape:
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)
