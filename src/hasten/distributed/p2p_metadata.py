"""What a rank has to know of a tensor before it can receive it: its type and shape, as numbers in a tensor of one length."""

from __future__ import annotations

import torch

from hasten.core.errors import RunError

TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)  # that can be handed on
MAX_DIMS = 8
HEADER = MAX_DIMS + 2  # its length


def encode_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in TYPES or tensor.ndim > MAX_DIMS:
        raise RunError(
            f"a tensor of {tensor.dtype} with {tensor.ndim} dimensions cannot be handed on to another process"
        )
    told = [TYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(told + [0] * (HEADER - len(told)), device=tensor.device)


def empty_from_meta(header: torch.Tensor, device) -> torch.Tensor:
    """Memory for the tensor that a header tells of."""
    shape, kind = decode_meta(header)
    return torch.empty(shape, dtype=kind, device=device)


def decode_meta(header: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """The shape and type that a header tells of."""
    kind, dimensions, *shape = header.tolist()
    return torch.Size(shape[:dimensions]), TYPES[kind]
