"""Token files: windows of text for language models, read from memory-mapped files.

``.bin`` files hold bare integers, as nanoGPT writes them (https://github.com/karpathy/nanoGPT, ``data/*/prepare.py``),
or begin with the header of llm.c (https://github.com/karpathy/llm.c, ``dev/data/data_common.py``), which is recognized
by its first integer and skipped. ``.npy`` files contain their own dtype. Bare integers cannot be recognized, so a file
with another suffix, or with the first bytes of another format, is read only if ``dtype`` is given.
"""

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.array_source import from_numpy_array, gathered, open_array
from hasten.data.buffer_pool import acquire
from hasten.data.io.paths import file_signature, is_remote, open_file, resolve_paths
from hasten.data.pipeline import Pipeline
from hasten.data.source import BadRowPolicy, Source
from hasten.data.validation import at_least

HEADER_BYTES = 1024  # of llm.c
DEFAULT_DTYPE = numpy.dtype("<u2")
PROBED_TOKENS = 1 << 13  # examined to recognize wider integers
HEADER_DTYPES = {20240520: numpy.dtype("<u2"), 20240801: numpy.dtype("<u4")}  # by the first integer of the header
OTHER_FORMATS = {  # by their first bytes
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"PK\x03\x04": "a zip archive, such as a PyTorch checkpoint",
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x93NUMPY": "a NumPy array, which must be named .npy",
    b"GGUF": "a GGUF model",
}
CHUNK = 1 << 14  # windows per chunk, for a windowed shuffle


def tokens(
    paths: str | Path | Iterable[str | Path], length: int, dtype: Any = None, stride: int | None = None
) -> Pipeline:
    """Samples (input, target) of ``length`` tokens each, int64; the target is the input shifted by one token.

    Args:
        paths: ``.bin`` or ``.npy`` files, directories of them or patterns. No window spans two files.
        length: Tokens per sample.
        dtype: NumPy dtype of files of bare integers; None: uint16, for files named ``.bin``. It must agree with files
            that contain their dtype.
        stride: Tokens from the start of a sample to the start of the next; None: ``length``, so that every token is a
            target once per epoch. With 1 every window is a sample; for random windows, end the epoch early.

    Raises:
        ConfigurationError: No file, a remote file, a file of another format or of incomplete integers, or no file as
            long as a window.
    """
    at_least("tokens(length=)", length, 1)
    at_least("tokens(stride=)", stride, 1, optional=True)
    files = resolve_paths(paths, (".bin", ".npy"))
    if remote := [file for file in files if is_remote(file)]:
        raise ConfigurationError(f"tokens() maps local files into memory; copy {remote[0]} to this machine first")
    return Pipeline(Tokens(files, length, None if dtype is None else _to_dtype(dtype), stride or length))


class Tokens(Source):
    """A source of windows over token files. ``dtype`` None: uint16 for ``.bin``, else that in the file."""

    def __init__(self, files: list[str], length: int, dtype: numpy.dtype | None, stride: int) -> None:
        self.files = [os.path.abspath(file) for file in files]
        self.length, self.dtype, self.stride = length, dtype, stride
        self._open()

    def __len__(self) -> int:
        return int(self.begins[-1])

    def prepare(self, runner: Callable, faults: BadRowPolicy) -> None:
        if self._signatures() != self.signatures:
            self._open()

    def read(self, rows: numpy.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        windows = self._read_windows(rows)
        inputs, targets = (acquire((len(rows), self.length), torch.int64) for _ in range(2))
        return inputs.copy_(windows[:, :-1]), targets.copy_(windows[:, 1:])

    def fingerprint(self) -> dict:
        return {"tokens": self.signatures, "length": self.length, "stride": self.stride, "dtype": str(self.dtype)}

    def chunk_offsets(self) -> numpy.ndarray:
        chunks = [numpy.arange(begin, end, CHUNK) for begin, end in pairwise(self.begins)]
        return numpy.unique(numpy.concatenate([self.begins, *chunks]))

    def _open(self) -> None:
        signatures = self._signatures()  # before the files are mapped, so that a change meanwhile is noticed
        arrays = [from_numpy_array(_open_tokens(file, self.dtype)) for file in self.files]
        windows = [_windows(array, self.length + 1, self.stride) for array in arrays]
        if not sum(map(len, windows)):
            others = " and the other files are" if self.files[1:] else " is"
            window = f"a window of {self.length + 1} tokens; use a smaller length="
            raise ConfigurationError(f"{self.files[0]}{others} shorter than {window}")
        self.signatures, self.windows, self.begins = signatures, windows, numpy.cumsum([0, *map(len, windows)])

    def _signatures(self) -> list[list]:
        return [file_signature(file) for file in self.files]

    def _read_windows(self, rows: numpy.ndarray) -> torch.Tensor:
        """Returns the windows, shape (rows, length + 1); of one file in the dtype of the file, else int64."""
        if len(self.windows) == 1:
            return gathered(self.windows[0], torch.from_numpy(rows))
        files = numpy.searchsorted(self.begins, rows, side="right") - 1
        merged = None
        for file in numpy.unique(files):
            in_file = files == file
            part = gathered(self.windows[file], torch.from_numpy(rows[in_file] - self.begins[file]))
            if len(part) == len(rows):
                return part
            merged = acquire((len(rows), self.length + 1), torch.int64) if merged is None else merged
            merged[torch.from_numpy(in_file)] = part.long()
        assert merged is not None
        return merged


def _windows(tokens: torch.Tensor, width: int, stride: int) -> torch.Tensor:
    """Returns a view of all windows of ``width`` tokens, ``stride`` apart: shape (windows, width), or else (0, 0)."""
    if len(tokens) < width:
        return tokens.new_empty((0, 0))
    return tokens.unfold(0, width, min(stride, len(tokens)))  # torch refuses very large strides


def _open_tokens(file: str, dtype: numpy.dtype | None) -> numpy.ndarray:
    array = open_array(Path(file)) if file.lower().endswith(".npy") else _open_bare(file, dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        advice = "tokens must be integers in one dimension"
        raise ConfigurationError(f"{file} holds {array.dtype} of {array.ndim} dimensions; {advice}")
    if dtype is not None and array.dtype != dtype:
        raise ConfigurationError(f"{file} holds {array.dtype}, not dtype={dtype}; omit dtype=")
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        array = array.view(numpy.int64)
    return array


def _open_bare(file: str, dtype: numpy.dtype | None) -> numpy.ndarray:
    size = os.path.getsize(file)
    if size == 0:
        return numpy.empty(0, DEFAULT_DTYPE if dtype is None else dtype)
    with open_file(file) as opened:
        begin = opened.read(8)
    first, offset = int.from_bytes(begin[:4], "little"), 0
    if first in HEADER_DTYPES and size >= HEADER_BYTES:
        dtype, offset = HEADER_DTYPES[first], HEADER_BYTES
    elif dtype is None:
        _check_format(file, begin)
    is_guess, dtype = dtype is None, DEFAULT_DTYPE if dtype is None else dtype
    if (size - offset) % dtype.itemsize:
        unit = f"the {dtype.itemsize} bytes of {dtype}; pass its dtype: tokens(dtype=)"
        raise ConfigurationError(f"{file} has {size} bytes, which is no multiple of {unit}")
    array = numpy.memmap(file, dtype, mode="r", offset=offset)
    if is_guess and _is_wider(array[:PROBED_TOKENS]):
        what = "every second of its 16-bit integers is below 16, as where tokens take 32 or 64 bits"
        raise ConfigurationError(
            f"{file}: {what}; pass their dtype: tokens(dtype='uint32'), or 'uint16' if it is right"
        )
    return array


def _is_wider(halves: numpy.ndarray) -> bool:
    """Whether 16-bit integers look like the low and high halves of larger ones."""
    low, high = halves[::2], halves[1::2]
    return len(high) >= 256 and bool(high.max() < 16 <= low.max())


def _check_format(file: str, begin: bytes) -> None:
    """Raises ConfigurationError if a file without a given dtype is not recognizably a token file."""
    for magic, what in OTHER_FORMATS.items():
        if begin.startswith(magic):
            advice = "if it holds bare integers nevertheless, pass their dtype: tokens(dtype=)"
            raise ConfigurationError(f"{file} is {what}, not a token file; {advice}")
    if not file.lower().endswith(".bin"):
        remedy = "if it holds bare integers, pass their dtype: tokens(dtype='uint16')"
        raise ConfigurationError(f"{file} ends in neither .bin nor .npy; {remedy}")


def _to_dtype(dtype: Any) -> numpy.dtype:
    try:
        result = numpy.dtype(dtype)
    except TypeError:
        raise ConfigurationError(f"tokens(dtype={dtype!r:.80}): unknown; most files hold uint16 or uint32") from None
    if result.kind not in "iu":
        raise ConfigurationError(f"tokens(dtype={dtype!r:.80}) is no integer type; most files hold uint16 or uint32")
    return result
