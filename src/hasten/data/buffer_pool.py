"""Memory for batches that is used again as soon as nobody holds the batch.

Fresh memory is dear: the system hands it out page by page, at a thirtieth of the speed at which it can be written. A batch
made here gives its memory back when its last tensor is gone, views and gradients included, so that nothing is
ever overwritten under somebody's hands.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque

import numpy
import torch

KEPT = 8  # blocks of a size that wait to be used again
SIZES = 32  # that are kept; batches of ever new sizes must not fill the memory
BYTES = 1 << 30  # of all blocks that wait
SMALLEST = 1 << 16  # bytes; what is smaller the allocator keeps itself

_waiting: dict[int, deque[numpy.ndarray]] = {}  # by size, the one last used at the end
_scratch = threading.local()


def acquire(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU, in memory that was used before where some is free."""
    needed = math.prod(shape) * dtype.itemsize
    if needed < SMALLEST:
        return torch.empty(shape, dtype=dtype)
    size = _rounded(needed)
    try:
        block = _waiting[size].pop()
    except (KeyError, IndexError):
        block = numpy.empty(size, numpy.uint8)
    lent = block[:needed]  # an array of its own: it dies with the last tensor that is made of it
    weakref.finalize(lent, _take_back, size, block).atexit = False
    return torch.from_numpy(lent).view(dtype).view(shape)


def alloc_huge(count: int, dtype: torch.dtype) -> torch.Tensor:
    """So many uninitialised values that stay, in large pages where the system has them: NumPy asks for those, torch does not.

    Rows that are read from there at random come a tenth faster.
    """
    return torch.from_numpy(numpy.empty(count * dtype.itemsize, numpy.uint8)).view(dtype)


def thread_scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in memory of the calling thread that is the same whenever it is asked for again: for work that is over
    before the caller returns. It costs a tenth of ``taken``; and nobody may keep it.
    """
    kept, needed = _scratch.__dict__, math.prod(shape) * dtype.itemsize
    if name not in kept or len(kept[name]) < needed:
        kept[name] = numpy.empty(needed, numpy.uint8)
    return torch.from_numpy(kept[name][:needed]).view(dtype).view(shape)


def _take_back(size: int, block: numpy.ndarray) -> None:
    """Called wherever a batch dies, in any thread, even within itself: so each step stands alone, and at worst a block is lost."""
    blocks = _waiting.pop(size, None) or deque(maxlen=KEPT)
    blocks.append(block)
    _waiting[size] = blocks
    while len(_waiting) > SIZES or _bytes_waiting() > BYTES:
        _drop()


def _bytes_waiting() -> int:
    return sum(size * len(blocks) for size, blocks in list(_waiting.items()))


def _drop() -> None:
    """Lets go of a block, of the size that was not used for longest."""
    for size in list(_waiting)[:1]:
        try:
            _waiting[size].popleft()
        except (KeyError, IndexError):
            _waiting.pop(size, None)  # none is left of that size


def _rounded(size: int) -> int:
    """Up to the next eighth of a power of two, so that a shorter last batch finds room where a whole one was."""
    step = 1 << max(12, size.bit_length() - 3)
    return -(-size // step) * step
