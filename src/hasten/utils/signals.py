"""Handlers of signals for the length of a block of code."""

import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Handler) -> Generator[None]:
    """Context manager: installs ``handler`` for the signals and restores the previous handlers at the end.

    Does nothing in a thread that is not the main one, where Python refuses to set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
