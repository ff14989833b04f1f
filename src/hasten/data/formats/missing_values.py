"""Replacement of missing values in tables: one number for all numeric columns, or a value for each named column."""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.types as types
from pyarrow.csv import ConvertOptions

from hasten.core.errors import ConfigurationError, format_error, suggest
from hasten.data.formats.table_types import is_number, plain

MISSING_WORDS = frozenset(ConvertOptions().null_values)  # "", NA, NaN, null, ...: a missing number in CSV files


def check_fill(fill: Any, types: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """Returns the argument ``fill``: None, a number, or a dict from column to value; else ConfigurationError, as for an
    unknown column. ``types`` are the Arrow types of the columns that are read, ``columns`` all columns of the files. A
    column of a struct is named ``struct.column``.
    """
    if fill is None or isinstance(fill, (Real, Decimal)):
        return fill
    if not isinstance(fill, Mapping):
        raise ConfigurationError(f"fill= must be a number, or {{column: value}}, not {fill!r:.80}")
    known = [*columns, *(inner for name, arrow_type in types.items() for inner in _struct_columns(name, arrow_type))]
    for name in fill:
        if name not in known:
            raise ConfigurationError(f"fill= names a column {name!r} that does not exist{suggest(str(name), known)}")
    return dict(fill)


def filled(array: Any, fill: Any, name: str, where: str) -> Any:
    """Returns an Arrow array whose missing values are replaced by those of ``fill``.

    ``fill`` is a number for all numeric columns, or a dict from column to value. ConfigurationError if it has no value
    for this column ``name``, or one of another type; ``where`` is the file and chunk, for the error.
    """
    if not array.null_count:
        return array
    if isinstance(fill, Mapping):
        value = fill.get(name)
    else:
        value = fill if is_number(array.type) else None
    if value is None:
        remedy = f"pass a value for them: fill={{{name!r}: ...}}"
        if fill is None and is_number(array.type):
            remedy = f"pass fill=0 or fill={{{name!r}: ...}}"
        raise ConfigurationError(f"{missing(name, array, 'values', where)}; {remedy}, or leave the column out")
    try:
        converted = _convert(value, array.type)
        if types.is_null(array.type):
            return pa.repeat(converted, len(array))
        return array.fill_null(pa.scalar(converted, array.type))
    except (pa.ArrowException, NotImplementedError, ValueError, ArithmeticError) as error:
        reason = f"{value!r:.80} cannot fill: {format_error(error)}"
        raise ConfigurationError(f"column {name!r} is of type {array.type}, which {reason}") from None


def missing(name: str, array: Any, what: str, where: str) -> str:
    """Begins an error message: how many of ``what`` (values, lists) are missing in column ``name``, and where."""
    return f"column {name!r} lacks {array.null_count} of its {len(array)} {what} in {where}"


def check_no_nulls(name: str, array: Any, where: str) -> None:
    """Raises ConfigurationError if structs or lists are missing, which no value can fill."""
    if array.null_count:
        what = "structs" if types.is_struct(array.type) else "lists"
        raise ConfigurationError(f"{missing(name, array, what, where)}, which no value can fill; leave the column out")


def cast_incomplete_columns(table: Any, common_types: Mapping[str, Any]) -> Any:
    """Returns the table with each column that has missing values cast to its type in ``common_types``, which determines
    how it is filled. A column that is empty here and text in other files gets empty strings; one that is empty in all
    files stays null.
    """
    for index, name in enumerate(table.schema.names):
        column, arrow_type = table.column(index), common_types[name]
        if (column.null_count or types.is_null(column.type)) and plain(column.type) != arrow_type:
            column = column.cast(arrow_type, safe=False)  # rounds large integers as without missing values
            if str(arrow_type) == "large_string":
                column = column.fill_null("")
            table = table.set_column(index, name, column)
    return table


def words_to_null(table: Any, name: str, missing: Sequence[str]) -> Any:
    """Returns the table with some words of a text column, such as "" and NA, as missing values, for which CSV has no
    other form.
    """
    words = table.column(name)
    value_set = pa.array(missing, words.type)
    is_missing = compute.is_in(words, value_set=value_set)  # pyright: ignore[reportAttributeAccessIssue]  # generated
    words = compute.if_else(is_missing, pa.scalar(None, words.type), words)  # pyright: ignore[reportAttributeAccessIssue]
    return table.set_column(table.schema.get_field_index(name), name, words)


def _convert(value: Any, arrow_type: Any) -> Any:
    """Returns ``value`` as the Python type for an Arrow type; Arrow itself would truncate a float for an integer.
    ValueError if it would become another value; ArithmeticError if it is NaN or infinite, and the type is not a float.
    """
    if not is_number(arrow_type):
        return value
    if not isinstance(value, (Real, Decimal)):
        raise ValueError("the value is not a number")
    value = cast(Any, value)
    if types.is_decimal(arrow_type):
        return Decimal(str(value))
    if types.is_boolean(arrow_type):
        if value not in (0, 1):
            raise ValueError("the value is neither true nor false")
        return bool(value)
    if types.is_integer(arrow_type):
        if value != int(value):
            raise ValueError("the value is not an integer")
        return int(value)
    return float(value)


def _struct_columns(path: str, arrow_type: Any) -> Iterator[str]:
    """Yields the dotted names of the columns of a struct (``path.column``), and of the structs in it."""
    for field in arrow_type if types.is_struct(arrow_type) else ():
        yield f"{path}.{field.name}"
        yield from _struct_columns(f"{path}.{field.name}", field.type)
