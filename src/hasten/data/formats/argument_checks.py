"""Names and shapes that the makers of sources are given: nonsense is told at the call, in one line that says what was wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hasten.core.errors import ConfigurationError


def name(setting: str, value) -> str | None:
    """One name, or None.

    Raises:
        Refusal: it is something else.
    """
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{setting} is one name, not {value!r:.80}")
    return value


def names(setting: str, value: Iterable[str]) -> list[str]:
    """Some names, in order.

    Raises:
        Refusal: one text, whose letters would be taken for names; a set, which has no order; a dict, whose values would be lost; no names,
            or one of them twice.
    """
    if isinstance(value, str):
        raise ConfigurationError(f"{setting} wants a list of names, as in {setting}[{value!r}]")
    if not isinstance(value, Iterable) or isinstance(value, (bytes, set, frozenset, Mapping)):
        raise ConfigurationError(f"{setting} wants a list of names, not {value!r:.80}")
    listed = list(value)
    if not listed:
        raise ConfigurationError(f"{setting} names nothing; leave it out, or say some names")
    if odd := [each for each in listed if not isinstance(each, str)]:
        raise ConfigurationError(f"{setting} wants a list of names, and {odd[0]!r:.80} is none")
    if twice := [each for each, times in Counter(listed).items() if times > 1]:
        raise ConfigurationError(f"{setting} names {twice[0]!r} twice")
    return listed


def shape(setting: str, value: Sequence[int]) -> tuple[int, ...]:
    """The lengths of an array, each at least 0.

    Raises:
        Refusal: it is something else.
    """
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value
    ):
        raise ConfigurationError(f"{setting} is a shape, as in (28, 28), not {value!r:.80}")
    return tuple(value)
