"""Checks of numbers, names and shapes that users pass, before anything runs."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from hasten.core.errors import ConfigurationError

LARGEST = 1 << 62  # of what is counted in 64 bits


def at_least(name: str, value: Any, minimum: int, optional: bool = False, most: int = LARGEST) -> None:
    """ConfigurationError unless ``value`` is an integer from ``minimum`` to ``most``, or None if ``optional``."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigurationError(f"{name} must be an integer of at least {minimum}, not {value!r:.80}")
    if value > most:
        raise ConfigurationError(f"{name} must be at most {most}, not {value!r:.80}")


def check_positive(name: str, value: Any) -> None:
    """ConfigurationError, which begins with ``name``, unless ``value`` is a finite number above 0 or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ConfigurationError(f"{name} must be a number above 0, not {value!r:.80}")


def check_int(name: str, value: Any) -> int:
    """Returns a Python, NumPy or one-element tensor integer, no bool, as ``int``; ConfigurationError otherwise."""
    try:
        integer = index(value)
    except (TypeError, RuntimeError, ValueError):
        integer = None
    if integer is None or isinstance(value, bool) or not -LARGEST <= integer <= LARGEST:
        raise ConfigurationError(f"{name} must be an integer, not {value!r:.80}")
    return integer


def check_name(argument: str, value: Any) -> str | None:
    """Returns ``value``, a string or None; for others ConfigurationError, which begins with ``argument``."""
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{argument} must be a string, the name of one column or feature, not {value!r:.80}")
    return value


def check_names(argument: str, value: Iterable[str]) -> list[str]:
    """Returns ``value`` as a list of names, in order. ConfigurationError for a single string, an unordered set, a dict
    (whose values would be lost), no name, one that is no string, and a name given twice.
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


def check_shape(argument: str, value: Any) -> tuple[int, ...]:
    """Returns a shape, whose sizes must be at least 0, as a tuple; ConfigurationError for anything else."""
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in value
    ):
        raise ConfigurationError(f"{argument} must be a shape, as in (28, 28), not {value!r:.80}")
    return tuple(value)
