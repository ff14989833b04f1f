"""Memory for batches that is reused as soon as the last tensor of a batch is gone.

Fresh memory is slow: the operating system maps it page by page, at a thirtieth of the speed at which it can be written.
A block returns to the pool only when no tensor, view or autograd graph refers to it any more, so a batch that is still
in use is never overwritten.
"""

import math
import threading
import weakref
from collections import deque

import numpy
import torch

MAX_BLOCKS_PER_SIZE = 8
MAX_SIZES = 32  # batches whose sizes keep changing must not fill the memory
MAX_FREE_BYTES = 1 << 30  # of all blocks in the pool
MIN_POOLED_BYTES = 1 << 16  # malloc itself reuses smaller blocks
ALIGNMENT = 64  # bytes, that of torch's own memory: on other addresses kernels may sum in another order

_free: dict[int, deque[numpy.ndarray]] = {}  # by size in bytes; the size that was returned last is at the end
_scratch = threading.local()


def acquire(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized CPU tensor, in reused memory if the pool has a free block; it returns there by itself
    when nothing refers to it any more.
    """
    needed = math.prod(shape) * dtype.itemsize
    if needed < MIN_POOLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    size = _rounded(needed)
    try:
        block = _free[size].pop()
    except (KeyError, IndexError):
        memory = numpy.empty(size + ALIGNMENT, numpy.uint8)
        block = memory[-memory.ctypes.data % ALIGNMENT :][:size]
    lease = block[:needed]  # a new array object: it is destroyed with the last tensor that refers to it
    weakref.finalize(lease, _release, size, block).atexit = False
    return torch.from_numpy(lease).view(dtype).view(shape)


def thread_scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized CPU tensor in memory that this thread's next call with the same name overwrites. For
    temporary results that the caller does not return or store. It takes a tenth of the time of ``acquire``.
    """
    buffers, needed = _scratch.__dict__, math.prod(shape) * dtype.itemsize
    if name not in buffers or len(buffers[name]) < needed:
        buffers[name] = numpy.empty(needed, numpy.uint8)
    return torch.from_numpy(buffers[name][:needed]).view(dtype).view(shape)


def _release(size: int, block: numpy.ndarray) -> None:
    """Returns a block to the pool, and drops the oldest ones above its limits. Garbage collection calls this in any
    thread, even inside another call, so every statement is safe by itself, and at worst a block is lost.
    """
    blocks = _free.pop(size, None) or deque(maxlen=MAX_BLOCKS_PER_SIZE)
    blocks.append(block)
    _free[size] = blocks
    while len(_free) > MAX_SIZES or sum(size * len(blocks) for size, blocks in [*_free.items()]) > MAX_FREE_BYTES:
        for oldest in [*_free][:1]:  # the size to which no block was returned for the longest time
            try:
                _free[oldest].popleft()
            except (KeyError, IndexError):
                _free.pop(oldest, None)  # no block of this size is left


def _rounded(size: int) -> int:
    """Rounds bytes up to 1/8 of a power of two, so that a shorter last batch fits into the block of a full one."""
    step = 1 << max(12, size.bit_length() - 3)
    return -(-size // step) * step
