"""Columns of a table in memory, from Arrow arrays to what batches consist of.

Numbers become tensors; if all inputs are numbers, together one row-major matrix. Other columns stay in Arrow's packed
form until their rows are read. Every column is created for a known number of rows, receives its chunks in order by
``put``, and returns rows by ``read``.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.types as types
import torch

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.data.array_source import gathered
from hasten.data.formats.missing_values import check_no_nulls, filled
from hasten.data.formats.table_types import is_number, plain, shape_of, tensor_type

MAX_INT64 = (1 << 63) - 1
BLOCK = 4096  # rows that are transposed at a time, so that their columns stay in the processor's cache
MAX_EXACT_FLOAT32 = 1 << 24  # up to here float32 represents every integer


def column(arrow_type: Any, rows: int, name: str) -> Any:
    """Returns an empty column for ``rows`` values of a plain Arrow type (see ``table_types.plain``)."""
    if types.is_struct(arrow_type):
        fields = {field.name: column(plain(field.type), rows, f"{name}.{field.name}") for field in arrow_type}
        return StructColumn(fields, name)
    shape, element = shape_of(arrow_type)
    if is_number(element) or (types.is_temporal(element) and not types.is_interval(element)):
        return NumberColumn(tensor_type(element), rows, shape, name)
    return ListColumn(name, arrow_type)


class NumberColumn:
    """A numeric column as one tensor of shape (rows, *shape), converted to ``dtype``."""

    def __init__(self, dtype: torch.dtype, rows: int, shape: tuple[int, ...] = (), name: str = "") -> None:
        self.tensor, self.name, self._filled = torch.empty((rows, *shape), dtype=dtype), name, 0

    def put(self, array: Any, fill: Any, where: str) -> None:
        values = to_numbers(array, fill, self.name, where)
        if values.dtype == numpy.uint64 and len(values) and values.max() > MAX_INT64:
            advice = f"a tensor holds integers up to {MAX_INT64}: leave the column out"
            raise ConfigurationError(f"column {self.name!r} holds {values.max()} in {where}; {advice}")
        rows = values.reshape(len(array), *self.tensor.shape[1:])
        self.tensor.numpy()[self._filled : self._filled + len(array)] = rows
        self._filled += len(array)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        return gathered(self.tensor, index)


class MatrixColumn(NumberColumn):
    """Many numeric columns as one float32 tensor, shape (rows, columns), row-major.

    ``pyarrow.RecordBatch.to_tensor(row_major=True)`` does the same in twice the time: 12 ms instead of 6.3 ms for
    200,000 rows of 20 float32 columns (pyarrow 26, one core). ``warned`` collects the columns about whose rounding the
    user has been warned.
    """

    def __init__(self, names: Sequence[str], rows: int, warned: set[str]) -> None:
        super().__init__(torch.float32, rows, (len(names),))
        self.names, self._warned = names, warned

    def put(self, table: Any, fill: Any, where: str) -> None:
        columns = [to_numbers(table.column(name), fill, name, where) for name in self.names]
        self._warn_of_rounding(columns)
        out = self.tensor.numpy()[self._filled : self._filled + len(table)]
        for first in range(0, len(table), BLOCK):
            block = out[first : first + BLOCK]
            for index, values in enumerate(columns):
                block[:, index] = values[first : first + BLOCK]
        self._filled += len(table)

    def _warn_of_rounding(self, columns: list[numpy.ndarray]) -> None:
        """Warns once per column of integers above 2**24: float32 rounds them, so that different ones become equal."""
        for name, values in zip(self.names, columns, strict=True):
            if name in self._warned or values.dtype.kind not in "iu" or values.dtype.itemsize < 4 or not len(values):
                continue
            largest = max(int(values.max()), -int(values.min()))
            if largest > MAX_EXACT_FLOAT32:
                self._warned.add(name)
                limit = f"a float32 matrix rounds above {MAX_EXACT_FLOAT32}"
                what = f"column {name!r} holds integers up to {largest}; {limit}"
                hint = "leave it out (columns=[...]), or read a dict of columns (no target=)"
                warnings.warn(f"{what}; {hint}", HastenWarning, stacklevel=2)


class ClassColumn(NumberColumn):
    """A text target as class indices: one int64 tensor. Arrow dictionaries of text are accepted, too."""

    def __init__(self, classes: Sequence[str], rows: int, name: str) -> None:
        super().__init__(torch.int64, rows, (), name)
        self._classes = pa.array(classes, pa.large_string())

    def put(self, array: Any, fill: Any, where: str) -> None:
        # the cast gives a type to a chunk in which all values are missing
        words = filled(_to_plain_array(array).cast(pa.large_string()), fill, self.name, where)
        indices = compute.index_in(words, self._classes)  # pyright: ignore[reportAttributeAccessIssue]  # pyarrow generates it
        if indices.null_count:
            unknown = words.filter(indices.is_null())[0].as_py()
            classes = ", ".join(self._classes.slice(0, 10).to_pylist())
            problem = f"which is not one of its classes: {classes}; add it to classes="
            raise ConfigurationError(f"column {self.name!r} holds {unknown!r} in {where}, {problem}")
        super().put(indices, None, where)


class ListColumn:
    """Text, bytes or lists of different lengths: returned as a list of rows; a row of numbers is a tensor."""

    def __init__(self, name: str, arrow_type: Any) -> None:
        self.name, self._type, self._chunks = name, arrow_type, []
        self._holds_numbers = types.is_large_list(arrow_type) and is_number(arrow_type.value_type)

    def put(self, array: Any, fill: Any, where: str) -> None:
        array = filled(_to_plain_array(array).cast(self._type), fill, self.name, where)
        if self._holds_numbers and array.flatten().null_count:
            starts = compute.subtract(array.offsets, array.offsets[0])  # pyright: ignore[reportAttributeAccessIssue]
            array = pa.LargeListArray.from_arrays(starts, filled(array.flatten(), fill, self.name, where))
        self._chunks.append(array)

    def read(self, index: torch.Tensor) -> list:
        if len(self._chunks) != 1:
            self._chunks = [pa.chunked_array(self._chunks, self._type).combine_chunks()]
        rows = self._chunks[0].take(pa.array(index.numpy()))
        if not self._holds_numbers:
            return rows.to_pylist()
        values = NumberColumn(tensor_type(self._type.value_type), len(rows.flatten()), (), self.name)
        values.put(rows.flatten(), None, "the rows of a batch")
        return list(values.tensor.split(numpy.diff(rows.offsets.to_numpy()).tolist()))


class StructColumn:
    """A struct column: returned as a dict of its columns."""

    def __init__(self, columns: dict[str, Any], name: str) -> None:
        self._columns, self.name = columns, name

    def put(self, array: Any, fill: Any, where: str) -> None:
        array = _to_plain_array(array)
        check_no_nulls(self.name, array, where)
        for index, child in enumerate(self._columns.values()):
            child.put(array.field(index), fill, where)

    def read(self, index: torch.Tensor) -> dict:
        return {name: child.read(index) for name, child in self._columns.items()}


def to_numbers(array: Any, fill: Any, name: str, where: str) -> numpy.ndarray:
    """Returns the values of a column, 1-d, the missing ones filled: lists of fixed size flattened, decimals as float64,
    times as integers. Without a copy if Arrow's memory can be used.
    """
    array = _to_plain_array(array)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    while types.is_fixed_size_list(array.type):
        check_no_nulls(name, array, where)
        array = array.flatten()
    array = filled(array, fill, name, where)
    if types.is_decimal(array.type):
        array = array.cast(pa.float64())
    elif types.is_temporal(array.type):
        array = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())
    return array.to_numpy(zero_copy_only=False)


def _to_plain_array(array: Any) -> Any:
    """Returns a column, which may have several chunks, as one array of its plain type."""
    if isinstance(array, pa.ChunkedArray):
        if types.is_string(array.type) or types.is_binary(array.type):  # 32-bit offsets end at 2 GB
            array = array.cast(plain(array.type))
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(array, pa.RunEndEncodedArray):
        array = compute.run_end_decode(array)  # pyright: ignore[reportAttributeAccessIssue]
    arrow_type = plain(array.type)
    return array if array.type == arrow_type else array.cast(arrow_type)
