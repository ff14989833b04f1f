"""Arrow's types: which are numbers, which tensors hold them, which of them are the same to us."""

from __future__ import annotations

from typing import Any

import torch

TENSORS = {
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


def is_number(kind) -> bool:
    """Whether an Arrow type can be one column of a float matrix: whole numbers, fractions, yes and no; times cannot."""
    import pyarrow.types as types

    return str(kind) in TENSORS or types.is_decimal(kind)


def plain(kind):
    """The Arrow type under which a column is treated: dictionaries as their entries, text, bytes and lists with 64-bit offsets."""
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if types.is_string(kind) or types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary(kind) or types.is_binary_view(kind):
        return pa.large_binary()
    return pa.large_list(kind.value_type) if types.is_list(kind) or types.is_list_view(kind) else kind


def shape_of(kind) -> tuple[tuple[int, ...], Any]:
    """The shape of a row, and the type of what is in it: lists of a fixed size nest."""
    import pyarrow as pa
    import pyarrow.types as types

    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape), kind.value_type
    shape = ()
    while types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    return shape, kind


def tensor_type(kind) -> torch.dtype:
    """The dtype that holds the values of an Arrow type."""
    import pyarrow.types as types

    return (
        torch.float64 if types.is_decimal(kind) else TENSORS.get(str(kind), torch.int64)
    )  # a time is its count of units


def leads_elsewhere(kind) -> bool:
    """Whether a column of an Arrow type tells where its values are: text, lists and dictionaries do, by numbers that may be damaged."""
    import pyarrow.types as types

    return not (types.is_primitive(kind) or types.is_null(kind) or types.is_decimal(kind))
