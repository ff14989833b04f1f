"""Checks of numbers that users pass, before anything runs."""

from __future__ import annotations

import math
from operator import index
from typing import Any

from hasten.core.errors import ConfigurationError

LARGEST = 1 << 62  # of what is counted in 64 bits


def at_least(name: str, value: Any, minimum: int, optional: bool = False, most: int = LARGEST) -> None:
    """Checks that ``value`` is an integer from ``minimum`` to ``most``, or None if it is ``optional``.

    Raises:
        ConfigurationError: It is not; the message begins with ``name``, the name of the argument.
    """
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigurationError(f"{name} must be an integer of at least {minimum}, not {value!r:.80}")
    if value > most:
        raise ConfigurationError(f"{name} must be at most {most}, not {value!r:.80}")


def check_positive(name: str, value: Any) -> None:
    """Checks that ``value`` is a finite number above 0, or None.

    Raises:
        ConfigurationError: It is not; the message begins with ``name``, the name of the argument.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ConfigurationError(f"{name} must be a number above 0, not {value!r:.80}")


def check_int(name: str, value: Any) -> int:
    """Returns ``value`` as a Python integer; NumPy integers and integer tensors with one element are accepted.

    Raises:
        ConfigurationError: ``value`` is no integer, a bool, or larger than 2**62.
    """
    try:
        integer = index(value)
    except (TypeError, RuntimeError, ValueError):
        integer = None
    if integer is None or isinstance(value, bool) or not -LARGEST <= integer <= LARGEST:
        raise ConfigurationError(f"{name} must be an integer, not {value!r:.80}")
    return integer
