"""Runs a kernel that releases the GIL over ranges of rows, in threads of this process.

Numba's own threads would end a process that forks after their first use, as every DataLoader worker does.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch

SMALLEST_RANGE = 2048  # rows; handing less to a thread takes longer than the work
SMALLEST_WORK = 20_000  # items of work, such as edges; the same

Kernel = Callable[[int, int], object]


def run_equal_ranges(kernel: Kernel, rows: int, threads: int) -> None:
    """Calls ``kernel(begin, end)`` for ranges of equal length that cover [0, rows), in at most ``threads`` threads."""
    threads = max(1, min(threads, rows // SMALLEST_RANGE))
    _run(kernel, [rows * part // threads for part in range(threads + 1)], threads)


def run_equal_work(kernel: Kernel, cumulative: numpy.ndarray, parts_per_thread: int = 1) -> None:
    """Calls ``kernel(begin, end)`` for ranges of equal work that cover all rows, in as many threads as PyTorch has.

    Args:
        kernel: writes to the rows of its range only.
        cumulative: work of all rows before each row, and the total at the end, of shape (rows + 1,).
        parts_per_thread: ranges for each thread; several balance the load if a thread is slowed down.
    """
    rows, work = len(cumulative) - 1, int(cumulative[-1])
    threads = max(1, min(torch.get_num_threads(), work // SMALLEST_WORK))
    shares = numpy.arange(1, threads * parts_per_thread) * work // (threads * parts_per_thread)
    _run(kernel, [0, *numpy.searchsorted(cumulative, shares).tolist(), rows], threads)


def _run(kernel: Kernel, bounds: Sequence[int], threads: int) -> None:
    if threads == 1:
        kernel(bounds[0], bounds[-1])
    else:
        list(_pool(os.getpid(), threads).map(kernel, bounds[:-1], bounds[1:]))


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """A pool of this process: a forked process has the pool of its parent, but not its threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="hasten-graph")
