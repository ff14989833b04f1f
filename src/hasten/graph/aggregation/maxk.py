"""MaxK: keep the k largest values of each row.

``maxk`` and the module ``MaxK`` return a dense matrix; ``compress`` returns the same matrix in CBSR form, for
``aggregate``, which reads k values of a node per edge instead of all of them. From the description of MaxK-GNN (Peng et
al., ASPLOS 2024, arXiv 2312.08656).
"""

from typing import Any

import torch

from hasten.core.errors import ConfigurationError
from hasten.graph.aggregation.aggregate import FLOATS, PARTS_PER_THREAD
from hasten.graph.aggregation.cbsr import CBSR, column_dtype
from hasten.graph.sampling.checks import check_integer
from hasten.graph.threads import run_equal_work

BISECTION_STEPS = 20  # of choosing k of a row, about: work per value of the row


def maxk(x: torch.Tensor, k: int) -> torch.Tensor:
    """Keeps the k largest values of each row, negative ones included, and replaces the others by zero.

    Exactly k values stay; of equal values, those in the first columns. NaN counts as the largest. The gradient passes
    to the values that stay.

    Args:
        x: Float, shape (n, d).
        k: Values per row, from 1 to d.

    Returns:
        Shape (n, d).

    Raises:
        ConfigurationError: k is out of range, or x has another shape or type.
    """
    return _MaxKFunction.apply(x, k)  # pyright: ignore[reportReturnType]


class MaxK(torch.nn.Module):
    """``maxk`` as a layer, in place of a ReLU before an aggregation, for rows along the last dimension. Rows with at
    most k values pass unchanged.

    Raises:
        ConfigurationError: k is no integer from 1 up.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = check_integer("k of MaxK", k, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-1] <= self.k else maxk(x.reshape(-1, x.shape[-1]), self.k).view(x.shape)

    def extra_repr(self) -> str:
        return f"k={self.k}"


def compress(x: torch.Tensor, k: int) -> CBSR:
    """``maxk(x, k)`` in CBSR form; arguments and errors as there. Gradients to its values pass on to ``x``."""
    columns = largest_columns(x, k)
    return CBSR(x.gather(1, columns.long()), columns, x.shape[1], check_invariants=False)


def largest_columns(x: torch.Tensor, k: int) -> torch.Tensor:
    """The columns of the k largest values of each row, ascending, shape (n, k); see ``maxk``."""
    if x.ndim != 2 or not x.shape[1] or not x.is_floating_point():
        given = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ConfigurationError(f"MaxK expects floats of shape (n, d) with d at least 1; got {given}")
    k = check_integer("k of MaxK", k, 1, x.shape[1])
    dtype = column_dtype(x.shape[1])
    if x.device.type != "cpu":  # topk may return any of several equal values; a stable sort returns the first
        order = x.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
        return order.sort(dim=1).values.to(dtype)
    from hasten.graph.aggregation.kernels import choose_columns

    x = x.detach().contiguous() if x.dtype in FLOATS else x.detach().float().contiguous()
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64).numpy()
    columns = torch.empty(len(x), k, dtype=torch.int32)  # for any width, so that Numba compiles one kernel
    values, result = x.numpy(), columns.numpy()
    work = torch.arange(len(x) + 1).numpy() * (x.shape[1] * BISECTION_STEPS // 100 + 1)
    run_equal_work(lambda begin, end: choose_columns(values, bits, result, begin, end), work, PARTS_PER_THREAD)
    return columns.to(dtype)


class _MaxKFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: int) -> torch.Tensor:
        columns = largest_columns(x, k)
        ctx.save_for_backward(columns)
        return _only(x, columns)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _only(gradient, *ctx.saved_tensors), None


def _only(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    places = columns.long()
    return torch.zeros_like(x).scatter(1, places, x.gather(1, places))
