"""Progress: ``callback(what, done, seconds_left)`` with ``done`` in 0..1; ``seconds_left`` is None if unknown."""

from collections.abc import Callable

ProgressCallback = Callable[[str, float, float | None], None]


def no_progress(what: str, done: float, seconds_left: float | None = None) -> None:
    """A progress callback that ignores its arguments; the default where none is given."""
