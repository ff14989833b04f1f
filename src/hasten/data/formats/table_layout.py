"""Which columns of a table are read, and what a batch of them looks like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hasten.core.errors import ConfigurationError, suggest
from hasten.data.formats import argument_checks
from hasten.data.formats.arrays import gathered
from hasten.data.formats.table_columns import Classes, Matrix, Numbers, column
from hasten.data.formats.table_types import is_number, plain, shape_of, tensor_type
from hasten.data.source import column_leaves, map_columns


@dataclass(frozen=True)
class Layout:
    """What is read of a table.

    Attributes:
        types: the plain Arrow type of every column that is read, the target's too.
        inputs: the names of the columns besides the target.
        target: the name of the column to learn, or None.
        told: columns of which the user knows that a matrix rounds them.
    """

    types: dict[str, Any]
    inputs: list[str]
    target: str | None
    told: set[str] = field(default_factory=set, compare=False)

    @staticmethod
    def of(
        schemas: Mapping[str, Any], columns: Sequence[str] | None, target: str | None, guessed: bool = False
    ) -> Layout:
        """The layout that was asked for, of files with these Arrow schemas, by path.

        Args:
            guessed: the types were guessed from text, so whole numbers in one file may be fractions in another.

        Raises:
            Refusal: there is no such column, the files differ, or the target cannot be learnt.
        """
        columns = None if columns is None else argument_checks.names("columns=", columns)
        argument_checks.name("target=", target)
        path, schema = next(iter(schemas.items()))
        wanted = list(
            dict.fromkeys([*(schema.names if columns is None else columns), *([] if target is None else [target])])
        )
        for name in wanted:
            if name not in schema.names:
                raise ConfigurationError(f"{path} has no column {name!r}{suggest(name, schema.names)}")
        inputs = [name for name in wanted if name != target]
        if not inputs:
            raise ConfigurationError(
                f"no column of {path} is left to read" + (f" besides the target {target!r}" if target else "")
            )
        types = _common_types(schemas, None if columns is None else wanted, guessed)
        layout = Layout({name: types[name] for name in wanted}, inputs, target)
        if target is not None and not layout.has_classes and not is_number(shape_of(types[target])[1]):
            raise ConfigurationError(
                f"the target {target!r} is of type {types[target]}; it must be a number, a text or a list of fixed size"
            )
        return layout

    @property
    def names(self) -> list[str]:
        return list(self.types)

    @property
    def is_matrix(self) -> bool:
        """Whether the inputs of a batch are one matrix."""
        return self.target is not None and all(is_number(self.types[name]) for name in self.inputs)

    @property
    def blocking_columns(self) -> list[str]:
        """The inputs that are no numbers, where some are and a target is to be predicted: without them, these would be a matrix."""
        odd = [name for name in self.inputs if not is_number(self.types[name])]
        return odd if self.target is not None and len(odd) < len(self.inputs) else []

    @property
    def has_classes(self) -> bool:
        return self.target is not None and str(self.types[self.target]) == "large_string"

    def bytes(self, rows: int, unpacked: int) -> int:
        """About how much memory so many rows take; ``unpacked``: what they take in the files, before compression."""
        numbers = [kind for kind in self.types.values() if is_number(shape_of(kind)[1])]
        packed = len(numbers) < len(self.types)  # text and the like, whose size only the files know
        return (
            sum(rows * 8 * math.prod(shape_of(kind)[0]) for kind in numbers) // (2 if self.is_matrix else 1)
            + 2 * unpacked * packed
        )

    def rows(self, count: int, classes: Sequence[str] | None) -> Rows:
        """Room for so many rows."""
        columns = {name: column(self.types[name], count, name) for name in ([] if self.is_matrix else self.inputs)}
        return Rows(
            Matrix(self.inputs, count, self.told) if self.is_matrix else None,
            columns,
            self.target,
            self._target(count, classes),
        )

    def _target(self, count: int, classes: Sequence[str] | None):
        if self.target is None:
            return None
        if self.has_classes:
            return Classes(classes, count, self.target)
        shape, kind = shape_of(self.types[self.target])
        fractions = tensor_type(kind).is_floating_point
        return Numbers(torch.float32 if fractions else torch.int64, count, shape, self.target)


@dataclass
class Rows:
    """Decoded rows of a table: ``put`` in their order, ``read`` in any."""

    matrix: Matrix | None
    columns: dict[str, Any]
    target_name: str | None
    target: Any

    def put(self, table, fill, where: str) -> None:
        """Adds the rows of an Arrow table.

        Raises:
            Refusal: values are missing, or are none of the target's classes.
        """
        if self.matrix is not None:
            self.matrix.put(table, fill, where)
        for name, each in self.columns.items():
            each.put(table.column(name), fill, where)
        if self.target is not None:  # what is learnt is not made up: it is filled by its name alone
            self.target.put(table.column(self.target_name), fill if isinstance(fill, Mapping) else {}, where)

    def read(self, index: torch.Tensor):
        """A matrix or a dict of columns; with a target the tuple (these, target)."""
        if self.matrix is not None:
            inputs = self.matrix.read(index)
        else:
            inputs = {name: each.read(index) for name, each in self.columns.items()}
        return inputs if self.target is None else (inputs, self.target.read(index))


def merged(parts: list, order: torch.Tensor):
    """Concatenates batches of equal layout, then puts their rows into another order."""
    columns = zip(*map(column_leaves, parts), strict=True)
    return map_columns(lambda _: _concatenated(next(columns), order), parts[0])


def _concatenated(parts: Sequence, order: torch.Tensor):
    if isinstance(parts[0], torch.Tensor):
        return gathered(torch.cat(parts), order)
    rows = [row for part in parts for row in part]
    return [rows[number] for number in order.tolist()]


def _common_types(schemas: Mapping[str, Any], wanted: list[str] | None, guessed: bool) -> dict[str, Any]:
    """The plain type of the wanted columns (None for all), which must be the same in every file."""
    common: dict[str, Any] = {}
    seen = set()  # most files have the very same schema
    first = next(iter(schemas))
    for path, schema in schemas.items():
        if schema in seen:
            continue
        seen.add(schema)
        types = _types(schema, wanted, path)
        common = common or dict(types)
        for name in dict.fromkeys([*common, *types]):
            if name not in types or name not in common:
                holder, lacker = (first, path) if name in common else (path, first)
                raise ConfigurationError(
                    f"the files differ: {holder} has a column {name!r}, {lacker} has not; say columns=[...] that all have"
                )
            if (joined := _joined(common[name], types[name], guessed)) is None:
                raise ConfigurationError(
                    f"the files differ: column {name!r} is of type {common[name]} in {first}, and of type {types[name]} in {path}"
                )
            common[name] = joined
    return common


def _types(schema, wanted: list[str] | None, path: str) -> dict[str, Any]:
    names = [name for name in schema.names if wanted is None or name in wanted]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"{path} has two columns named {twice!r}; rename one")
    return {name: plain(schema.field(name).type) for name in names}


def _joined(one, other, guessed: bool):
    """The type that holds the values of both, or None."""
    import pyarrow as pa

    if one == other:
        return one
    kinds = {str(one), str(other)}
    if "null" in kinds and guessed:
        return other if str(one) == "null" else one
    return pa.float64() if guessed and kinds == {"int64", "double"} else None
