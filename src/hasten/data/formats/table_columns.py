"""Columns of a batch from the columns of an Arrow table.

Numbers become tensors; with a target, and if all inputs are numbers, one row-major matrix. Other columns stay Arrow
arrays until their rows are returned: ``take`` selects rows of both, ``unpacked`` turns the arrays into lists.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.types as types
import torch

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.data.array_source import from_numpy_array, gathered
from hasten.data.formats.missing_values import check_no_nulls, filled
from hasten.data.formats.table_layout import Layout
from hasten.data.formats.table_types import is_number, plain, shape_of, tensor_type
from hasten.data.source import column_leaves, map_columns

MAX_INT64 = (1 << 63) - 1
MAX_EXACT_FLOAT32 = 1 << 24  # up to here float32 represents every integer


def columns_of(table: Any, layout: Layout, fill: Any, classes: Sequence[str] | None, where: str) -> Any:
    """Returns the columns of all rows of an Arrow table: a matrix or a dict; with a target (inputs, target).

    ``fill`` and ``classes`` are those of ``parquet``; ``where`` is the file and chunk, for errors. ConfigurationError
    for missing values, and for a target that is not one of its classes.
    """
    if layout.is_matrix:
        inputs = _matrix(table, layout, fill, where)
    else:
        inputs = {name: _column(table.column(name), layout.types[name], fill, name, where) for name in layout.inputs}
    if layout.target is None:
        return inputs
    array, fill = table.column(layout.target), fill if isinstance(fill, Mapping) else {}  # one number is no target
    if layout.has_classes:
        return inputs, _class_indices(array, classes or [], fill, layout.target, where)
    shape, element = shape_of(layout.types[layout.target])
    dtype = torch.float32 if tensor_type(element).is_floating_point else torch.int64
    return inputs, _numbers(array, dtype, shape, fill, layout.target, where)


def take(columns: Any, rows: torch.Tensor) -> Any:
    """Returns the rows of columns at these indices."""
    indices = pa.array(rows.numpy())

    def take_column(column: Any) -> Any:
        return gathered(column, rows) if isinstance(column, torch.Tensor) else column.take(indices)

    return map_columns(take_column, columns)


def concatenated(parts: list) -> Any:
    """Returns the rows of all parts, which have the same columns, one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*map(column_leaves, parts), strict=True)
    return map_columns(lambda _: _concatenated(next(columns)), parts[0])


def unpacked(columns: Any) -> Any:
    """Returns columns in which Arrow arrays are lists: of str, bytes or Python values, or of tensors for numbers."""
    return map_columns(lambda column: column if isinstance(column, torch.Tensor) else _to_list(column), columns)


def _matrix(table: Any, layout: Layout, fill: Any, where: str) -> torch.Tensor:
    columns = [_to_numpy(table.column(name), fill, name, where) for name in layout.inputs]
    for name, values in zip(layout.inputs, columns, strict=True):
        _warn_of_rounding(name, values, layout.warned)
    return torch.from_numpy(numpy.stack(columns, axis=1, dtype=numpy.float32, casting="unsafe"))


def _warn_of_rounding(name: str, values: numpy.ndarray, warned: set[str]) -> None:
    """Warns once per column of integers above 2**24: float32 rounds them, so that different ones become equal."""
    if name in warned or values.dtype.kind not in "iu" or values.dtype.itemsize < 4 or not len(values):
        return
    largest = max(int(values.max()), -int(values.min()))
    if largest > MAX_EXACT_FLOAT32:
        warned.add(name)
        what = f"column {name!r} holds integers up to {largest}; a float32 matrix rounds above {MAX_EXACT_FLOAT32}"
        hint = "leave it out (columns=[...]), or read a dict of columns (no target=)"
        warnings.warn(f"{what}; {hint}", HastenWarning, stacklevel=2)


def _column(array: Any, arrow_type: Any, fill: Any, name: str, where: str) -> Any:
    """Returns a column of a plain Arrow type (see ``table_types.plain``); a struct as a dict of its columns."""
    if types.is_struct(arrow_type):
        array = _to_plain_array(array)
        check_no_nulls(name, array, where)
        return {
            field.name: _column(array.field(index), plain(field.type), fill, f"{name}.{field.name}", where)
            for index, field in enumerate(arrow_type)
        }
    shape, element = shape_of(arrow_type)
    if is_number(element) or (types.is_temporal(element) and not types.is_interval(element)):
        return _numbers(array, tensor_type(element), shape, fill, name, where)
    array = filled(_to_plain_array(array).cast(arrow_type), fill, name, where)
    if not _holds_numbers(arrow_type):
        return array
    if array.flatten().null_count:
        starts = compute.subtract(array.offsets, array.offsets[0])  # pyright: ignore[reportAttributeAccessIssue]
        array = pa.LargeListArray.from_arrays(starts, filled(array.flatten(), fill, name, where))
    _numbers_of(array, name, where)  # raises now for numbers that no tensor can hold
    return array


def _numbers(array: Any, dtype: torch.dtype, shape: tuple[int, ...], fill: Any, name: str, where: str) -> torch.Tensor:
    """Returns a numeric column as a tensor of shape (rows, *shape)."""
    values = _to_numpy(array, fill, name, where)
    if values.dtype == numpy.uint64 and len(values) and values.max() > MAX_INT64:
        advice = f"a tensor holds integers up to {MAX_INT64}: leave the column out"
        raise ConfigurationError(f"column {name!r} holds {values.max()} in {where}; {advice}")
    converted = values.astype(torch.empty(0, dtype=dtype).numpy().dtype, copy=False)
    return from_numpy_array(converted).reshape(len(array), *shape)


def _class_indices(array: Any, classes: Sequence[str], fill: Any, name: str, where: str) -> torch.Tensor:
    """Returns a text column as the indices of its values in ``classes``: int64, shape (rows,)."""
    # the cast gives a type to a chunk in which all values are missing
    words, known = _to_plain_array(array).cast(pa.large_string()), pa.array(classes, pa.large_string())
    words = filled(words, fill, name, where)
    indices = compute.index_in(words, known)  # pyright: ignore[reportAttributeAccessIssue]  # pyarrow generates it
    if indices.null_count:
        unknown = words.filter(indices.is_null())[0].as_py()
        problem = f"which is not one of its classes: {', '.join(classes[:10])}"
        raise ConfigurationError(f"column {name!r} holds {unknown!r} in {where}, {problem}")
    return _numbers(indices, torch.int64, (), None, name, where)


def _to_numpy(array: Any, fill: Any, name: str, where: str) -> numpy.ndarray:
    """Returns the numbers of a column, flattened if rows are lists; without a copy if Arrow's memory can be used."""
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
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(array, pa.RunEndEncodedArray):
        array = compute.run_end_decode(array)  # pyright: ignore[reportAttributeAccessIssue]
    arrow_type = plain(array.type)
    return array if array.type == arrow_type else array.cast(arrow_type)


def _holds_numbers(arrow_type: Any) -> bool:
    return types.is_large_list(arrow_type) and is_number(arrow_type.value_type)


def _concatenated(columns: Sequence) -> Any:
    return torch.cat(list(columns)) if isinstance(columns[0], torch.Tensor) else pa.concat_arrays(columns)


def _to_list(array: Any) -> list:
    """Returns the rows of an Arrow array."""
    if not _holds_numbers(array.type):
        return array.to_pylist()
    return list(_numbers_of(array).split(numpy.diff(array.offsets.to_numpy()).tolist()))


def _numbers_of(lists: Any, name: str = "", where: str = "") -> torch.Tensor:
    """Returns the numbers of all lists, one after the other."""
    values = lists.flatten()
    return _numbers(values, tensor_type(values.type), (), None, name, where)
