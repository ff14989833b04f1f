"""Rows in memory, or in ``.npy`` files: tensors, NumPy arrays, and nestings of them."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

from hasten._torch_compat import in_place_version
from hasten.core.errors import ConfigurationError, format_error
from hasten.data.buffer_pool import acquire
from hasten.data.io.paths import file_signature, is_remote, plain
from hasten.data.pipeline import Pipeline
from hasten.data.source import Source, column_leaves, column_spec, map_columns

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def arrays(*columns) -> Pipeline:
    """Samples from arrays whose first dimension is the sample.

    Arrays are held, not copied. A cache over them sees what torch changes in them between two passes, not what NumPy does.

    Args:
        columns: tensors, NumPy arrays or paths of local ``.npy`` files (memory-mapped), all equally long; several become a
            tuple, or give one dict of them.

    Raises:
        Refusal: no column, a remote file, unequal lengths, an array of Python objects (it would have to be unpickled).
    """
    if not columns:
        raise ConfigurationError("arrays() wants at least one array")
    return Pipeline(Arrays(columns[0] if len(columns) == 1 else tuple(columns)))


class Arrays(Source):
    """Columns that can be indexed, in memory or memory-mapped."""

    def __init__(self, columns):
        if isinstance(columns, (dict, tuple)) and not columns:
            raise ConfigurationError("arrays() wants at least one array")
        self.given = map_columns(lambda column: _here(column) if isinstance(column, (str, Path)) else column, columns)
        self.digests: dict[tuple, str] = {}
        self._open()

    def __len__(self) -> int:
        return self.length

    def prepare(self, runner: Callable, faults) -> None:
        if self._stamps() != self.stamps:
            self._open()

    def read(self, rows: numpy.ndarray):
        index = torch.from_numpy(rows)
        return map_columns(lambda column: gathered(column, index), self.columns)

    def fingerprint(self) -> dict:
        """Files by their stamps; what lies in memory by its content."""
        columns = zip(column_leaves(self.columns), self.stamps, strict=True)
        return {
            "nesting": column_spec(self.columns),
            "columns": [of_file or self._content(column) for column, of_file in columns],
        }

    def _open(self) -> None:
        stamps = self._stamps()  # before the files are mapped: one that changes meanwhile is found changed
        columns = map_columns(_tensor, self.given)
        length, *others = sorted({len(column) for column in column_leaves(columns)})
        if others:
            raise ConfigurationError(f"the arrays have unequal lengths: {', '.join(map(str, (length, *others)))}")
        self.stamps, self.columns, self.length = stamps, columns, length

    def _stamps(self) -> list[list | None]:
        """Of each column that is a file."""
        return [file_signature(column) if isinstance(column, str) else None for column in column_leaves(self.given)]

    def _content(self, column: torch.Tensor) -> list:
        """Type, shape and hash; as long as torch has not written there, it is not read again."""
        kind = [str(column.dtype), list(column.shape)]
        if column.is_inference():
            return [*kind, _digest(column)]  # nobody counts how often it is written to
        key = (column.data_ptr(), in_place_version(column), *map(str, kind))
        if key not in self.digests:
            self.digests[key] = _digest(column)
        return [*kind, self.digests[key]]


def _here(path: str | Path) -> str:
    if is_remote(path):
        raise ConfigurationError(f"arrays are mapped into memory, from local files; copy {path} here first")
    return os.path.abspath(plain(path))


def gathered(column: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of a column, in memory that was used before."""
    rows = acquire((len(index), *column.shape[1:]), column.dtype)
    torch.index_select(signed(column), 0, index, out=signed(rows))
    return rows


def signed(column: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can index: it cannot do so with wide unsigned numbers."""
    return column.view(SIGNED[column.dtype]) if column.dtype in SIGNED else column


def _tensor(column) -> torch.Tensor:
    if isinstance(column, (str, Path)):
        column = opened_array(Path(column))
    if isinstance(column, numpy.ndarray):
        column = from_numpy_array(column)
    if not isinstance(column, torch.Tensor) or not column.ndim:
        raise ConfigurationError(
            f"arrays() wants tensors, NumPy arrays or .npy files with a row per sample, not {type(column).__name__}"
        )
    if column.device.type != "cpu":
        raise ConfigurationError(
            "arrays() reads from the computer's memory; give it .cpu() tensors, and take the batches to the device with .to()"
        )
    return column.detach().contiguous()


def from_numpy_array(array: numpy.ndarray) -> torch.Tensor:
    """The tensor of an array, without a copy where that is possible; it is only read from.

    Raises:
        Refusal: torch knows no such type.
    """
    if array.dtype.hasobject:
        raise ConfigurationError("an array of Python objects cannot be read without executing code; store numbers")
    try:
        with warnings.catch_warnings(action="ignore"):  # that it may not be written to: nobody does
            return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"an array of {array.dtype} is not what torch can hold: {format_error(error)}"
        ) from None


def opened_array(path: Path) -> numpy.ndarray:
    """A ``.npy`` file, memory-mapped.

    Raises:
        Refusal: it is not there, or holds no numbers.
    """
    try:
        return numpy.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or format_error(error)}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is no array of numbers: {format_error(error)}") from None


def _digest(column: torch.Tensor) -> str:
    return hashlib.blake2b(column.view(torch.uint8).numpy() if column.numel() else b"", digest_size=16).hexdigest()
