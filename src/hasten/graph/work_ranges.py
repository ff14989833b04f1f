"""Runs a kernel that releases the GIL over ranges of equal work, in threads of this process.

Numba's own threads would end a process that forks after their first use, as every DataLoader worker does.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch

SMALLEST_WORK = 20_000  # items of work, such as edges; handing less to a thread takes longer than the work


def run_ranges(kernel: Callable[[int, int], object], cumulative: numpy.ndarray, parts_per_thread: int = 1) -> None:
    """Calls ``kernel(begin, end)`` for ranges that cover all rows, in ``torch.get_num_threads()`` threads.

    Args:
        kernel: Writes to the rows of its range only.
        cumulative: Work of all rows before each row, and the total at the end, shape (rows + 1,).
        parts_per_thread: Ranges per thread; several balance the load if a thread is slowed down.
    """
    rows, work = len(cumulative) - 1, int(cumulative[-1])
    threads = max(1, min(torch.get_num_threads(), work // SMALLEST_WORK))
    if threads == 1:
        kernel(0, rows)
        return
    shares = numpy.arange(1, threads * parts_per_thread) * work // (threads * parts_per_thread)
    bounds = [0, *numpy.searchsorted(cumulative, shares).tolist(), rows]
    list(_pool(os.getpid(), threads).map(kernel, bounds[:-1], bounds[1:]))


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """A pool of this process: a forked process has the pool of its parent, but not its threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="hasten-graph")
