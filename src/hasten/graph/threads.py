"""Runs a kernel that releases the GIL over ranges of positions, in threads of this process.

Numba's own threads would end a process that forks after their first use, as every DataLoader worker does.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

SMALLEST_RANGE = 2048  # positions; handing less to a thread takes longer than the work


def in_ranges(kernel: Callable[[int, int], object], length: int, threads: int) -> None:
    """Calls ``kernel(begin, end)`` for ranges that cover [0, length), in at most ``threads`` threads."""
    threads = max(1, min(threads, length // SMALLEST_RANGE))
    if threads == 1:
        kernel(0, length)
        return
    bounds = [length * part // threads for part in range(threads + 1)]
    pool = _pool(os.getpid(), threads)
    others = [pool.submit(kernel, bounds[part], bounds[part + 1]) for part in range(1, threads)]
    kernel(bounds[0], bounds[1])
    for other in others:
        other.result()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """A pool of this process: a forked process has the pool of its parent, but not its threads."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="hasten-graph")
