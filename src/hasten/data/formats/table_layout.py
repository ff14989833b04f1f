"""Which columns of a table are read, and the form of a batch of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch

from hasten.core.errors import ConfigurationError, suggest
from hasten.data.array_source import gathered
from hasten.data.formats.table_columns import ClassColumn, MatrixColumn, NumberColumn, column
from hasten.data.formats.table_types import is_number, plain, shape_of, tensor_type
from hasten.data.source import column_leaves, map_columns
from hasten.data.validation import check_name, check_names

PANDAS_INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+|")  # a column as pandas and ``to_csv`` of it name it


@dataclass(frozen=True)
class Layout:
    """The columns of a table that are read, with their types."""

    types: dict[str, Any]  # plain Arrow type of every column that is read, including the target
    inputs: list[str]  # names of the columns other than the target
    target: str | None  # name of the column to predict, or None
    # columns about whose rounding in a matrix the user has been warned
    warned: set[str] = field(default_factory=set, compare=False)

    @staticmethod
    def of(
        schemas: Mapping[str, Any], columns: Sequence[str] | None, target: str | None, guessed: bool = False
    ) -> Layout:
        """Returns the layout for files with these Arrow schemas, by path. The other arguments are those of ``parquet``.

        ``guessed``: the types were guessed from text, so integers in one file may be floats in another.
        ConfigurationError if a column does not exist, the files differ, or the target has an unsuitable type.
        """
        columns = None if columns is None else check_names("columns=", columns)
        check_name("target=", target)
        path, schema = next(iter(schemas.items()))
        known = _columns(schema) if columns is None else schema.names
        chosen: list[str] = [*(known if columns is None else columns), *([] if target is None else [target])]
        wanted = list(dict.fromkeys(chosen))
        for name in wanted:
            if name not in known:
                raise ConfigurationError(f"{path} has no column {name!r}{suggest(name, known)}")
        inputs = [name for name in wanted if name != target]
        if not inputs:
            besides = f" besides the target {target!r}" if target else ""
            raise ConfigurationError(f"{path} has no column to read{besides}; an input column is needed")
        types = _common_types(schemas, None if columns is None else wanted, guessed)
        layout = Layout({name: types[name] for name in wanted}, inputs, target)
        if target is not None and not layout.has_classes and not is_number(shape_of(types[target])[1]):
            advice = "it must be a number, text or a list of fixed size"
            raise ConfigurationError(f"the target {target!r} is of type {types[target]}; {advice}")
        return layout

    @property
    def names(self) -> list[str]:
        return list(self.types)

    @property
    def is_matrix(self) -> bool:
        """Whether a batch's inputs are one float32 matrix: there is a target, and all inputs are numbers."""
        return self.target is not None and all(is_number(self.types[name]) for name in self.inputs)

    @property
    def blocking_columns(self) -> list[str]:
        """The inputs that are not numbers, if only they prevent a batch of (matrix, target)."""
        others = [name for name in self.inputs if not is_number(self.types[name])]
        return others if self.target is not None and len(others) < len(self.inputs) else []

    @property
    def has_classes(self) -> bool:
        return self.target is not None and str(self.types[self.target]) == "large_string"

    def bytes(self, rows: int, unpacked: int) -> int:
        """Estimates the bytes in memory of ``rows`` rows, of files with ``unpacked`` bytes after decompression."""
        numeric = [arrow_type for arrow_type in self.types.values() if is_number(shape_of(arrow_type)[1])]
        size = sum(rows * 8 * math.prod(shape_of(arrow_type)[0]) for arrow_type in numeric)
        has_others = len(numeric) < len(self.types)  # text and lists, whose size only the files tell
        return size // (2 if self.is_matrix else 1) + 2 * unpacked * has_others


class Rows:
    """Decoded rows of a table: ``put`` adds them in order, ``read`` returns them in any order.

    ``count`` is the number of rows; ``classes`` are the values of a text target.
    """

    def __init__(self, layout: Layout, count: int, classes: Sequence[str] | None) -> None:
        self.matrix = MatrixColumn(layout.inputs, count, layout.warned) if layout.is_matrix else None
        others = [] if layout.is_matrix else layout.inputs
        self.columns = {name: column(layout.types[name], count, name) for name in others}
        self.target: NumberColumn | None = None
        if layout.target is not None and layout.has_classes:
            self.target = ClassColumn(classes or [], count, layout.target)
        elif layout.target is not None:
            shape, arrow_type = shape_of(layout.types[layout.target])
            dtype = torch.float32 if tensor_type(arrow_type).is_floating_point else torch.int64
            self.target = NumberColumn(dtype, count, shape, layout.target)

    def put(self, table: Any, fill: Any, where: str) -> None:
        """Adds the rows of an Arrow table; ConfigurationError for missing values, and for a target that is not one of
        its classes.
        """
        if self.matrix is not None:
            self.matrix.put(table, fill, where)
        for name, values in self.columns.items():
            values.put(table.column(name), fill, where)
        if self.target is not None:  # one fill value for all columns must not invent targets
            self.target.put(table.column(self.target.name), fill if isinstance(fill, Mapping) else {}, where)

    def read(self, index: torch.Tensor) -> Any:
        """Returns the batch of rows at ``index``: matrix or dict of columns; with a target (inputs, target)."""
        if self.matrix is not None:
            inputs = self.matrix.read(index)
        else:
            inputs = {name: values.read(index) for name, values in self.columns.items()}
        return inputs if self.target is None else (inputs, self.target.read(index))


def merged(parts: list, order: torch.Tensor) -> Any:
    """Returns batches of equal layout as one, whose row ``i`` is row ``order[i]`` of their concatenation."""
    columns = zip(*map(column_leaves, parts), strict=True)
    return map_columns(lambda _: _concatenated(next(columns), order), parts[0])


def _concatenated(parts: Sequence, order: torch.Tensor) -> torch.Tensor | list:
    if isinstance(parts[0], torch.Tensor):
        return gathered(torch.cat(list(parts)), order)
    rows = [row for part in parts for row in part]
    return [rows[index] for index in order.tolist()]


def _common_types(schemas: Mapping[str, Any], wanted: list[str] | None, guessed: bool) -> dict[str, Any]:
    """Returns {column: type} of the wanted columns (None: all). ConfigurationError if files differ."""
    common: dict[str, Any] = {}
    seen = set()  # most files have equal schemas
    first = next(iter(schemas))
    for path, schema in schemas.items():
        if schema in seen:
            continue
        seen.add(schema)
        types = _types(schema, wanted, path, guessed)
        common = common or dict(types)
        for name in dict.fromkeys([*common, *types]):
            if name not in types or name not in common:
                having, lacking = (first, path) if name in common else (path, first)
                other = f"{lacking} has not; pass columns=[...] with columns of all files"
                raise ConfigurationError(f"the files differ: {having} has a column {name!r}, {other}")
            joined = _join_types(common[name], types[name], guessed)
            if joined is None:
                both = f"{common[name]} in {first}, and of type {types[name]} in {path}"
                advice = "convert one of them, or leave the column out"
                raise ConfigurationError(f"the files differ: column {name!r} is of type {both}; {advice}")
            common[name] = joined
    return common


def _columns(schema: Any) -> list[str]:
    """The columns of a file, without the row numbers in which pandas stores an index that has no name."""
    return [name for name in schema.names if not PANDAS_INDEX.fullmatch(name)]


def _types(schema: Any, wanted: list[str] | None, path: str, guessed: bool) -> dict[str, Any]:
    names = _columns(schema) if wanted is None else [name for name in schema.names if name in wanted]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        advice = ", or if its first line holds values, pass csv(header=[names])" if guessed else ""
        raise ConfigurationError(f"{path} has two columns named {repeated!r}; rename one{advice}")
    return {name: plain(schema.field(name).type) for name in names}


def _join_types(one: Any, other: Any, guessed: bool) -> Any:
    """Returns the Arrow type that can hold the values of both types; None if there is none."""
    if one == other:
        return one
    names = {str(one), str(other)}
    if "null" in names and guessed:
        return other if str(one) == "null" else one
    return pa.float64() if guessed and names == {"int64", "double"} else None
