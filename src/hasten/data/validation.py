"""Numbers that are asked for, held against what they may be: what lies outside is refused before anything runs."""

from __future__ import annotations

import math
from operator import index

from hasten.core.errors import ConfigurationError

LARGEST = 1 << 62  # of what is counted in 64 bits


def at_least(name: str, value, least: int, optional: bool = False, most: int = LARGEST) -> None:
    """Refuses what is no whole number from ``least`` to ``most``; None only where it may be left out.

    Raises:
        Refusal: with ``name``, which says whose number it is.
    """
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name} must be a whole number of at least {least}, not {value!r:.80}")
    if value > most:
        raise ConfigurationError(f"{name} must be at most {most}, not {value!r:.80}")


def check_positive(name: str, value) -> None:
    """Refuses what is no number above 0; None says that nothing was said."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf
    ):
        raise ConfigurationError(f"{name} must be a number above 0, not {value!r:.80}")


def check_int(name: str, value) -> int:
    """A whole number of any kind (NumPy's, a tensor's); a truth value is none."""
    try:
        number = index(value)
    except (TypeError, RuntimeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or not -LARGEST <= number <= LARGEST:
        raise ConfigurationError(f"{name} must be a whole number, not {value!r:.80}")
    return number
