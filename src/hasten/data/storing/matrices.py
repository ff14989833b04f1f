"""Rows as matrices: a ``.npy`` file for each column, row after row, as ``arrays`` maps them into memory.

They are one file a column, whatever the number of parts: each part has its place in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

import numpy
import torch

from hasten.contract.errors import Refusal
from hasten.data.formats.in_memory import from_numpy_array
from hasten.data.formats.tars import PICTURES
from hasten.data.storing.digests import Digest
from hasten.data.storing.parts import PART, Plan, Tell, synced
from hasten.data.storing.readings import CHUNK


class Matrices:
    """A ``.npy`` file for each column, row after row, whose first dimension is the row."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.like = plan.reading.some(0, 1)
        for name, column in self.like.items():
            self._check(name, column)
        safe = [re.sub(r"[^\w.-]", "_", name) for name in self.like]
        self.names = {
            name: f"{file}-{number}.npy" if file in safe[:number] else f"{file}.npy"
            for number, (name, file) in enumerate(zip(self.like, safe, strict=True))
        }

    def write(self, number: int, tell: Tell) -> Digest:
        digest = Digest()
        with self._opened(number, "r+b" if number else "w+b") as files:
            for columns in self.plan.reading.columns(*self.plan.range(number)):
                for name, file in files.items():
                    self._check(name, columns[name])
                    file.write(columns[name].contiguous().reshape(-1).view(torch.uint8).numpy())
                rows = len(columns[name])
                digest.add(columns, rows)
                tell(rows)
            for file in files.values():
                synced(file)
        return digest

    def read_back(self, number: int) -> Digest:
        digest = Digest()
        first, last = self.plan.range(number)
        with self._opened(number, "r+b") as files:
            for name, file in files.items():
                like = self.like[name]
                for begin in range(first, last, step := max(1, CHUNK // max(1, like.nbytes))):
                    rows = min(step, last - begin)
                    content = numpy.frombuffer(file.read(rows * like.nbytes), like.numpy().dtype)
                    digest.add({name: from_numpy_array(content).view(-1, *like.shape[1:])}, 0)
        digest.rows = last - first
        return digest

    def keep(self, number: int) -> None:
        """Nothing to do: the files get their names when all parts are in them."""

    def finish(self) -> dict:
        for file in self.names.values():
            if (unfinished := self.plan.folder / f"{file}{PART}").exists():
                os.replace(unfinished, self.plan.folder / file)
        return {
            "files": [*self.names.values()],
            "columns": self.names,
            "is_tuple": isinstance(self.plan.reading.source.read(numpy.arange(1)), tuple),
        }

    @contextmanager
    def _opened(self, number: int, mode: str) -> Iterator[dict[str, BinaryIO]]:
        """The files of all columns, each where the part begins."""
        first, _ = self.plan.range(number)
        with ExitStack() as open_files:
            files = {}
            for name, file in self.names.items():
                path, like = self.plan.folder / f"{file}{PART}", self.like[name]
                files[name] = open_files.enter_context(open(path, mode))
                shape = (self.plan.reading.rows, *like.shape[1:])
                about = {"descr": numpy.lib.format.dtype_to_descr(like.numpy().dtype), "fortran_order": False, "shape": shape}
                numpy.lib.format.write_array_header_2_0(files[name], about)
                files[name].seek(first * like.nbytes, os.SEEK_CUR)
            yield files

    def _check(self, name: str, column) -> None:
        like = self.like[name]
        if not isinstance(column, torch.Tensor) or column.dtype == torch.bfloat16:
            kind = "bfloat16" if isinstance(column, torch.Tensor) else "text, bytes or rows of unequal shapes"
            remedy = "pictures need --resize" if "picture" in name or name in PICTURES else "store the table as feather"
            raise Refusal(f"column {name!r} holds {kind}; a matrix holds numbers of one shape: {remedy}")
        if column.dtype != like.dtype or column.shape[1:] != like.shape[1:]:
            raise Refusal(f"column {name!r} is {_shape(like)} in the first row, and {_shape(column)} later; a matrix holds one shape")


def _shape(column: torch.Tensor) -> str:
    return f"{column.dtype} {tuple(column.shape[1:])}".removeprefix("torch.")
