"""A setting of the process that holds during a run."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from hasten.core.types import ContextFactory

T = TypeVar("T")


def with_setting(
    context: ContextFactory, change: Callable[[T], object], value: T, current: Callable[[], T]
) -> ContextFactory:
    """Returns a factory of contexts that enter ``context()``, then call ``change(value)``; at their end they call
    ``change`` with what ``current()`` returned before.
    """

    @contextmanager
    def changed() -> Generator[None]:
        with context():
            before = current()
            change(value)
            try:
                yield
            finally:
                change(before)

    return changed
