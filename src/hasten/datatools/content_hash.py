"""A hash of the values in a table or a set of columns, which does not depend on how the rows are split into chunks.

Each buffer of a column (values, lengths of its texts, positions of missing values) is hashed incrementally over all
chunks; the hash of the whole is a hash of those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy
import torch

from hasten.data.formats.table_columns import plain


class ContentHash:
    """An incremental hash of rows.

    Attributes:
        rows: number of rows hashed so far.
    """

    def __init__(self):
        self.rows, self._parts = 0, {}

    def add(self, columns: Mapping, rows: int) -> None:
        """Adds rows of the columns of a batch: tensors, and lists of text, bytes or tensors."""
        for name, column in columns.items():
            if isinstance(column, torch.Tensor):
                self._update(name, "shape", repr((column.dtype, *column.shape[1:])).encode(), once=True)
                self._update(name, "values", column.contiguous().reshape(-1).view(torch.uint8).numpy())
                continue
            pieces = [_bytes(value) for value in column]
            self._update(name, "lengths", numpy.fromiter(map(len, pieces), numpy.int64, len(pieces)))
            self._update(name, "values", b"".join(pieces))
        self.rows += rows

    def add_table(self, table) -> None:
        """Adds rows of an Arrow table."""
        for name in table.column_names:
            self._add_arrow(name, table.column(name).combine_chunks())
        self.rows += len(table)

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        parts = {str(key): part.hexdigest() for key, part in self._parts.items()}
        return hashlib.blake2b(repr(sorted(parts.items())).encode(), digest_size=16).hexdigest()

    def _add_arrow(self, name: str, array) -> None:
        """Adds an array of any type; lists and structs by their child arrays."""
        import pyarrow as pa
        import pyarrow.compute as compute
        import pyarrow.types as types

        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        array = array.cast(plain(array.type))
        kind = (
            type(array).__name__ if types.is_nested(array.type) else str(array.type)
        )  # the field of a list has different names in different files
        self._update(name, "type", kind.encode(), once=True)
        before = self._counted(name, len(array))
        if array.null_count:
            self._update(name, "missing", before + numpy.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)))
            array = array.drop_null()
        if types.is_struct(array.type):
            for field, inner in zip(array.type, array.flatten(), strict=True):
                self._add_arrow(f"{name}.{field.name}", inner)
        elif types.is_map(array.type):
            edges = array.offsets.to_numpy()
            self._update(name, "lengths", numpy.diff(edges).astype(numpy.int64))
            for inner, values in ((f"{name}.key", array.keys), (f"{name}.value", array.items)):
                self._add_arrow(inner, values.slice(edges[0], edges[-1] - edges[0]))
        elif types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
            if types.is_large_list(array.type):
                self._update(name, "lengths", compute.list_value_length(array).to_numpy(zero_copy_only=False))
            self._add_arrow(f"{name}[]", array.flatten())
        elif types.is_large_string(array.type) or types.is_large_binary(array.type):
            self._update(name, "lengths", compute.binary_length(array).to_numpy(zero_copy_only=False))
            self._update(name, "values", _text_of(array))
        elif types.is_boolean(array.type):
            self._update(name, "values", array.to_numpy(zero_copy_only=False))
        elif not types.is_null(array.type):
            width = array.type.bit_width // 8
            self._update(
                name,
                "values",
                memoryview(array.buffers()[1])[array.offset * width : (array.offset + len(array)) * width],
            )

    def _counted(self, name: str, more: int) -> int:
        """The number of values of a column, or of a child of it, before the last ``more``."""
        before = self._parts.setdefault((name, "count"), _Count())
        before.number += more
        return before.number - more

    def _update(self, name: str, part: str, content, once: bool = False) -> None:
        new = (name, part) not in self._parts
        hashed = self._parts.setdefault((name, part), hashlib.blake2b(digest_size=16))
        if new or not once:
            hashed.update(
                numpy.ascontiguousarray(content).view(numpy.uint8) if isinstance(content, numpy.ndarray) else content
            )


class _Count:
    number = 0

    def hexdigest(self) -> str:
        return str(self.number)


def _bytes(value) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return value.encode() if isinstance(value, str) else bytes(value)


def _text_of(array) -> memoryview:
    """The bytes of all texts, one after the other."""
    _, offsets, letters = array.buffers()
    if letters is None or not len(array):
        return memoryview(b"")
    edges = numpy.frombuffer(offsets, numpy.int64)[array.offset : array.offset + len(array) + 1]
    return memoryview(letters)[edges[0] : edges[-1]]
