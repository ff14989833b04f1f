"""Stop signals: Ctrl-C and termination wait for the end of a training step."""

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from hasten.utils.signals import handle_signals

DEBOUNCE_S = 1.0  # two presses of Ctrl-C within this time are one request


@contextmanager
def catch_stop_signals() -> Generator[list[int]]:
    """Context manager: yields a list to which SIGINT, SIGTERM and SIGHUP are appended instead of ending the process.
    A signal that arrives more than ``DEBOUNCE_S`` after the first raises KeyboardInterrupt.
    """
    received: list[int] = []
    first_at = 0.0
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if os.getpid() != owner:  # a forked loader worker: its parent decides when it ends
            if number == signal.SIGTERM:
                os._exit(1)
            return
        if not received:
            first_at = time.monotonic()
        elif time.monotonic() > first_at + DEBOUNCE_S:
            raise KeyboardInterrupt
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ``nohup`` keeps its meaning
        numbers.append(signal.SIGHUP)
    with handle_signals(numbers, handle):
        yield received
