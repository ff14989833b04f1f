"""Writes rows as matrices: one ``.npy`` file for each column, which ``arrays`` maps into memory.

There is one file for each column, whatever the number of parts: each part is appended to the parts before it. Files are
written, not mapped (``numpy.lib.format.open_memmap``), because a full disk would end a process that writes to a mapping
with SIGBUS.
"""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

import numpy
import torch

from hasten.core.errors import ConfigurationError
from hasten.data.array_source import from_numpy_array
from hasten.data.formats.webdataset import IMAGE_TYPES
from hasten.datatools.content_hash import ContentHash
from hasten.datatools.row_reader import CHUNK
from hasten.datatools.shard_plan import PART, ReportRows, ShardPlan, fsync


class NpyWriter:
    """Writer of ``.npy`` files, one for each column, whose first dimension is the row."""

    def __init__(self, plan: ShardPlan):
        self.plan, self.rows = plan, 0  # rows of the part that was written last
        self.like = {name: column[:1] for name, column in plan.reader.like.items()}
        for name, column in self.like.items():
            self._check(name, column)
        safe = [re.sub(r"[^\w.-]", "_", name) for name in self.like]
        self.names = {
            name: f"{file}-{index}.npy" if file in safe[:index] else f"{file}.npy"
            for index, (name, file) in enumerate(zip(self.like, safe, strict=True))
        }

    def write(self, part: int, report: ReportRows) -> ContentHash:
        digest = ContentHash()
        with self._open(part, "r+b" if part else "w+b") as files:
            for columns in self.plan.reader.columns(*self.plan.range(part)):
                for name, file in files.items():
                    self._check(name, columns[name])
                    file.write(columns[name].contiguous().reshape(-1).view(torch.uint8).numpy())
                rows = len(next(iter(columns.values())))
                digest.add(columns, rows)
                report(rows)
            for file in files.values():
                fsync(file)
        self.rows = digest.rows
        return digest

    def read_back(self, part: int) -> ContentHash:
        digest = ContentHash()
        with self._open(part, "r+b") as files:
            for name, file in files.items():
                like = self.like[name]
                step = max(1, CHUNK // max(1, like.nbytes))
                for begin in range(0, self.rows, step):
                    rows = min(step, self.rows - begin)
                    content = numpy.frombuffer(file.read(rows * like.nbytes), like.numpy().dtype)
                    digest.add({name: from_numpy_array(content).view(-1, *like.shape[1:])}, 0)
        digest.rows = self.rows
        return digest

    def finish(self) -> dict:
        rows = self.plan.rows_before(self.plan.parts)
        for name, file in self.names.items():
            if (unfinished := self.plan.directory / f"{file}{PART}").exists():
                with open(unfinished, "r+b") as content:
                    self._write_header(content, name, rows)
                    content.truncate(content.tell() + rows * self.like[name].nbytes)
                    fsync(content)
                os.replace(unfinished, self.plan.directory / file)
        return {
            "files": [*self.names.values()],
            "columns": self.names,
            "is_tuple": isinstance(self.plan.reader.first, tuple),
        }

    @contextmanager
    def _open(self, part: int, mode: str) -> Iterator[dict[str, BinaryIO]]:
        """Opens the files of all columns: {name: file}, each positioned where ``part`` begins."""
        before = self.plan.rows_before(part)
        with ExitStack() as open_files:
            files = {}
            for name, file in self.names.items():
                files[name] = open_files.enter_context(open(self.plan.directory / f"{file}{PART}", mode))
                self._write_header(files[name], name, self.plan.reader.rows)
                files[name].seek(before * self.like[name].nbytes, os.SEEK_CUR)
            yield files

    def _write_header(self, file: BinaryIO, name: str, rows: int) -> None:
        """Writes the ``.npy`` header for ``rows`` rows. Its length is fixed, so that it can be overwritten."""
        like = self.like[name]
        descr = numpy.lib.format.dtype_to_descr(like.numpy().dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (rows, *like.shape[1:])}
        numpy.lib.format.write_array_header_2_0(file, header)

    def _check(self, name: str, column: Any) -> None:
        like = self.like[name]
        advice = "resize images with --resize" if name == "images" or name.rpartition(".")[2] in IMAGE_TYPES else ""
        if not isinstance(column, torch.Tensor) or column.dtype == torch.bfloat16:
            kind = "bfloat16" if isinstance(column, torch.Tensor) else "text, bytes or rows of unequal shapes"
            rule = f"a matrix requires numbers of one shape; {advice or 'store the table as feather'}"
            raise ConfigurationError(f"column {name!r} holds {kind}, and {rule}")
        if column.dtype != like.dtype or column.shape[1:] != like.shape[1:]:
            later = f"{_describe(column)} later; {advice or 'a matrix requires rows of one shape and dtype'}"
            raise ConfigurationError(f"column {name!r} is {_describe(like)} in the first row and {later}")


def _describe(column: torch.Tensor) -> str:
    return f"{column.dtype} {tuple(column.shape[1:])}".removeprefix("torch.")
