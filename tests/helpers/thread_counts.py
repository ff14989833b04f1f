"""The same computation with several numbers of threads."""

from collections.abc import Callable

import torch


def with_threads(compute: Callable[[], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """What ``compute`` returns with 1, 2 and 4 threads of PyTorch."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    return results
