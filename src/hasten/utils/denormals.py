"""Denormal numbers: float32 values below 1.2e-38, with which x86 cores compute up to a hundred times slower."""

import torch


def smallest_denormals(count: int) -> torch.Tensor:
    """``count`` of the smallest float32 numbers on the CPU. Written as bits, because arithmetic may flush them."""
    return torch.ones(count, dtype=torch.int32).view(torch.float32)


def nonzero_values(tensor: torch.Tensor) -> int:
    """Number of float32 values that are not zero. Compares bits: a thread that flushes reads a denormal as zero."""
    return int(torch.count_nonzero(tensor.detach().view(torch.int32)))


def flushes_denormals() -> bool:
    """Whether this thread computes with zero instead of a denormal number; see ``torch.set_flush_denormal``."""
    return not nonzero_values(smallest_denormals(1) * 1.0)
