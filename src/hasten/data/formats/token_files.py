"""Token files: windows of text for language models, read straight from memory-mapped files.

``.bin`` files hold bare numbers, as nanoGPT writes them (https://github.com/karpathy/nanoGPT, ``data/*/prepare.py``), or begin
with the header of llm.c (https://github.com/karpathy/llm.c, ``dev/data/data_common.py``), which is told by its first number
and passed over. ``.npy`` files bring their own type.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy
import torch

from hasten.contract.errors import Refusal
from hasten.data.formats.in_memory import from_numpy_array, opened_array
from hasten.data.memory import taken
from hasten.data.pipeline import Pipeline
from hasten.data.places.files import found, stamp
from hasten.data.source import Source

HEADER = 1024  # bytes of llm.c's header
HEADED = {20240520: numpy.dtype("<u2"), 20240801: numpy.dtype("<u4")}  # its first number -> type of the tokens
RUN = 1 << 14  # windows that lie together, for a windowed shuffle


def tokens(paths: str | Path | Iterable[str | Path], length: int, dtype=None, stride: int | None = None) -> Pipeline:
    """Samples (input, target) of ``length`` tokens each, int64; the target is the input, one token on.

    Args:
        paths: ``.bin`` or ``.npy`` files, folders of them or patterns. No window reaches across two files.
        length: tokens of a sample.
        dtype: of a ``.bin`` file without a header, as NumPy names it; None: uint16.
        stride: tokens from the beginning of a sample to that of the next; None: ``length``, so that every token is learnt once
            a pass. With 1, every window is a sample: for random windows, end the pass early.

    Raises:
        Refusal: no file, a size that is no multiple of the type's, files shorter than a window, numbers that are no tokens.
    """
    for name, value in {"length": length, "stride": stride or length}.items():
        if not isinstance(value, int) or value < 1:
            raise Refusal(f"tokens({name}=) must be a whole number of at least 1, not {value!r}")
    return Pipeline(Tokens(found(paths, (".bin", ".npy")), length, dtype, stride or length))


class Tokens(Source):
    """Windows over token files."""

    def __init__(self, files: list[str], length: int, dtype, stride: int):
        self.files, self.length, self.dtype, self.stride = [os.path.abspath(file) for file in files], length, dtype, stride
        self._open()

    def __len__(self) -> int:
        return int(self.begins[-1])

    def prepare(self, runner: Callable, faults) -> None:
        if self._stamps() != self.stamps:
            self._open()

    def read(self, rows: numpy.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._found(rows)
        inputs, targets = (taken((len(rows), self.length), torch.int64) for _ in range(2))
        return inputs.copy_(found[:, :-1]), targets.copy_(found[:, 1:])

    def identity(self) -> dict:
        return {"tokens": self.stamps, "length": self.length, "stride": self.stride, "dtype": str(self.dtype)}

    def edges(self) -> numpy.ndarray:
        return numpy.unique(numpy.concatenate([self.begins, *(numpy.arange(*of_file, RUN) for of_file in pairwise(self.begins))]))

    def _open(self) -> None:
        stamps = self._stamps()  # before the files are mapped: one that changes meanwhile is found changed
        windows = [_windows(from_numpy_array(_opened(file, self.dtype)), self.length + 1, self.stride) for file in self.files]
        if not sum(map(len, windows)):
            others = " and the others are" if self.files[1:] else " is"
            raise Refusal(f"{self.files[0]}{others} shorter than a window of {self.length + 1} tokens")
        self.stamps, self.windows, self.begins = stamps, windows, numpy.cumsum([0, *map(len, windows)])

    def _stamps(self) -> list[list]:
        return [stamp(file) for file in self.files]

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
            found = taken((len(rows), self.length + 1), torch.int64) if found is None else found
            found[torch.from_numpy(here)] = part.long()
        return found


def _selected(windows: torch.Tensor, rows: numpy.ndarray) -> torch.Tensor:
    return torch.index_select(windows, 0, torch.from_numpy(rows), out=taken((len(rows), windows.shape[1]), windows.dtype))


def _windows(tokens: torch.Tensor, width: int, stride: int) -> torch.Tensor:
    """Every window, shape (windows, width): a view, nothing is read."""
    return tokens.as_strided((max(0, (len(tokens) - width) // stride + 1), width), (stride, 1))


def _opened(file: str, dtype) -> numpy.ndarray:
    array = opened_array(Path(file)) if file.endswith(".npy") else _opened_bare(file, dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise Refusal(f"{file} holds {array.dtype} of {array.ndim} dimensions; tokens are whole numbers in one row")
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        array = array.view(numpy.int64)
    return array


def _opened_bare(file: str, dtype) -> numpy.ndarray:
    size = os.path.getsize(file)
    if size == 0:
        return numpy.empty(0, numpy.uint16)
    with open(file, "rb") as opened:
        first = int.from_bytes(opened.read(4), "little")
    kind, skipped = (HEADED[first], HEADER) if first in HEADED and size >= HEADER else (_kind(dtype), 0)
    if dtype is not None and kind != _kind(dtype):
        raise Refusal(f"{file} says in its header that it holds {kind}, not {_kind(dtype)}; leave dtype out")
    if (size - skipped) % kind.itemsize:
        raise Refusal(f"{file} has {size} bytes, no multiple of the {kind.itemsize} of {kind}; name its type: tokens(dtype=)")
    return numpy.memmap(file, kind, mode="r", offset=skipped)


def _kind(dtype) -> numpy.dtype:
    try:
        return numpy.dtype(numpy.uint16 if dtype is None else dtype)
    except TypeError:
        raise Refusal(f"tokens(dtype=) does not know {dtype!r}; most files hold uint16 or uint32") from None
