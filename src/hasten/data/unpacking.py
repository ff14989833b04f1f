"""From uint8 to scaled float32 in one pass.

torch converts whole numbers in one pass and scales them in another, and each pass over the floats takes as long as writing them. Its
kernel for embedding tables of 8 bits does both at once. A row of such a table is its values, then a scale and a shift, float32 both;
planes of pictures are laid out like that here. The kernel is not documented for this use (``embedding_bag_byte_unpack``, in
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/quantized/cpu/qembeddingbag_unpack.cpp), so it is used only where it is
there and gives the very bits of the two passes.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

import torch

from hasten.data.transforms import scaled, terms

with suppress(ImportError):  # not on every system
    import resource

TAIL = 8  # bytes after the values of a plane: its scale and its shift
LARGEST_KEPT = 30_000_000  # bytes; beyond 32 MiB every block is fetched from the system and given back


def tails(means: tuple[float, ...], stds: tuple[float, ...], planes: int) -> torch.Tensor:
    """The bytes after each plane of a picture, as one whole number: int64, shape (planes,). ``planes`` is a multiple of the means."""
    pairs = torch.tensor(terms(means, stds, torch.uint8), dtype=torch.float32).view(torch.int64).view(-1, 1)
    return pairs.repeat(1, planes // len(pairs)).flatten()


def unpacked(planes: torch.Tensor) -> torch.Tensor:
    """``value * scale + shift`` of planes with their tails: uint8, shape (n, values + TAIL), to float32, shape (n, values)."""
    return torch.ops.quantized.embedding_bag_byte_unpack(planes)


@lru_cache(maxsize=64)
def unpacks(means: tuple[float, ...], stds: tuple[float, ...]) -> bool:
    """Whether ``unpacked`` is there, and gives what ``scaled`` gives, of every value."""
    return all(_same_bits(means, stds, values) for values in (256, 264))  # the kernel may go by 16, and 8 are left then


def _same_bits(means: tuple[float, ...], stds: tuple[float, ...], values: int) -> bool:
    """Of planes of so many values, all that there are among them."""
    pictures = torch.arange(values).to(torch.uint8).repeat(1, len(means), 1, 1)
    ends = tails(means, stds, len(means)).view(torch.uint8).view(-1, TAIL)
    try:
        made = unpacked(torch.cat([pictures.view(-1, values), ends], dim=1))
    except (AttributeError, RuntimeError, NotImplementedError):  # another torch, another processor
        return False
    return torch.equal(made.view(pictures.shape), scaled(pictures, means, stds))


def keep_what_is_freed() -> None:
    """glibc learns from what is freed: once it was a block of this size, smaller ones stay with the process, for the next batch.

    The second one is such, and is written to: so the first batches find its memory, and need none from the system.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)
    torch.empty(LARGEST_KEPT - (1 << 20), dtype=torch.uint8).zero_()


def page_faults() -> int:
    """How often this thread has had memory from the system; 0 where nobody counts."""
    try:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    except (NameError, AttributeError):
        return 0
