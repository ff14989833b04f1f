"""From Arrow's columns to what batches are made of.

Numbers become tensors, all of them together a row-major matrix where they are the whole input; the rest stays as Arrow
holds it, packed, until its rows are asked for. Each column is made for a known number of rows, is given its pieces by
``put`` in their order, and then gives rows by ``read``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.data.formats.arrays import gathered
from hasten.data.formats.missing_values import filled, missing_whole
from hasten.data.formats.table_types import is_number, plain, shape_of, tensor_type

LARGEST = (1 << 63) - 1
BLOCK = 4096  # rows that are turned at a time: a block's columns stay in the processor's cache
WHOLE = 1 << 24  # up to here a float32 holds every whole number


def column(kind, rows: int, name: str):
    """An empty column for a plain Arrow type."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return Fields({field.name: column(plain(field.type), rows, f"{name}.{field.name}") for field in kind}, name)
    shape, inner = shape_of(kind)
    if is_number(inner) or (types.is_temporal(inner) and not types.is_interval(inner)):
        return Numbers(tensor_type(inner), rows, shape, name)
    return Others(name, kind)


class Numbers:
    """One tensor, (rows, ...). ``dtype`` may be another one than the file's."""

    def __init__(self, dtype: torch.dtype, rows: int, shape: tuple[int, ...] = (), name: str = ""):
        self.tensor, self.name, self._filled = torch.empty((rows, *shape), dtype=dtype), name, 0

    def put(self, array, fill, where: str) -> None:
        values = numbers_of(array, fill, self.name, where)
        if values.dtype == numpy.uint64 and len(values) and values.max() > LARGEST:
            raise ConfigurationError(
                f"column {self.name!r} holds {values.max()} in {where}; a tensor holds whole numbers up to {LARGEST}: leave it out"
            )
        self.tensor.numpy()[self._filled : self._filled + len(array)] = values.reshape(
            len(array), *self.tensor.shape[1:]
        )
        self._filled += len(array)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        return gathered(self.tensor, index)


class Matrix:
    """Many columns of numbers as one float32 tensor, shape (rows, columns), row-major.

    ``pyarrow.RecordBatch.to_tensor(row_major=True)`` does the same in twice the time: 12 ms instead of 6.3 ms for 200,000 rows of 20
    float32 columns (pyarrow 26, one core).

    Args:
        told: Columns that are known to be rounded.
    """

    def __init__(self, names: Sequence[str], rows: int, told: set[str]):
        self.tensor, self.names, self._filled = torch.empty((rows, len(names)), dtype=torch.float32), names, 0
        self._told = told

    def put(self, table, fill, where: str) -> None:
        columns = [numbers_of(table.column(name), fill, name, where) for name in self.names]
        self._tell_of_rounding(columns)
        out = self.tensor.numpy()[self._filled : self._filled + len(table)]
        for first in range(0, len(table), BLOCK):
            block = out[first : first + BLOCK]
            for number, values in enumerate(columns):
                block[:, number] = values[first : first + BLOCK]
        self._filled += len(table)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        return gathered(self.tensor, index)

    def _tell_of_rounding(self, columns: list[numpy.ndarray]) -> None:
        """Numbers that are names of something, or times, would become those of others without a word."""
        for name, values in zip(self.names, columns, strict=True):
            if name in self._told or values.dtype.kind not in "iu" or values.dtype.itemsize < 4 or not len(values):
                continue
            if (largest := max(int(values.max()), -int(values.min()))) > WHOLE:
                self._told.add(name)
                what = f"column {name!r} holds whole numbers as big as {largest}, and in a float32 matrix those above {WHOLE} are rounded"
                warnings.warn(
                    f"{what}; leave it out (columns=[...]), or take a dict of columns (no target=)",
                    HastenWarning,
                    stacklevel=2,
                )


class Classes:
    """Text or dictionary entries as the numbers of their classes, one int64 tensor."""

    def __init__(self, classes: Sequence[str], rows: int, name: str):
        import pyarrow as pa

        self._numbers, self._known, self.name = (
            Numbers(torch.int64, rows, (), name),
            pa.array(classes, pa.large_string()),
            name,
        )

    def put(self, array, fill, where: str) -> None:
        import pyarrow as pa
        import pyarrow.compute as compute

        words = filled(
            _whole(array).cast(pa.large_string()), fill, self.name, where
        )  # where all are missing, they have no type
        numbers = compute.index_in(words, self._known)
        if numbers.null_count:
            stranger = words.filter(compute.is_null(numbers))[0].as_py()
            known = ", ".join(self._known.slice(0, 10).to_pylist())
            raise ConfigurationError(
                f"column {self.name!r} holds {stranger!r} in {where}, which is none of its classes: {known}"
            )
        self._numbers.put(numbers, None, where)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        return self._numbers.read(index)


class Others:
    """Text, bytes, lists of unequal length: a Python list of rows; rows that are lists of numbers are tensors."""

    def __init__(self, name: str, kind):
        import pyarrow.types as types

        self.name, self._kind, self._pieces = name, kind, []
        self._holds_numbers = types.is_large_list(kind) and is_number(kind.value_type)

    def put(self, array, fill, where: str) -> None:
        import pyarrow as pa
        import pyarrow.compute as compute

        array = filled(_whole(array).cast(self._kind), fill, self.name, where)
        if self._holds_numbers and array.flatten().null_count:
            starts = compute.subtract(array.offsets, array.offsets[0])
            array = pa.LargeListArray.from_arrays(starts, filled(array.flatten(), fill, self.name, where))
        self._pieces.append(array)

    def read(self, index: torch.Tensor) -> list:
        import pyarrow as pa

        if len(self._pieces) != 1:
            self._pieces = [pa.chunked_array(self._pieces, self._kind).combine_chunks()]
        rows = self._pieces[0].take(pa.array(index.numpy()))
        if not self._holds_numbers:
            return rows.to_pylist()
        values = Numbers(tensor_type(self._kind.value_type), len(rows.flatten()), (), self.name)
        values.put(rows.flatten(), None, "the rows of a batch")
        return list(values.tensor.split(numpy.diff(rows.offsets.to_numpy()).tolist()))


class Fields:
    """A struct: a dict of its columns."""

    def __init__(self, columns: dict[str, Any], name: str):
        self._columns, self.name = columns, name

    def put(self, array, fill, where: str) -> None:
        array = _whole(array)
        if array.null_count:
            raise ConfigurationError(missing_whole(self.name, array, where))
        for number, column in enumerate(self._columns.values()):
            column.put(array.field(number), fill, where)

    def read(self, index: torch.Tensor) -> dict:
        return {name: column.read(index) for name, column in self._columns.items()}


def numbers_of(array, fill, name: str, where: str) -> numpy.ndarray:
    """A column's numbers, those of its lists one after the other; without a copy where Arrow's memory can be used.

    Raises:
        Refusal: some are missing, and there is nothing to fill them with.
    """
    import pyarrow as pa
    import pyarrow.types as types

    array = _whole(array)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    while types.is_fixed_size_list(array.type):
        if array.null_count:
            raise ConfigurationError(missing_whole(name, array, where))
        array = array.flatten()
    array = filled(array, fill, name, where)
    if types.is_decimal(array.type):
        array = array.cast(pa.float64())
    elif types.is_temporal(array.type):
        array = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())
    return array.to_numpy(zero_copy_only=False)


def _whole(array):
    """One array of a plain type, of a column that may come in several pieces."""
    import pyarrow as pa
    import pyarrow.compute as compute

    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(array, pa.RunEndEncodedArray):
        array = compute.run_end_decode(array)
    kind = plain(array.type)
    return array if array.type == kind else array.cast(kind)
