"""Sharded tensors (DTensor) and full tensors: checkpoints store full state, so that any strategy can resume them."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from hasten.core.errors import ConfigurationError
from hasten.core.run_context import ParallelContext
from hasten.distributed.deferred_init import replace_tensors
from hasten.utils.tree import tree_map

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # a torch that was built without torch.distributed
    DTensor = ()  # pyright: ignore[reportAssignmentType]

PIECE = "piece of a tensor"
DTENSOR_OPTIMIZERS = "Adam, AdamW, SGD, RMSprop or Adagrad"  # known to update DTensors


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_optimizer_supports_dtensor(optimizer: torch.optim.Optimizer, method: str) -> None:
    """Raises ``ConfigurationError`` if the optimizer cannot step on DTensors; tries it on tiny ones."""
    params = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    for param in {param.ndim: param for param in params}.values():
        plain = torch.zeros([1, 2, 2, 2, 2, 2][: param.ndim], dtype=param.dtype, device=param.to_local().device)
        sharded = type(param).from_local(plain, param.device_mesh, param.placements, run_check=False)
        if not _can_step(optimizer, sharded) and _can_step(optimizer, plain):
            reason = (
                f"{type(optimizer).__name__} cannot update DTensors; take {DTENSOR_OPTIMIZERS}, or leave {method} out"
            )
            raise ConfigurationError(f"{method} shards the parameters, and {reason}")


def _can_step(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> bool:
    """Whether an optimizer can update a tensor; changes neither the optimizer's state nor its parameters."""
    param = torch.nn.Parameter(tensor.clone())
    param.grad = torch.ones_like(param)
    try:
        trial = copy.copy(optimizer)
        trial.state, trial.param_groups = defaultdict(dict), [{**optimizer.param_groups[0], "params": [param]}]
        type(trial).step(trial)
    except Exception:  # of torch's operators or of a custom optimizer
        return False
    return True


def gather_full_state(state: Any, keep: bool = True) -> Any:
    """A nested state with each DTensor gathered to a full tensor (``keep=False``: to None). All ranks must call it."""

    def gather(leaf: Any) -> Any:
        if not hasattr(leaf, "full_tensor"):
            return leaf
        tensor = leaf.full_tensor()
        return tensor if keep else None

    return tree_map(gather, state)


def local_shards(state: Any, keep: bool = True) -> Any:
    """A nested state with each DTensor replaced by {PIECE: local shard, "first": its offsets, "shape": full shape}.

    Meta tensors become None, with ``keep=False`` all values except DTensors.
    """

    def shard_of(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            chunks = leaf.__create_chunk_list__()
            first = list(chunks[0].offsets) if chunks else []
            return {PIECE: leaf.to_local(), "first": first, "shape": list(leaf.shape)}
        is_elsewhere = isinstance(leaf, torch.Tensor) and leaf.is_meta
        return leaf if keep and not is_elsewhere else None

    return tree_map(shard_of, state)


def merge_shards(states: list[Any]) -> Any:
    """The full state, from the ``local_shards`` of all ranks; of a value on several ranks, the first is used."""
    present = [state for state in states if state is not None]
    first = present[0] if present else states[0]
    if isinstance(first, Mapping) and PIECE in first:
        tensor = first[PIECE].new_empty(first["shape"])
        for state in present:
            if (piece := state[PIECE]).numel():
                bounds = zip(state["first"], piece.shape, strict=True)
                tensor[tuple(slice(offset, offset + size) for offset, size in bounds)] = piece
        return tensor
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for state in present for key in state)
        return {key: merge_shards([state[key] for state in present if key in state]) for key in keys}
    if isinstance(first, (list, tuple)):
        return type(first)(merge_shards(list(values)) for values in zip(*present, strict=True))
    return first


def clip_norm(params: list[torch.Tensor], max_norm: float, parallel: ParallelContext | None) -> None:
    """Scales all gradients, sharded or not, by one factor to a maximum L2 norm of the whole model. A collective."""
    duplicates = frozenset[torch.nn.Parameter]() if parallel is None else parallel.duplicate_params
    params = [param for param in params if param.grad is not None]
    sharded = [param for param in params if hasattr(param, "full_tensor")]
    plain = [param for param in params if not hasattr(param, "full_tensor")]
    kinds = [kind for kind in (plain, sharded) if kind] or [[]]
    counted = [[param for param in kind if param not in duplicates] for kind in kinds]
    gradients: list[Any] = [[param.grad for param in of_kind] for of_kind in counted]
    norms: list[Any] = list(map(torch.nn.utils.get_total_norm, gradients))
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if parallel is not None and parallel.is_model_parallel:
        copies = parallel.ranks.world_size / parallel.num_parameter_owners  # so many ranks contribute the same norm
        total = total.double().new_tensor((parallel.ranks.all_reduce_sum([float(total) ** 2])[0] / copies) ** 0.5)
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, max_norm, total)


def move_to_meta(model: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
    """Replaces those of a model's tensors that are in ``tensors`` by meta tensors; tied tensors stay tied."""
    moved = {id(tensor) for tensor in tensors}
    replace_tensors(model, lambda tensor: tensor.to("meta") if id(tensor) in moved else tensor)


def distribute_like(value: Any, reference: Any) -> Any:
    """The full tensor ``value`` sharded like the DTensor ``reference``; unchanged if either is no such tensor, or their
    shapes differ. Returns a ``reference`` on the meta device itself: another rank owns that tensor.
    """
    if isinstance(reference, torch.Tensor) and reference.is_meta:
        return reference  # another rank has it
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not (is_plain and isinstance(reference, DTensor) and value.shape == reference.shape):
        return value
    moved = value.to(reference.device)
    return distribute_tensor(moved, reference.device_mesh, reference.placements, src_data_rank=None)


def local_shard_like(tensor: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor, as a view, if ``reference`` is a DTensor; else the tensor."""
    if not isinstance(reference, DTensor):
        return tensor
    for chunk in reference.__create_chunk_list__():
        return tensor[tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))]
    return tensor[:0]
