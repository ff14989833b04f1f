"""Tables in files: Parquet, Feather, CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hasten.data.formats.table_files import Csv, Feather, Parquet
from hasten.data.formats.table_source import Table
from hasten.data.pipeline import Pipeline

Paths = str | Path | Iterable[str | Path]


def parquet(
    paths: Paths,
    columns: Sequence[str] | None = None,
    target: str | None = None,
    *,
    fill: float | dict | None = None,
    classes: Sequence[str] | None = None,
    gigabytes: float | None = None,
) -> Pipeline:
    """Rows of Parquet files.

    With a ``target``, and numbers alone in the other columns, a batch is ``(matrix, target)``: float32 (n, columns) in the
    order of ``columns``, and the target as int64 (whole numbers, yes and no) or float32 (fractions). A target of text
    is int64 too: the numbers of its ``classes``. With other columns beside it, a batch is ``(dict of columns, target)``, and
    without a target the dict alone: numbers and lists of a fixed size are tensors (n, ...) of their own type, times count
    their unit as int64, structs are dicts of columns, text and bytes are lists, and lists of unequal length are lists of
    tensors where they hold numbers. In the matrix, whole numbers above 2**24 are rounded, which a Notice tells.

    A row group that does not decode is a run of bad rows, and a file that cannot be opened is one bad row. Wrong bytes that decode all
    the same are noticed where the writer left checksums of the pages (pyarrow: ``write_page_checksum=True``), and in text and lists where
    they lead out of their column.

    A table that fits is held in memory, decoded. Of a bigger one, ``.shuffle(window=4)`` mixes a few row groups at a time:
    fully shuffled, nearly every row of a batch would have a row group decoded for it; or put ``.cache("disk")`` first.

    Args:
        paths: files, folders or patterns, local or remote (``s3://...``); all files must have the same columns.
        columns: those to read, besides the target; None for all.
        target: the column to learn.
        fill: what stands for a missing number, or {column: value}, also of text, times and the target, which a number alone never
            fills; without it, missing values are refused. Whole numbers are filled by whole numbers only. NaN is not missing: it
            is a number that the files hold, and stays.
        classes: the words of a text target in the order of their numbers; None sorts the words that the files hold. Say them
            where two sets of files, training and validation, may not hold the same words.
        gigabytes: (10**9 bytes) of memory for decoded rows; None for a quarter of what is free, or of what the
            container allows, divided among the ranks of this machine.

    Raises:
        Refusal: no file that can be opened, no such column (the nearest names are told), files that differ, missing values, a setting
            that makes no sense.
        Failure: a file that changed while it was read, a remote one that does not answer, or a machine that cannot open more files.

    Source: https://parquet.apache.org/docs/file-format
    """
    return Pipeline(Table(Parquet(), paths, columns, target, fill, classes, gigabytes))


def feather(
    paths: Paths,
    columns: Sequence[str] | None = None,
    target: str | None = None,
    *,
    fill: float | dict | None = None,
    classes: Sequence[str] | None = None,
    gigabytes: float | None = None,
) -> Pipeline:
    """Rows of Feather (Arrow) files; written without compression, they are read fastest.

    The format has no checksums: a file that is cut off is refused, and a record batch that does not decode, or whose text or lists
    lead out of it, is a run of bad rows, but wrong bytes in a column of numbers are other numbers. Keep them where the disk or the
    network watches over them, or take Parquet.

    Everything else is as for ``parquet``. Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
    """
    return Pipeline(Table(Feather(), paths, columns, target, fill, classes, gigabytes))


def csv(
    paths: Paths,
    columns: Sequence[str] | None = None,
    target: str | None = None,
    *,
    fill: float | dict | None = None,
    classes: Sequence[str] | None = None,
    delimiter: str | None = None,
    header: Sequence[str] | None = None,
) -> Pipeline:
    """Rows of CSV files, plain or gzipped: parsed once, at this call, and held in memory; convert bigger ones to Parquet.

    Types are guessed from the values. An empty field is a missing number, and a missing class of a text target; in other columns of
    text it is an empty text. A line with too few fields, or too many, is a bad row; where those are no fewer than the others, or more than
    100,000, everything is refused, also where there are other files: the delimiter or the header will be another. A quote that swallows
    the lines after such a line makes its file one that cannot be opened. Bad lines divide a file into runs, and all is in memory:
    ``.shuffle()`` without a ``window`` mixes it best.

    Args:
        delimiter: one character; None for a comma, or a tab where the name ends in ``.tsv``.
        header: the columns' names, for files whose first line does not hold them.

    Everything else is as for ``parquet``. Source: https://www.rfc-editor.org/rfc/rfc4180
    """
    return Pipeline(Table(Csv(delimiter, header), paths, columns, target, fill, classes, float("inf")))
