"""Rows in memory or in ``.npy`` files: tensors, NumPy arrays, and nestings of them."""

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from hasten._torch_compat import in_place_version
from hasten.core.errors import ConfigurationError, format_error
from hasten.data.buffer_pool import acquire
from hasten.data.io.conversion_manifest import stored_classes
from hasten.data.io.paths import file_signature, is_remote, plain
from hasten.data.source import BadRowPolicy, Source, WrappedSource, column_leaves, map_columns
from hasten.utils.batch import copy_to_device

ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # first bytes of files that ``numpy.load`` returns as several arrays
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Arrays(Source):
    """A data source over columns in memory or memory-mapped ``.npy`` files."""

    def __init__(self, columns: Any) -> None:
        if isinstance(columns, (dict, tuple)) and not columns:
            raise ConfigurationError("arrays() requires at least one array")
        self.args = map_columns(lambda item: _local_path(item) if isinstance(item, (str, Path)) else item, columns)
        self.digests: dict[tuple, str] = {}
        self._open()

    def __len__(self) -> int:
        return self.length

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes by index, if the files were converted from a text target or directories."""
        return stored_classes([item for item in column_leaves(self.args) if isinstance(item, str)])

    def prepare(self, runner: Callable, faults: BadRowPolicy) -> None:
        if self._signatures() != self.signatures:
            self._open()

    def read(self, rows: numpy.ndarray) -> Any:
        index = torch.from_numpy(rows)
        return map_columns(lambda column: gathered(column, index), self.columns)

    def fingerprint(self) -> dict:
        """Returns the signatures of files, and a hash of the content of arrays in memory."""
        columns = zip(column_leaves(self.columns), self.signatures, strict=True)
        return {
            "nesting": str(map_columns(lambda column: 0, self.columns)),
            "columns": [signature or self._content(column) for column, signature in columns],
        }

    def _open(self) -> None:
        signatures = self._signatures()  # before the files are mapped, so that a change meanwhile is noticed
        columns = map_columns(_to_tensor, self.args)
        length, *others = sorted({len(column) for column in column_leaves(columns)})
        if others:
            raise ConfigurationError(f"the arrays have unequal lengths: {', '.join(map(str, (length, *others)))}")
        self.signatures, self.columns, self.length = signatures, columns, length

    def _signatures(self) -> list[list | None]:
        """Returns path, size and times of the file of each column; None for a column in memory."""
        return [file_signature(item) if isinstance(item, str) else None for item in column_leaves(self.args)]

    def _content(self, column: Any) -> list:
        """Returns dtype, shape and hash of a column in memory; hashed again only after torch has written to it."""
        form = [str(column.dtype), list(column.shape)]
        if column.is_inference():
            return [*form, _digest(column)]  # inference tensors have no version counter
        key = (column.data_ptr(), in_place_version(column), *map(str, form))
        if key not in self.digests:
            self.digests[key] = _digest(column)
        return [*form, self.digests[key]]


class DeviceArrays(WrappedSource):
    """The rows of ``Arrays``, on a device, to which all are copied at the first read and after files have changed."""

    def __init__(self, source: Arrays, device: torch.device) -> None:
        super().__init__(source)
        self.arrays, self.device = source, device
        self.copied_columns, self.columns = None, None

    def read(self, rows: numpy.ndarray) -> Any:
        if self.copied_columns is not self.arrays.columns:  # at first, and after files have changed
            self.copied_columns = self.arrays.columns
            self.columns = map_columns(lambda column: column.to(self.device), self.arrays.columns)
        index = copy_to_device(torch.from_numpy(rows), self.device)
        return map_columns(lambda column: column.index_select(0, index), self.columns)

    def fingerprint(self) -> dict:
        return self.source.fingerprint()


def _local_path(path: str | Path) -> str:
    if is_remote(path):
        raise ConfigurationError(f"arrays() maps local files into memory; copy {path} to this machine first")
    return os.path.abspath(plain(path))


def gathered(column: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a column at ``index``, copied into memory of the buffer pool."""
    rows = acquire((len(index), *column.shape[1:]), column.dtype)
    torch.index_select(signed(column), 0, index, out=signed(rows))
    return rows


def signed(column: torch.Tensor) -> torch.Tensor:
    """Returns uint16, uint32 and uint64 as signed views of the same memory, since torch cannot index unsigned."""
    return column.view(SIGNED[column.dtype]) if column.dtype in SIGNED else column


def _to_tensor(column: Any) -> torch.Tensor:
    if isinstance(column, (str, Path)):
        column = open_array(Path(column))
    if isinstance(column, numpy.ndarray):
        column = from_numpy_array(column)
    if not isinstance(column, torch.Tensor) or not column.ndim:
        kinds = "tensors, NumPy arrays or .npy files whose first dimension is the sample"
        raise ConfigurationError(f"arrays() expects {kinds}, not {type(column).__name__}")
    if column.device.type != "cpu":
        advice = "pass .cpu() tensors, and move the batches with .to(device)"
        raise ConfigurationError(f"arrays() reads from CPU memory; {advice}")
    return column.detach().contiguous()


def from_numpy_array(array: numpy.ndarray) -> torch.Tensor:
    """Returns the array as a tensor to read from, without a copy if possible; ConfigurationError for Python objects,
    and for a dtype that torch lacks.
    """
    if array.dtype.hasobject:
        raise ConfigurationError("an array of Python objects cannot be read without executing code; store numbers")
    try:
        with warnings.catch_warnings(action="ignore"):  # about read-only arrays
            return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"torch cannot hold an array of {array.dtype}: {format_error(error)}") from None


def open_array(path: Path) -> numpy.ndarray:
    """Returns a ``.npy`` file, memory-mapped; ConfigurationError if it cannot be read or does not hold numbers."""
    try:
        with open(path, "rb") as file:
            is_zip = file.read(len(ZIP_MAGICS[0])) in ZIP_MAGICS
        if not is_zip:
            return numpy.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or format_error(error)}") from None
    except Exception as error:  # NumPy parses the header as Python, so a damaged one raises nearly any type
        raise ConfigurationError(f"{path} is not an array of numbers: {format_error(error)}") from None
    raise ConfigurationError(f"{path} is a zip archive, not one array; unpack the .npy files in it")


def _digest(column: torch.Tensor) -> str:
    content = column.view(torch.uint8).numpy().data if column.numel() else b""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
