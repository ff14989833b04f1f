"""Compressed balanced sparse rows (CBSR): a matrix with exactly k values per row, hence without row pointers.

Format of MaxK-GNN, arXiv 2312.08656. The columns take one byte up to a width of 256, two up to 32,768,
otherwise four.
"""

from dataclasses import InitVar, dataclass

import torch

from hasten.core.errors import ConfigurationError
from hasten.graph.sampling.checks import out_of_range


@dataclass(frozen=True, eq=False)
class CBSR:
    """A matrix of shape (n, width) with k values per row.

    Attributes:
        values: Float, shape (n, k). Gradients of an aggregation arrive here.
        columns: Column of each value, ascending in every row, of the type ``column_dtype(width)``, shape (n, k).
        width: Columns of the matrix.

    Args:
        check_invariants: Whether to read all columns and check them. ``aggregate`` reads and writes memory at these
            positions without a check; False is for columns that are right by construction.

    Raises:
        ConfigurationError: The shapes differ, or the columns are of another type, out of range or not ascending.
    """

    values: torch.Tensor
    columns: torch.Tensor
    width: int
    check_invariants: InitVar[bool] = True

    def __post_init__(self, check_invariants: bool) -> None:
        shape, dtype = tuple(self.values.shape), column_dtype(self.width)
        if self.values.ndim != 2 or self.columns.shape != self.values.shape or shape[1] > self.width:
            raise ConfigurationError(
                f"values of shape {shape} and columns of shape {tuple(self.columns.shape)}; expected both (n, k), "
                f"k at most the width {self.width}"
            )
        if self.columns.dtype != dtype:
            raise ConfigurationError(f"columns of type {self.columns.dtype}; expected {dtype} for width {self.width}")
        if not check_invariants or self.columns.is_meta:
            return
        if (wrong := out_of_range(self.columns, self.width)) is not None:
            raise ConfigurationError(f"column {wrong} is out of range: the matrix has {self.width} columns")
        if bool((is_wrong := (self.columns[:, 1:] <= self.columns[:, :-1]).any(1)).any()):
            row = int(is_wrong.nonzero()[0])
            raise ConfigurationError(f"the columns of row {row} do not ascend; sort each row, without duplicates")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.width

    def to_dense(self) -> torch.Tensor:
        """The matrix with its zeros, shape (n, width); gradients pass to ``values``."""
        return self.values.new_zeros(self.shape).scatter(1, self.columns.long(), self.values)


def column_dtype(width: int) -> torch.dtype:
    """The smallest type that holds the columns of a matrix: uint8, int16 or int32."""
    return torch.uint8 if width <= 256 else torch.int16 if width <= 2**15 else torch.int32
