"""Progress, told to whoever watches: ``watch(what, done, seconds_left)`` with ``done`` in 0..1."""

from collections.abc import Callable

ProgressCallback = Callable[[str, float, float | None], None]


def no_progress(what: str, done: float, seconds_left: float | None = None) -> None:
    """Nobody watches."""
