"""Token files: windows of text for language models, read straight from memory-mapped files.

``.bin`` files hold bare numbers, as nanoGPT writes them (https://github.com/karpathy/nanoGPT, ``data/*/prepare.py``), or begin
with the header of llm.c (https://github.com/karpathy/llm.c, ``dev/data/data_common.py``), which is told by its first number
and passed over. ``.npy`` files bring their own type. Bare numbers cannot be told from anything else: so what has another ending, or
begins as a file of another kind does, is read only where its type was named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.buffer_pool import acquire
from hasten.data.formats.arrays import from_numpy_array, opened_array
from hasten.data.io.paths import file_signature, is_remote, resolve_paths
from hasten.data.pipeline import Pipeline
from hasten.data.source import Source
from hasten.data.validation import at_least

HEADER = 1024  # bytes of llm.c's header
UNNAMED = numpy.dtype("<u2")  # the type of tokens where nobody names one
HEADED = {20240520: numpy.dtype("<u2"), 20240801: numpy.dtype("<u4")}  # its first number -> type of the tokens
FOREIGN = {
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x89PNG": "a PNG picture",
    b"PK\x03\x04": "a zip archive, as PyTorch writes checkpoints",
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x93NUMPY": "a NumPy array, to be named .npy",
    b"GGUF": "a GGUF model",
}  # by their first bytes
RUN = 1 << 14  # windows that lie together, for a windowed shuffle


def tokens(paths: str | Path | Iterable[str | Path], length: int, dtype=None, stride: int | None = None) -> Pipeline:
    """Samples (input, target) of ``length`` tokens each, int64; the target is the input, one token on.

    Args:
        paths: ``.bin`` or ``.npy`` files, folders of them or patterns. No window reaches across two files.
        length: tokens of a sample.
        dtype: of files of bare numbers, as NumPy names it; None: uint16, for files that end in ``.bin``. What other files say of
            themselves must agree with it.
        stride: tokens from the beginning of a sample to that of the next; None: ``length``, so that every token is learnt once
            a pass. With 1, every window is a sample: for random windows, end the pass early.

    Raises:
        Refusal: no file, a remote one, one of another kind, a size that is no multiple of the type's, files shorter than a window,
            numbers that are no tokens.
    """
    at_least("tokens(length=)", length, 1)
    at_least("tokens(stride=)", stride, 1, optional=True)
    files = resolve_paths(paths, (".bin", ".npy"))
    if far := [file for file in files if is_remote(file)]:
        raise ConfigurationError(f"tokens are mapped into memory, from local files; copy {far[0]} here first")
    return Pipeline(
        Tokens(files, length, None if dtype is None else _kind(dtype), length if stride is None else stride)
    )


class Tokens(Source):
    """Windows over token files; ``dtype`` is None where nobody named one."""

    def __init__(self, files: list[str], length: int, dtype: numpy.dtype | None, stride: int):
        self.files, self.length, self.dtype, self.stride = (
            [os.path.abspath(file) for file in files],
            length,
            dtype,
            stride,
        )
        self._open()

    def __len__(self) -> int:
        return int(self.begins[-1])

    def prepare(self, runner: Callable, faults) -> None:
        if self._stamps() != self.stamps:
            self._open()

    def read(self, rows: numpy.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._found(rows)
        inputs, targets = (acquire((len(rows), self.length), torch.int64) for _ in range(2))
        return inputs.copy_(found[:, :-1]), targets.copy_(found[:, 1:])

    def fingerprint(self) -> dict:
        return {"tokens": self.stamps, "length": self.length, "stride": self.stride, "dtype": str(self.dtype)}

    def chunk_offsets(self) -> numpy.ndarray:
        return numpy.unique(
            numpy.concatenate([self.begins, *(numpy.arange(*of_file, RUN) for of_file in pairwise(self.begins))])
        )

    def _open(self) -> None:
        stamps = self._stamps()  # before the files are mapped: one that changes meanwhile is found changed
        windows = [
            _windows(from_numpy_array(_opened(file, self.dtype)), self.length + 1, self.stride) for file in self.files
        ]
        if not sum(map(len, windows)):
            others = " and the others are" if self.files[1:] else " is"
            raise ConfigurationError(f"{self.files[0]}{others} shorter than a window of {self.length + 1} tokens")
        self.stamps, self.windows, self.begins = stamps, windows, numpy.cumsum([0, *map(len, windows)])

    def _stamps(self) -> list[list]:
        return [file_signature(file) for file in self.files]

    def _found(self, rows: numpy.ndarray) -> torch.Tensor:
        """The windows as they lie in the files, shape (rows, length + 1)."""
        if len(self.windows) == 1:
            return _selected(self.windows[0], rows)
        which = numpy.searchsorted(self.begins, rows, side="right") - 1
        found = None
        for number in numpy.unique(which):
            here = which == number
            part = _selected(self.windows[number], rows[here] - self.begins[number])
            if len(part) == len(rows):
                return part
            found = acquire((len(rows), self.length + 1), torch.int64) if found is None else found
            found[torch.from_numpy(here)] = part.long()
        return found


def _selected(windows: torch.Tensor, rows: numpy.ndarray) -> torch.Tensor:
    return torch.index_select(
        windows, 0, torch.from_numpy(rows), out=acquire((len(rows), windows.shape[1]), windows.dtype)
    )


def _windows(tokens: torch.Tensor, width: int, stride: int) -> torch.Tensor:
    """Every window, shape (windows, width): a view, nothing is read."""
    if len(tokens) < width:
        return tokens.new_empty((0, 0))
    stride = min(stride, len(tokens))  # or a huge one would be no number of a tensor
    return tokens.unfold(0, width, stride)


def _opened(file: str, dtype: numpy.dtype | None) -> numpy.ndarray:
    array = opened_array(Path(file)) if file.lower().endswith(".npy") else _opened_bare(file, dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{file} holds {array.dtype} of {array.ndim} dimensions; tokens are whole numbers in one row"
        )
    if dtype is not None and array.dtype != dtype:
        raise ConfigurationError(f"{file} says that it holds {array.dtype}, not {dtype}; leave dtype out")
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        array = array.view(numpy.int64)
    return array


def _opened_bare(file: str, dtype: numpy.dtype | None) -> numpy.ndarray:
    size = os.path.getsize(file)
    if size == 0:
        return numpy.empty(0, UNNAMED if dtype is None else dtype)
    with open(file, "rb") as opened:
        begin = opened.read(8)
    first = int.from_bytes(begin[:4], "little")
    if first in HEADED and size >= HEADER:
        kind, skipped = HEADED[first], HEADER
    elif dtype is None:
        _refuse_foreign(file, begin)
        kind, skipped = UNNAMED, 0
    else:
        kind, skipped = dtype, 0
    if (size - skipped) % kind.itemsize:
        raise ConfigurationError(
            f"{file} has {size} bytes, no multiple of the {kind.itemsize} of {kind}; name its type: tokens(dtype=)"
        )
    return numpy.memmap(file, kind, mode="r", offset=skipped)


def _refuse_foreign(file: str, begin: bytes) -> None:
    for mark, what in FOREIGN.items():
        if begin.startswith(mark):
            raise ConfigurationError(
                f"{file} is {what}, and no file of tokens; if it holds bare numbers all the same, name their type: tokens(dtype=)"
            )
    if not file.lower().endswith(".bin"):
        raise ConfigurationError(
            f"{file} ends neither in .bin nor in .npy; if it holds bare numbers, name their type: tokens(dtype='uint16')"
        )


def _kind(dtype) -> numpy.dtype:
    try:
        kind = numpy.dtype(dtype)
    except TypeError:
        raise ConfigurationError(
            f"tokens(dtype=) does not know {dtype!r:.80}; most files hold uint16 or uint32"
        ) from None
    if kind.kind not in "iu":
        raise ConfigurationError(
            f"tokens(dtype={dtype!r:.80}) is no type of whole numbers; most files hold uint16 or uint32"
        )
    return kind
