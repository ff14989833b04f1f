"""Converts uint8 images to scaled float32 in one pass over memory.

torch converts whole numbers in one pass and scales them in another, and each pass over the floats takes as long as
writing them. Its kernel for embedding tables of 8 bits does both at once. A row of such a table holds its values, then
a float32 scale and a float32 shift; ``augmented_images`` lays out the planes of images like that. The kernel is not
documented for this use (``embedding_bag_byte_unpack``,
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/quantized/cpu/qembeddingbag_unpack.cpp), so it is used
only if it exists and returns the same bits as the two passes.

Why an undocumented kernel stays: without it ``augmented_images`` is 1.41 times slower (1.17 to 1.69; 25 interleaved
passes of ``benchmarks/data_images_in_memory.py``'s pipeline on one core of an AMD EPYC, torch 2.13), which would lose
the figure of 500,000 images per second in the README. For a batch of 512 images the kernel takes 194 µs and the two
passes 426 µs. The documented ways in one pass or in blocks that stay in the cache are not faster: ``torch.addcmul`` of
uint8 takes 5,700 µs, blocks of 128 images 488 µs.
"""

from contextlib import suppress
from functools import lru_cache

import torch

from hasten.data.transforms import scaled, terms

with suppress(ImportError):  # Windows has no such module
    import resource

FOOTER_BYTES = 8  # after the values of a plane: its scale and its shift
MAX_RETAINED_BYTES = 30_000_000  # glibc maps every block of more than 32 MiB anew and unmaps it when it is freed


def plane_footers(means: tuple[float, ...], stds: tuple[float, ...], planes: int) -> torch.Tensor:
    """Returns the scale and the shift of every plane of an image, as one integer each: int64, shape (planes,).
    ``planes`` is a multiple of the number of means.
    """
    pairs = torch.tensor(terms(means, stds, torch.uint8), dtype=torch.float32).view(torch.int64).view(-1, 1)
    return pairs.repeat(1, planes // len(pairs)).flatten()


def unpack_planes(planes: torch.Tensor) -> torch.Tensor:
    """Returns ``value * scale + shift``, float32, shape (n, values), of planes, uint8, shape (n, values +
    FOOTER_BYTES).
    """
    return torch.ops.quantized.embedding_bag_byte_unpack(planes)


@lru_cache(maxsize=64)
def can_unpack(means: tuple[float, ...], stds: tuple[float, ...]) -> bool:
    """Whether ``unpack_planes`` exists and returns the same bits as ``scaled`` for every uint8 value."""
    # 264: where the kernel takes 16 values at a time, 8 are left
    return all(_same_bits(means, stds, values) for values in (256, 264))


def _same_bits(means: tuple[float, ...], stds: tuple[float, ...], values: int) -> bool:
    """Whether ``unpack_planes`` equals ``scaled`` on planes of ``values`` values that contain every uint8 value."""
    images = torch.arange(values).to(torch.uint8).repeat(1, len(means), 1, 1)
    footers = plane_footers(means, stds, len(means)).view(torch.uint8).view(-1, FOOTER_BYTES)
    try:
        made = unpack_planes(torch.cat([images.view(-1, values), footers], dim=1))
    except (AttributeError, RuntimeError, NotImplementedError):  # another version of torch, or another processor
        return False
    return torch.equal(made.view(images.shape), scaled(images, means, stds))


def retain_freed_memory() -> None:
    """Makes glibc keep freed memory in the process, so that later batches cause no page faults.

    glibc raises its threshold for mapped blocks to the size of the largest block that was freed. The second block is
    below that threshold and is written to, so that the first batches already find memory that needs no page faults.
    """
    torch.empty(MAX_RETAINED_BYTES, dtype=torch.uint8)
    torch.empty(MAX_RETAINED_BYTES - (1 << 20), dtype=torch.uint8).zero_()


def page_faults() -> int:
    """Returns the number of minor page faults of this thread; 0 on systems that do not count them."""
    try:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    except (NameError, AttributeError):
        return 0
