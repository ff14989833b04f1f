"""Sums and means over the neighbors of each node, without a row of features for each edge.

PyTorch Geometric copies the features of the source of every edge into a matrix, and adds its rows up. The kernels here
read a source and add it at once: the matrix, often the largest tensor of a step, never exists.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch

from hasten.core.errors import ConfigurationError
from hasten.graph.aggregation.adjacency import Adjacency
from hasten.graph.aggregation.cbsr import CBSR
from hasten.graph.threads import run_equal_work

FLOATS = (torch.float32, torch.float64)
PARTS_PER_THREAD = 4


def aggregate(adjacency: Adjacency, x: torch.Tensor | CBSR, reduce: str = "sum") -> torch.Tensor:
    """``A @ X``: for each node, the sum or mean of the rows of its neighbors, as a dense matrix.

    The backward pass of a CBSR computes the gradient at the stored positions only. On the CPU the bits of both passes
    are the same for any number of threads. On a GPU the backward pass of a CBSR adds by atomic operations, in no fixed
    order.

    Args:
        adjacency: A, shape (rows, sources).
        x: X, shape (sources, width), float32 or float64: a dense matrix, which must be on the CPU, or a CBSR.
        reduce: "sum" or "mean". The mean divides a row by its number of edges; a row without edges gives zeros.

    Returns:
        Shape (rows, width).

    Raises:
        ConfigurationError: The arguments are of other classes, the sizes or devices do not match, the type is neither
            float32 nor float64, or ``reduce`` is unknown.
    """
    if not isinstance(adjacency, Adjacency) or not isinstance(x, (torch.Tensor, CBSR)):
        given = f"{type(adjacency).__name__} and {type(x).__name__}"
        raise ConfigurationError(f"aggregate expects an Adjacency, and a tensor or a CBSR; got {given}")
    if reduce not in ("sum", "mean"):
        raise ConfigurationError(f"reduce={reduce!r} is unknown; expected 'sum' or 'mean'")
    values = x.values if isinstance(x, CBSR) else x
    if values.layout != torch.strided:
        raise ConfigurationError(f"aggregate expects dense features, not {values.layout}; call to_dense()")
    if values.ndim != 2 or len(values) != adjacency.num_sources:
        given = f"features of shape {tuple(values.shape)}"
        raise ConfigurationError(f"{given} for {adjacency.num_sources} sources; expected a row for each source")
    if values.device != adjacency.indices.device:
        devices = f"values on {values.device} for a graph on {adjacency.indices.device}"
        raise ConfigurationError(f"{devices}; expected one device: move the edge_index there first")
    if values.dtype not in FLOATS:
        raise ConfigurationError(f"cannot aggregate values of type {values.dtype}; expected float32 or float64")
    if isinstance(x, CBSR):
        return _Aggregate.apply(values, x.columns, adjacency, x.width, reduce == "mean")  # pyright: ignore[reportReturnType]
    if values.device.type != "cpu":
        advice = "use torch.sparse.mm there"
        raise ConfigurationError(f"no kernel aggregates a dense matrix on {values.device}, only on the CPU; {advice}")
    return _AggregateDense.apply(values, adjacency, reduce == "mean")  # pyright: ignore[reportReturnType]


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


class _AggregateDense(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, adjacency: Adjacency, mean: bool
    ) -> torch.Tensor:
        ctx.adjacency, ctx.mean = adjacency, mean
        return _dense_product(adjacency, x.detach().contiguous(), mean)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        adjacency: Adjacency = ctx.adjacency
        if ctx.mean:
            gradient = gradient / adjacency.indptr.diff().clamp(min=1).unsqueeze(1)
        return _AggregateDense.apply(gradient, adjacency.transposed, False), None, None  # differentiable once more


def _dense_product(adjacency: Adjacency, x: torch.Tensor, mean: bool) -> torch.Tensor:
    from hasten.graph.aggregation.kernels import spmm

    out = x.new_empty(adjacency.num_rows, x.shape[1])
    matrix, dense = _arrays(adjacency, x.dtype), (x.view(-1).numpy(), out.numpy())
    run_equal_work(lambda begin, end: spmm(*matrix, mean, *dense, begin, end), matrix[0], PARTS_PER_THREAD)
    return out


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
