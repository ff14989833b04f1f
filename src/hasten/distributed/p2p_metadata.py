"""dtype and shape of a tensor as a tensor of fixed length, which a rank receives before it can receive the tensor."""

import torch

from hasten.core.errors import RunError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
MAX_DIMS = 8
HEADER = MAX_DIMS + 2  # elements of a header: index of the dtype, number of dimensions, shape padded with zeros


def encode_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Encodes dtype and shape as int64 of shape (HEADER,), on the tensor's device. RunError for a dtype not in DTYPES
    and for more than MAX_DIMS dimensions.
    """
    if tensor.dtype not in DTYPES or tensor.ndim > MAX_DIMS:
        kind = f"a tensor of {tensor.dtype} with {tensor.ndim} dimensions"
        supported = f"cast or reshape it in the model to {', '.join(map(str, DTYPES))}, at most {MAX_DIMS} dimensions"
        raise RunError(f"{kind} cannot be sent to another rank; {supported}")
    values = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(values + [0] * (HEADER - len(values)), device=tensor.device)


def empty_from_meta(header: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor with the shape and dtype of a header."""
    shape, dtype = decode_meta(header)
    return torch.empty(shape, dtype=dtype, device=device)


def decode_meta(header: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """(shape, dtype) of a header."""
    dtype, dims, *shape = header.tolist()
    return torch.Size(shape[:dims]), DTYPES[dtype]
