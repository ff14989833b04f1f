"""Denormal numbers: float32 values below 1.2e-38, with which x86 cores compute up to a hundred times slower."""

from collections.abc import Iterable

import torch

from hasten._torch_compat import end_intra_op_threads

MAX_COUNTED = 1 << 19  # values; counting them takes some milliseconds

_FORMATS = {  # the bits as integers: their type, the mask without the sign, and the smallest normal number
    torch.float32: (torch.int32, (1 << 31) - 1, 1 << 23),
    torch.float64: (torch.int64, (1 << 63) - 1, 1 << 52),
    torch.bfloat16: (torch.int16, (1 << 15) - 1, 1 << 7),
}


def smallest_denormals(count: int) -> torch.Tensor:
    """``count`` of the smallest float32 numbers on the CPU. Written as bits, because arithmetic may flush them."""
    return torch.ones(count, dtype=torch.int32).view(torch.float32)


def nonzero_values(tensor: torch.Tensor) -> int:
    """Number of float32 values that are not zero. Compares bits: a thread that flushes reads a denormal as zero."""
    return int(torch.count_nonzero(tensor.detach().view(torch.int32)))


def flushes_denormals() -> bool:
    """Whether this thread computes with zero instead of a denormal number; see ``torch.set_flush_denormal``."""
    return not nonzero_values(smallest_denormals(1) * 1.0)


def set_flush_denormals(flush: bool) -> bool:
    """Sets whether this thread, and those that will compute its operations, replace denormal numbers by zero; ends the
    existing threads that compute them. Returns whether this processor can.
    """
    is_set = torch.set_flush_denormal(flush)
    if torch.get_num_threads() > 1:  # else there are none, or the threads of a process that this one was forked from
        end_intra_op_threads()
    return is_set


def count_denormals(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """(number of denormal values, number of all values) of floating-point tensors. Of more than 2**19 values, only some
    at equal distances are examined, and the first number is an estimate.

    float16 is left out: its denormal numbers are normal in float32, with which the CPU computes. So are tensors on a
    GPU, which computes with denormal numbers at full speed. Of a sparse tensor the stored values count; other layouts
    that are not strided are left out.
    """
    kinds = [_stored_values(tensor.detach()) for tensor in tensors if _is_countable(tensor)]
    values, found, position = sum(tensor.numel() for tensor in kinds), 0, 0
    stride = -(-values // MAX_COUNTED) | 1  # odd: rows of a power of two would show the same columns only
    for tensor in kinds:
        bits, magnitude, smallest_normal = _FORMATS[tensor.dtype]
        counted = tensor.flatten()[-position % stride :: stride].view(bits) & magnitude  # across all tensors
        found += stride * int(torch.count_nonzero((counted > 0) & (counted < smallest_normal)))
        position += tensor.numel()
    return min(values, found), values


def _is_countable(tensor: torch.Tensor) -> bool:
    has_values = tensor.device.type == "cpu" and (tensor.is_sparse or tensor.layout is torch.strided)
    return type(tensor.data) is torch.Tensor and tensor.dtype in _FORMATS and has_values


def _stored_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor
