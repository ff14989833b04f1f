"""Arrow types: which are numbers, which torch dtypes hold them, which of them are treated alike."""

from typing import Any

import pyarrow as pa
import pyarrow.types as types
import torch

TORCH_DTYPES = {
    "bool": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.int64,
    "halffloat": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "null": torch.float32,
}


def is_number(arrow_type: Any) -> bool:
    """Whether a column of this Arrow type can be in a float matrix: integers, floats, decimals, booleans; not times."""
    return str(arrow_type) in TORCH_DTYPES or types.is_decimal(arrow_type)


def plain(arrow_type: Any) -> Any:
    """Returns the Arrow type to which a column is converted when it is read. Dictionary and run-end encodings become
    their value type; text, bytes and lists get 64-bit offsets.
    """
    if types.is_dictionary(arrow_type) or types.is_run_end_encoded(arrow_type):
        return plain(arrow_type.value_type)
    if types.is_string(arrow_type) or types.is_string_view(arrow_type):
        return pa.large_string()
    if types.is_binary(arrow_type) or types.is_binary_view(arrow_type):
        return pa.large_binary()
    is_list = types.is_list(arrow_type) or types.is_list_view(arrow_type)
    return pa.large_list(arrow_type.value_type) if is_list else arrow_type


def shape_of(arrow_type: Any) -> tuple[tuple[int, ...], Any]:
    """Returns (shape of a row, type of its elements); nested lists of fixed sizes are dimensions."""
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        return tuple(arrow_type.shape), arrow_type.value_type
    shape = ()
    while types.is_fixed_size_list(arrow_type):
        shape, arrow_type = (*shape, arrow_type.list_size), arrow_type.value_type
    return shape, arrow_type


def tensor_type(arrow_type: Any) -> torch.dtype:
    """Returns the dtype that holds the values of an Arrow type; a time is the int64 count of its unit."""
    return torch.float64 if types.is_decimal(arrow_type) else TORCH_DTYPES.get(str(arrow_type), torch.int64)


def has_references(arrow_type: Any) -> bool:
    """Whether columns of this type contain offsets or indices of values, which damage may point outside the column."""
    return not (types.is_primitive(arrow_type) or types.is_null(arrow_type) or types.is_decimal(arrow_type))
