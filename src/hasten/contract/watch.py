"""Progress, told to whoever watches: ``watch(what, done, seconds_left)`` with ``done`` in 0..1."""

from collections.abc import Callable

Watch = Callable[[str, float, float | None], None]


def silent(what: str, done: float, seconds_left: float | None = None) -> None:
    """Nobody watches."""
