"""A hash of the values in a table or a set of columns that does not depend on how the rows are split into chunks.

Each buffer of a column (values, lengths of its strings, positions of missing values) is hashed incrementally over all
chunks; the content hash is a hash of those.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch


class ContentHash:
    """An incremental hash of rows; ``rows`` is the number hashed so far."""

    def __init__(self):
        self.rows = 0
        self._hashes: dict[tuple[str, str], Any] = {}  # by column and buffer
        self._counts: dict[str, int] = {}  # values of each column, and of each child of a nested one

    def add(self, columns: Mapping, rows: int) -> None:
        """Adds ``rows`` rows to the hash: {name: tensor, or list of str, bytes or tensors}."""
        for name, column in columns.items():
            if isinstance(column, torch.Tensor):
                self._update(name, "shape", repr((column.dtype, *column.shape[1:])).encode(), once=True)
                self._update(name, "values", column.contiguous().reshape(-1).view(torch.uint8).numpy())
                continue
            values = [_to_bytes(value) for value in column]
            self._update(name, "lengths", numpy.fromiter(map(len, values), numpy.int64, len(values)))
            self._update(name, "values", b"".join(values))
        self.rows += rows

    def add_table(self, table: Any) -> None:
        """Adds the rows of an Arrow table to the hash."""
        for name in table.column_names:
            self._add_arrow(name, table.column(name).combine_chunks())
        self.rows += len(table)

    def hexdigest(self) -> str:
        """Returns the hash of all rows so far: 32 hexadecimal digits."""
        parts = {str(key): part.hexdigest() for key, part in self._hashes.items()}
        parts |= {str((name, "count")): str(values) for name, values in self._counts.items()}
        return hashlib.blake2b(repr(sorted(parts.items())).encode(), digest_size=16).hexdigest()

    def _add_arrow(self, name: str, array: Any) -> None:
        """Adds an Arrow array of any type to the hash of column ``name``; lists and structs by their children."""
        import pyarrow as pa
        import pyarrow.compute as compute
        import pyarrow.types as types

        from hasten.data.formats.table_types import plain

        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        array = array.cast(plain(array.type))
        # The fields of nested types have different names in different files.
        kind = type(array).__name__ if types.is_nested(array.type) else str(array.type)
        self._update(name, "type", kind.encode(), once=True)
        before = self._counts.get(name, 0)
        self._counts[name] = before + len(array)
        if array.null_count:
            self._update(name, "missing", before + numpy.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)))
            array = array.drop_null()
        if types.is_struct(array.type):
            for field, inner in zip(array.type, array.flatten(), strict=True):
                self._add_arrow(f"{name}.{field.name}", inner)
        elif types.is_map(array.type):
            offsets = array.offsets.to_numpy()
            self._update(name, "lengths", numpy.diff(offsets).astype(numpy.int64))
            for child, values in ((f"{name}.key", array.keys), (f"{name}.value", array.items)):
                self._add_arrow(child, values.slice(offsets[0], offsets[-1] - offsets[0]))
        elif types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
            if types.is_large_list(array.type):
                self._update(name, "lengths", array.value_lengths().to_numpy(zero_copy_only=False))
            self._add_arrow(f"{name}[]", array.flatten())
        elif types.is_large_string(array.type) or types.is_large_binary(array.type):
            lengths = compute.binary_length(array)  # pyright: ignore[reportAttributeAccessIssue]  # pyarrow generates it
            self._update(name, "lengths", lengths.to_numpy(zero_copy_only=False))
            self._update(name, "values", _string_bytes(array))
        elif types.is_boolean(array.type):
            self._update(name, "values", array.to_numpy(zero_copy_only=False))
        elif not types.is_null(array.type):
            width = array.type.bit_width // 8
            begin, end = array.offset * width, (array.offset + len(array)) * width
            self._update(name, "values", memoryview(array.buffers()[1])[begin:end])

    def _update(self, name: str, buffer: str, content: Any, once: bool = False) -> None:
        is_new = (name, buffer) not in self._hashes
        digest = self._hashes.setdefault((name, buffer), hashlib.blake2b(digest_size=16))
        if is_new or not once:
            is_array = isinstance(content, numpy.ndarray)
            digest.update(numpy.ascontiguousarray(content).view(numpy.uint8) if is_array else content)


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)


def _string_bytes(array: Any) -> memoryview:
    """The concatenated bytes of all strings of an Arrow array."""
    _, offsets, letters = array.buffers()
    if letters is None or not len(array):
        return memoryview(b"")
    ends = numpy.frombuffer(offsets, numpy.int64)[array.offset : array.offset + len(array) + 1]
    return memoryview(letters)[ends[0] : ends[-1]]
