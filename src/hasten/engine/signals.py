"""Stopping when asked to: Ctrl-C and the termination signal wait for the end of a step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ONE_WISH = 1.0  # seconds: who presses Ctrl-C twice in a row means one thing


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Inside, SIGINT, SIGTERM and SIGHUP are noted in the list, not acted upon; one that comes ``ONE_WISH`` after the first interrupts at once."""
    asked: list[int] = []
    since = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    owner = os.getpid()

    def note(number: int, frame) -> None:
        nonlocal since
        if os.getpid() != owner:  # a loader's worker: its parent tells it when to end
            if number == signal.SIGTERM:
                os._exit(1)
            return
        if not asked:
            since = time.monotonic()
        elif time.monotonic() > since + ONE_WISH:
            raise KeyboardInterrupt
        asked.append(number)

    hangup = (
        [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    )  # ``nohup`` stays what it is
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, *hangup)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
