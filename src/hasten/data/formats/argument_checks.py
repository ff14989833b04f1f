"""Checks of names and shapes that are passed to the functions that make sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hasten.core.errors import ConfigurationError


def name(argument: str, value: Any) -> str | None:
    """Returns the value of an argument that must be a string or None.

    Raises:
        ConfigurationError: The value is something else; the message begins with ``argument``.
    """
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{argument} must be one name, not {value!r:.80}")
    return value


def names(argument: str, value: Iterable[str]) -> list[str]:
    """Returns the value of an argument that must be a list of different names.

    Raises:
        ConfigurationError: ``value`` is a single string, an unordered set, a dict (whose values would be lost), empty,
            or contains a name twice.
    """
    if isinstance(value, str):
        raise ConfigurationError(f"{argument} must be a list of names, as in {argument}[{value!r}]")
    if not isinstance(value, Iterable) or isinstance(value, (bytes, set, frozenset, Mapping)):
        raise ConfigurationError(f"{argument} must be a list of names, not {value!r:.80}")
    listed = list(value)
    if not listed:
        raise ConfigurationError(f"{argument} is empty; omit it, or give at least one name")
    if odd := [item for item in listed if not isinstance(item, str)]:
        raise ConfigurationError(f"{argument} must be a list of names; {odd[0]!r:.80} is not a name")
    if repeated := [item for item, count in Counter(listed).items() if count > 1]:
        raise ConfigurationError(f"{argument} contains {repeated[0]!r} twice")
    return listed


def shape(argument: str, value: Any) -> tuple[int, ...]:
    """Returns the value of an argument that must be a shape: a sequence of integers of at least 0, as a tuple.

    Raises:
        ConfigurationError: ``value`` is something else.
    """
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in value
    ):
        raise ConfigurationError(f"{argument} must be a shape, as in (28, 28), not {value!r:.80}")
    return tuple(value)
