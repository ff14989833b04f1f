"""Durations as users write them: ``90s``, ``10m``, ``1h``."""

import math
import re

from hasten.core.errors import ConfigurationError

MAX_DURATION_S = 1e9  # about thirty years
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def parse_duration(duration: float | str, name: str = "") -> float:
    """``90``, ``90s``, ``10m`` or ``1h`` in seconds; a number is in seconds already. ConfigurationError, which begins
    with ``name``, if it is neither or not above 0.
    """
    value = duration
    if isinstance(duration, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", duration.strip())
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MAX_DURATION_S:
        raise ConfigurationError(f"{name} must be a time such as 90s, 10m or 1h, not {duration!r:.80}".strip())
    return float(value)


def parse_budget(budget: float | str) -> float:
    """A budget (number of seconds, or text such as ``10m``) in seconds; errors as in ``parse_duration``."""
    return parse_duration(budget, "budget")


def format_duration(seconds: float) -> str:
    """Seconds as a rounded text such as ``105 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def duration_option(seconds: float) -> str:
    """Seconds as an option takes them, rounded up: ``105s``, ``12m`` or ``4h``."""
    unit, length = ("s", 1) if seconds < 120 else ("m", 60) if seconds < 7200 else ("h", 3600)
    return f"{math.ceil(seconds / length)}{unit}"
