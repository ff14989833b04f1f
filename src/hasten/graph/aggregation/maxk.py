"""MaxK: keep the k largest values of each row, and aggregate over a graph what is left.

``maxk`` and the module ``MaxK`` return a dense matrix; ``compress`` returns the same matrix in CBSR form, for
``aggregate``, which reads k values of a node per edge instead of all of them. From the description of MaxK-GNN (Peng et
al., ASPLOS 2024, arXiv 2312.08656).
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch

from hasten.core.errors import ConfigurationError
from hasten.graph.aggregation.adjacency import Adjacency
from hasten.graph.aggregation.cbsr import CBSR, column_dtype
from hasten.graph.sampling.checks import check_integer
from hasten.graph.threads import run_equal_work

FLOATS = (torch.float32, torch.float64)
BISECTION_STEPS = 20  # of choosing k of a row, about: work per value of the row
PARTS_PER_THREAD = 4


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
    """``maxk`` as a layer, in place of a ReLU before an aggregation. Rows with at most k values pass unchanged.

    Raises:
        ConfigurationError: k is no integer from 1 up.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = check_integer("k of MaxK", k, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-1] <= self.k else maxk(x, self.k)

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


def aggregate(adjacency: Adjacency, cbsr: CBSR, reduce: str = "sum") -> torch.Tensor:
    """``A @ Xs``: for each node, the sum or mean of the rows of its neighbors, as a dense matrix.

    The backward pass computes the gradient at the stored positions only. On the CPU the bits of both passes are the
    same for any number of threads. On a GPU the backward pass adds by atomic operations, in no fixed order.

    Args:
        adjacency: A, shape (rows, sources).
        cbsr: Xs, shape (sources, width), float32 or float64.
        reduce: "sum" or "mean". The mean divides a row by its number of edges; a row without edges gives zeros.

    Returns:
        Shape (rows, width).

    Raises:
        ConfigurationError: The arguments are of other classes, the sizes or devices do not match, the type is neither
            float32 nor float64, or ``reduce`` is unknown.
    """
    if not isinstance(adjacency, Adjacency) or not isinstance(cbsr, CBSR):
        given = f"{type(adjacency).__name__} and {type(cbsr).__name__}"
        raise ConfigurationError(f"aggregate expects an Adjacency and a CBSR, from compress(x, k); got {given}")
    if reduce not in ("sum", "mean"):
        raise ConfigurationError(f"reduce={reduce!r} is unknown; expected 'sum' or 'mean'")
    if cbsr.shape[0] != adjacency.num_sources:
        raise ConfigurationError(f"{cbsr.shape[0]} rows of values for {adjacency.num_sources} sources; expected equal")
    if cbsr.values.device != adjacency.indices.device:
        devices = f"values on {cbsr.values.device} for a graph on {adjacency.indices.device}"
        raise ConfigurationError(f"{devices}; expected one device: move the edge_index there first")
    if cbsr.values.dtype not in FLOATS:
        raise ConfigurationError(f"cannot aggregate values of type {cbsr.values.dtype}; expected float32 or float64")
    return _Aggregate.apply(cbsr.values, cbsr.columns, adjacency, cbsr.width, reduce == "mean")  # pyright: ignore[reportReturnType]


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


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: torch.Tensor, columns: torch.Tensor, adjacency: Adjacency, width: int, mean: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(columns)
        ctx.adjacency, ctx.mean = adjacency, mean
        product = _product if values.device.type == "cpu" else partial(_on_gpu, "product")
        return product(values.detach().contiguous(), columns.contiguous(), adjacency, width, mean)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (columns,) = ctx.saved_tensors
        sampled = _sampled_product if gradient.device.type == "cpu" else partial(_on_gpu, "sampled_product")
        return sampled(gradient.contiguous(), columns.contiguous(), ctx.adjacency, ctx.mean), None, None, None, None


def _product(values: torch.Tensor, columns: torch.Tensor, adjacency: Adjacency, width: int, mean: bool) -> torch.Tensor:
    from hasten.graph.aggregation.kernels import spgemm

    out = values.new_empty(adjacency.num_rows, width)
    matrix, k = _arrays(adjacency, values.dtype), values.shape[1]
    inputs = values.view(-1).numpy(), _unsigned(columns), k, out.numpy()
    run_equal_work(lambda begin, end: spgemm(*matrix, mean, *inputs, begin, end), matrix[0], PARTS_PER_THREAD)
    return out


def _sampled_product(gradient: torch.Tensor, columns: torch.Tensor, adjacency: Adjacency, mean: bool) -> torch.Tensor:
    from hasten.graph.aggregation.kernels import sspmm

    out = gradient.new_empty(columns.shape)
    matrix, k = _arrays(adjacency, gradient.dtype), columns.shape[1]
    inputs = gradient.numpy(), _unsigned(columns), k, out.view(-1).numpy()
    run_equal_work(lambda begin, end: sspmm(*matrix, mean, *inputs, begin, end), adjacency.edges_before_source)
    return out


def _arrays(adjacency: Adjacency, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Row pointers, sources and weights; an empty array in place of weights that are all one."""
    weights = torch.empty(0) if adjacency.weights is None else adjacency.weights
    return adjacency.indptr.numpy(), adjacency.indices.numpy(), weights.to(dtype).contiguous().numpy()


def _unsigned(columns: torch.Tensor) -> Any:
    """The columns as a flat array of unsigned integers, which the kernels need not test for values below zero."""
    return columns.view(-1).numpy().view({1: "uint8", 2: "uint16", 4: "uint32"}[columns.itemsize])


def _on_gpu(name: str, values: torch.Tensor, *args: Any) -> torch.Tensor:
    """Calls a function of ``triton_kernels.py`` for the device of ``values``: Triton launches on the current device."""
    # By name: `hasten eject` copies import statements, and triton may be missing.
    function = getattr(import_module("hasten.graph.aggregation.triton_kernels"), name)
    with torch.cuda.device(values.device):
        return function(values, *args)
