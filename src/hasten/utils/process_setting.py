"""A setting of the process that holds during a run."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from hasten.core.types import ContextFactory

T = TypeVar("T")


def with_setting(
    context: ContextFactory, change: Callable[[T], object], value: T, current: Callable[[], T]
) -> ContextFactory:
    """``context``, inside which ``change(value)`` holds; what ``current()`` returned before is set again at the end."""

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
