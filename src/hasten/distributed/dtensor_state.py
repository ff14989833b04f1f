"""Tensors that are shared out among ranks (DTensor), and the same tensors whole: what a checkpoint keeps, so that any strategy can go on from it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from hasten.core.errors import ConfigurationError
from hasten.distributed.deferred_init import replace_tensors

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # a torch that was built without torch.distributed
    DTensor = ()

PIECE = "piece of a tensor"
DTENSOR_OPTIMIZERS = "Adam, AdamW, SGD, RMSprop or Adagrad"  # optimizers that are known to work on parts of weights


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: all of one that is not shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_optimizer_supports_dtensor(optimizer, who: str) -> None:
    """Refuses an optimizer that cannot update its part of a weight, now and not in the first step: tried on tiny weights, shared out and whole."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if isinstance(weight, DTensor)]
    for weight in {weight.ndim: weight for weight in weights}.values():
        own = torch.zeros([1, 2, 2, 2, 2, 2][: weight.ndim], dtype=weight.dtype, device=weight.to_local().device)
        part = DTensor.from_local(own, weight.device_mesh, weight.placements, run_check=False)
        if not _can_step(optimizer, part) and _can_step(optimizer, own):
            raise ConfigurationError(
                f"{who} gives the optimizer parts of weights, and {type(optimizer).__name__} cannot update them; take {DTENSOR_OPTIMIZERS}, or leave {who} out"
            )


def _can_step(optimizer, tensor: torch.Tensor) -> bool:
    """Whether an optimizer can update a weight; neither its state nor its own weights are touched."""
    weight = torch.nn.Parameter(tensor.clone())
    weight.grad = torch.ones_like(weight)
    try:
        trial = copy.copy(optimizer)
        trial.state, trial.param_groups = defaultdict(dict), [{**optimizer.param_groups[0], "params": [weight]}]
        type(trial).step(trial)
    except Exception:  # whatever torch's operations, or a custom optimizer's, have against it
        return False
    return True


def gather_full_state(state, keep: bool = True):
    """A state of any nesting with its tensors whole. All ranks have to ask at once; one that does not ``keep`` them gets None in their place."""
    if hasattr(state, "full_tensor"):
        tensor = state.full_tensor()
        return tensor if keep else None
    if isinstance(state, Mapping):
        return {key: gather_full_state(value, keep) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(gather_full_state(value, keep) for value in state)
    return state


def local_shards(state, keep: bool = True):
    """A state with what this rank has of its shared tensors, and where in them that lies. Of the rest one that does not ``keep`` it gets None.

    What is on the meta device is another rank's.
    """
    if isinstance(state, DTensor):
        chunks = state.__create_chunk_list__()
        return {PIECE: state.to_local(), "first": list(chunks[0].offsets) if chunks else [], "shape": list(state.shape)}
    if isinstance(state, Mapping):
        return {key: local_shards(value, keep) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(local_shards(value, keep) for value in state)
    gone = isinstance(state, torch.Tensor) and state.is_meta
    return state if keep and not gone else None


def merge_shards(states: list):
    """The whole of which several ranks have given their ``pieces``, or all that they hold: of what several have, the first one's."""
    there = [state for state in states if state is not None]
    first = there[0] if there else states[0]
    if isinstance(first, Mapping) and PIECE in first:
        tensor = first[PIECE].new_empty(first["shape"])
        for state in there:
            if (piece := state[PIECE]).numel():
                tensor[tuple(slice(at, at + size) for at, size in zip(state["first"], piece.shape, strict=True))] = (
                    piece
                )
        return tensor
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for state in there for key in state)
        return {key: merge_shards([state[key] for state in there if key in state]) for key in keys}
    if isinstance(first, (list, tuple)):
        return type(first)(merge_shards(list(values)) for values in zip(*there, strict=True))
    return first


def clip_norm(
    weights: list[torch.Tensor],
    max_norm: float,
    whole_norm: Callable[[torch.Tensor], torch.Tensor],
    twins: frozenset = frozenset(),
) -> None:
    """Shortens all gradients together to a greatest norm, wherever they are.

    Args:
        whole_norm: makes the norm of this rank's gradients that of all.
        twins: weights that another rank counts.
    """
    weights = [weight for weight in weights if weight.grad is not None]
    kinds = [
        [weight for weight in weights if hasattr(weight, "full_tensor") is shared_out] for shared_out in (False, True)
    ]
    kinds = [kind for kind in kinds if kind] or [[]]
    norms = [torch.nn.utils.get_total_norm([weight.grad for weight in kind if weight not in twins]) for kind in kinds]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = whole_norm(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, max_norm, total)


def move_to_meta(model: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
    """Moves weights and buffers of a model to the meta device, which holds nothing; what was one stays one."""
    gone = {id(tensor) for tensor in tensors}
    replace_tensors(model, lambda tensor: tensor.to("meta") if id(tensor) in gone else tensor)


def distribute_like(tensor, model: torch.Tensor):
    """A whole tensor, which all ranks have, shared out as ``model`` is; whatever is not of its shape is left alone."""
    if isinstance(model, torch.Tensor) and model.is_meta:
        return model  # another rank has it
    if (
        not isinstance(model, DTensor)
        or not isinstance(tensor, torch.Tensor)
        or isinstance(tensor, DTensor)
        or tensor.shape != model.shape
    ):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)


def local_shard_like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, where ``model`` is one that is shared out: a view, which takes no memory."""
    if not isinstance(model, DTensor):
        return tensor
    for chunk in model.__create_chunk_list__():
        return tensor[tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))]
    return tensor[:0]
