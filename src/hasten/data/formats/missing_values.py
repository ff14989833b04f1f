"""What stands for missing values: a number for all that lack one, or a value for each column that is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from hasten.core.errors import ConfigurationError, format_error, suggest
from hasten.data.formats.table_types import is_number, plain


def checked_fill(fill, types: Mapping[str, Any], there: Sequence[str]) -> float | dict | None:
    """What stands for missing values.

    Args:
        types: of the columns that are read; inside a struct, a column is called ``struct.column``.
        there: all columns of the files.

    Raises:
        Refusal: it is neither a number nor a dict, or names a column that is not there.
    """
    if fill is None or isinstance(fill, (Real, Decimal)):
        return fill
    if not isinstance(fill, Mapping):
        raise ConfigurationError(f"fill= is a number, or {{column: value}}, not {fill!r:.80}")
    known = [*there, *(inner for name, kind in types.items() for inner in _inside(name, kind))]
    for name in fill:
        if name not in known:
            raise ConfigurationError(f"fill= names a column {name!r} that is not there{suggest(str(name), known)}")
    return dict(fill)


def filled(array, fill, name: str, where: str):
    """``array`` without missing values. ``fill`` is one number for all numbers, or a dict from column to value."""
    if not array.null_count:
        return array
    import pyarrow as pa

    if isinstance(fill, Mapping):
        value = fill.get(name)
    else:
        value = fill if is_number(array.type) else None
    if value is None:
        raise ConfigurationError(missing(name, array, fill, where))
    try:
        return _with(_fitting(value, array.type), array)
    except (pa.ArrowException, NotImplementedError, ValueError, ArithmeticError) as error:
        raise ConfigurationError(
            f"column {name!r} is of type {array.type}, which {value!r:.80} cannot fill: {format_error(error)}"
        ) from None


def missing(name: str, array, fill, where: str) -> str:
    by_name = f"fill={{{name!r}: ...}}"
    remedy = (
        f"say what stands for them: {by_name}" if isinstance(fill, Mapping) else f"fill them (fill=0, or {by_name})"
    )
    return f"column {name!r} lacks {array.null_count} of its {len(array)} values in {where}; {remedy} or leave the column out"


def missing_whole(name: str, array, where: str) -> str:
    import pyarrow.types as types

    what = "structs" if types.is_struct(array.type) else "lists"
    return f"column {name!r} lacks {array.null_count} of its {len(array)} {what} in {where}, which nothing can fill; leave the column out"


def typed(table, kinds: Mapping[str, Any]):
    """A table of guessed types, whose columns with gaps get the type that all files have together, by which they are filled.

    A column whose fields are all empty has none of its own; as text these are empty texts.
    """
    import pyarrow.types as types

    for number, name in enumerate(table.schema.names):
        column, kind = table.column(number), kinds[name]
        if (column.null_count or types.is_null(column.type)) and plain(column.type) != kind:
            column = column.cast(kind, safe=False)  # big whole numbers are rounded as they are without gaps
            table = table.set_column(number, name, column.fill_null("") if str(kind) == "large_string" else column)
    return table


def without_empty(table, name: str):
    """A table in one of whose columns of text an empty text is a missing one: a CSV file has no other way to say so."""
    import pyarrow as pa
    import pyarrow.compute as compute

    words = table.column(name)
    there = compute.if_else(compute.equal(words, ""), pa.scalar(None, words.type), words)
    return table.set_column(table.schema.get_field_index(name), name, there)


def _with(value, array):
    """``array`` with a value of its type in the gaps."""
    import pyarrow as pa
    import pyarrow.types as types

    return pa.repeat(value, len(array)) if types.is_null(array.type) else array.fill_null(pa.scalar(value, array.type))


def _fitting(value, kind):
    """``value`` as Arrow takes it for a type; it would cut off the fraction of one for whole numbers.

    Raises:
        ValueError, ArithmeticError: it would become another value.
    """
    import pyarrow.types as types

    if not is_number(kind):
        return value
    if not isinstance(value, (Real, Decimal)):
        raise ValueError("it is no number")
    if types.is_decimal(kind):
        return Decimal(str(value))
    if types.is_boolean(kind) or types.is_integer(kind):
        if value != int(value) or (types.is_boolean(kind) and value not in (0, 1)):
            raise ValueError(f"it is no {'yes or no' if types.is_boolean(kind) else 'whole number'}")
        return bool(value) if types.is_boolean(kind) else int(value)
    return float(value)


def _inside(path: str, kind) -> Iterator[str]:
    """The names of the columns of a struct, and of the structs in it."""
    import pyarrow.types as types

    for field in kind if types.is_struct(kind) else ():
        yield f"{path}.{field.name}"
        yield from _inside(f"{path}.{field.name}", field.type)
