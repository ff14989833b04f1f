"""Tables in files: Parquet, Feather, CSV."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.data.formats.table_files import Csv, Feather, Format, Parquet
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
    """Rows of Parquet files (https://parquet.apache.org/docs/file-format).

    With a ``target``, and only numbers in the other columns, a batch is ``(matrix, target)``: float32, shape
    (n, columns), in the order of ``columns``, and the target as int64 (integers, booleans) or float32 (floats). A text
    target is the int64 index of its class. With other columns a batch is ``(dict of columns, target)``, and without a
    target the dict: numbers and lists of fixed size are tensors (n, ...) of their own dtype, times int64 counts of
    their unit, structs dicts of columns, text and bytes lists, lists of different lengths lists of tensors if they hold
    numbers. The matrix rounds integers above 2**24; a HastenWarning names such columns.

    A row group that cannot be decoded is a range of bad rows, and a file that cannot be opened is one bad row. Damaged
    bytes that can be decoded are detected if the file has page checksums (pyarrow: ``write_page_checksum=True``), and
    in text and lists if they point outside their column.

    A table that fits is held decoded in memory. For a larger one, ``.shuffle(window=4)`` mixes a few row groups at a
    time; fully shuffled, nearly every row of a batch would decode a row group, unless ``.cache("disk")`` precedes it.

    Args:
        paths: Files, directories or patterns, local or remote (``s3://...``). All files must have the same columns.
        columns: Columns to read besides the target; None: all.
        target: The column to predict.
        fill: Replacement of missing numbers, or {column: value}, also for text, times and the target, which a single
            number never fills. Without it missing values are refused. Integer columns accept only integers. NaN in the
            files is a number, not a missing value.
        classes: Values of a text target in the order of their indices; None: the values in the files, sorted. Pass them
            if training and validation files may not contain the same values.
        gigabytes: Memory for decoded rows in 10**9 bytes; None: a quarter of what is free or what the container
            allows, divided among the ranks on this machine.

    Raises:
        ConfigurationError: No file can be opened, an unknown column, files with different columns, missing values, or
            an invalid argument.
        RunError: A file changed while it was read, a server does not answer, or too many files are open.
    """
    return _pipeline(Parquet(), paths, columns, target, fill, classes, gigabytes)


def feather(
    paths: Paths,
    columns: Sequence[str] | None = None,
    target: str | None = None,
    *,
    fill: float | dict | None = None,
    classes: Sequence[str] | None = None,
    gigabytes: float | None = None,
) -> Pipeline:
    """Rows of Feather (Arrow) files; uncompressed ones are read fastest.

    The format has no checksums. A truncated file is refused, and a record batch that cannot be decoded, or whose text
    or lists point outside it, is a range of bad rows; but damaged bytes in a numeric column are other numbers. Use
    Parquet with page checksums where neither disk nor network detects damage.

    Arguments and errors are those of ``parquet``. Format: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
    """
    return _pipeline(Feather(), paths, columns, target, fill, classes, gigabytes)


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
    """Rows of CSV files, plain or gzipped: parsed once, at this call, and held in memory.

    Larger files are refused: split them, or store them as Parquet with ``pyarrow.csv.open_csv``. Types are inferred
    from the values. An empty field is a missing number, or a missing class of a text target, as are NA, NaN and null
    there unless ``classes=`` names them; in other text columns it is an empty string. A line with too few or too many
    fields is a bad row. If such lines are at least as many as the others, or more than 100,000, all files are refused,
    because the delimiter or the header is wrong. A file in which the quote of a bad line swallows the following lines
    cannot be opened. Bad lines divide a file into chunks, and all rows are in memory, so ``.shuffle()`` without a
    ``window`` mixes best.

    ``delimiter`` is one character; None: a comma, or a tab in files named ``.tsv``. ``header`` are the names of the
    columns, for files whose first line does not contain them. The other arguments, and errors, are those of
    ``parquet``. Format: https://www.rfc-editor.org/rfc/rfc4180
    """
    return _pipeline(Csv(delimiter, header), paths, columns, target, fill, classes, float("inf"))


def _pipeline(form: Format, *arguments: Any) -> Pipeline:
    try:
        import pyarrow  # noqa: F401  # clear error instead of the one from table_source
    except ImportError:
        raise ConfigurationError("reading tables requires pyarrow: pip install 'hasten[data]'") from None
    from hasten.data.formats.table_source import Table

    return Pipeline(Table(form, *arguments))
