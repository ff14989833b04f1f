"""Triton kernels of MaxK for GPUs: the product of a CSR and a CBSR matrix, and its gradient.

The forward kernel does not scatter, since Triton cannot write to a computed place of a row that a program holds. It
reads the columns of a row as a bit mask of the row's width: a lane that owns column c finds its value at the number of
bits before c. Each program owns one row of the result, so the sums have a fixed order.

The backward kernel is the outer-product form of MaxK-GNN (arXiv 2312.08656): a program reads one dense row of the
gradient, which stays in the L1 cache, and adds to the sources of its edges by atomic operations, in no fixed order.

Tested in Triton's interpreter against the dense formulas; not yet measured on a GPU.
"""

import torch
import triton
import triton.language as tl

from hasten.graph.aggregation.adjacency import Adjacency

WORD = 32  # bits of a word of the mask


def product(values: torch.Tensor, columns: torch.Tensor, adjacency: Adjacency, width: int, mean: bool) -> torch.Tensor:
    """``A @ Xs``, shape (rows, width); arguments as ``spgemm`` in ``kernels.py``, with (sources, k) matrices."""
    sources, k = values.shape
    words = triton.cdiv(width, WORD)
    masks = torch.empty(sources, words, dtype=torch.int32, device=values.device)
    starts = torch.empty_like(masks)
    lanes = triton.next_power_of_2(k)
    _mask_kernel[(sources, words)](columns, masks, starts, k, words, LANES=lanes)  # pyright: ignore[reportIndexIssue]
    out = values.new_empty(adjacency.num_rows, width)
    weights = _weights(adjacency, values)
    block = min(256, triton.next_power_of_2(width))
    grid = adjacency.num_rows, triton.cdiv(width, block)
    matrix = adjacency.indptr, adjacency.indices, weights
    options = {"WEIGHTED": adjacency.weights is not None, "MEAN": mean, "BLOCK": block}
    _product_kernel[grid](*matrix, values, masks, starts, out, k, words, width, **options)  # pyright: ignore[reportIndexIssue]
    return out


def sampled_product(gradient: torch.Tensor, columns: torch.Tensor, adjacency: Adjacency, mean: bool) -> torch.Tensor:
    """``A.T @ gradient`` at ``columns``, shape (sources, k); arguments as ``sspmm`` in ``kernels.py``."""
    k = columns.shape[1]
    out = gradient.new_zeros(columns.shape)
    matrix = adjacency.indptr, adjacency.indices, _weights(adjacency, gradient)
    lanes = triton.next_power_of_2(k)
    options = {"WEIGHTED": adjacency.weights is not None, "MEAN": mean, "LANES": lanes, "EDGES": max(1, 256 // lanes)}
    _sampled_kernel[(adjacency.num_rows,)](*matrix, gradient, columns, out, k, gradient.shape[1], **options)  # pyright: ignore[reportIndexIssue]
    return out


def _weights(adjacency: Adjacency, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(1) if adjacency.weights is None else adjacency.weights.to(like.dtype)


@triton.jit
def _mask_kernel(columns, masks, starts, k, words, LANES: tl.constexpr):  # noqa: N803
    """The mask of one word of 32 columns of one row, and the number of values in the words before it."""
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, LANES)
    column = tl.load(columns + row * k + lanes, mask=lanes < k, other=0).to(tl.int32)
    bits = tl.where((lanes < k) & (column // 32 == word), tl.full([LANES], 1, tl.int32) << (column % 32), 0)
    tl.store(masks + row * words + word, tl.sum(bits))  # all bits differ, so the sum is their union
    tl.store(starts + row * words + word, tl.sum(((lanes < k) & (column // 32 < word)).to(tl.int32)))


@triton.jit
def _product_kernel(
    indptr, indices, weights, values, masks, starts, out, k, words, width,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """``BLOCK`` columns of one row of the result."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    word, bit = columns // 32, (columns % 32).to(tl.uint32)
    first, last = tl.load(indptr + row), tl.load(indptr + row + 1)
    total = tl.zeros([BLOCK], values.dtype.element_ty)
    for edge in range(first, last):
        source = tl.load(indices + edge).to(tl.int64)
        mask = tl.load(masks + source * words + word, mask=inside, other=0).to(tl.uint32, bitcast=True)
        before = tl.load(starts + source * words + word, mask=inside, other=0)
        stored = ((mask >> bit) & 1) != 0
        place = before + _count_bits(mask & ((tl.full([BLOCK], 1, tl.uint32) << bit) - 1)).to(tl.int32)
        value = tl.load(values + source * k + place, mask=stored, other=0)
        total += value * tl.load(weights + edge) if WEIGHTED else value
    if MEAN:
        total = total / tl.maximum(last - first, 1).to(total.dtype)
    tl.store(out + row * width + columns, total, mask=inside)


@triton.jit
def _count_bits(word):
    """The number of ones of 32-bit words; LLVM compiles this pattern to one instruction."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) & 0xFFFFFFFF) >> 24


@triton.jit
def _sampled_kernel(
    indptr, indices, weights, gradient, columns, out, k, width,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, LANES: tl.constexpr, EDGES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The contributions of one row of the gradient to the sources of its edges, ``EDGES`` at once."""
    row = tl.program_id(0).to(tl.int64)
    first, last = tl.load(indptr + row), tl.load(indptr + row + 1)
    lanes, edges = tl.arange(0, LANES)[None, :], tl.arange(0, EDGES)[:, None]
    for start in range(first, last, EDGES):
        edge = start + edges
        source = tl.load(indices + edge, mask=edge < last, other=0).to(tl.int64)
        place = source * k + lanes
        inside = (edge < last) & (lanes < k)
        column = tl.load(columns + place, mask=inside, other=0).to(tl.int32)
        value = tl.load(gradient + row * width + column, mask=inside, other=0)
        if WEIGHTED:
            value = value * tl.load(weights + edge, mask=edge < last, other=0)
        if MEAN:
            value = value / (last - first).to(value.dtype)
        tl.atomic_add(out + place, value, mask=inside)
