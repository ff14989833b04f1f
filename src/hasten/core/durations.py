"""Spans of time as people write them: ``90s``, ``10m``, ``1h``."""

import re
from numbers import Real

from hasten.core.errors import ConfigurationError

MAX_SECONDS = 1e9  # seconds, some thirty years
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def parse_duration(span: float | str) -> float:
    """``90``, ``90s``, ``10m`` or ``1h`` as seconds; a number is seconds already.

    Raises:
        Refusal: it is neither, or no time at all.
    """
    value = span
    if isinstance(span, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", span.strip())
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value < MAX_SECONDS:
        raise ConfigurationError(f"must be a time such as 90s, 10m or 1h, not {span!r:.80}")
    return float(value)


def parse_budget(span: float | str) -> float:
    """A budget in seconds.

    Raises:
        Refusal: it is no time.
    """
    try:
        return parse_duration(span)
    except ConfigurationError as why:
        raise ConfigurationError(f"budget {why}") from None
