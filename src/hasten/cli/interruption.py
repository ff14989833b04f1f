"""Ctrl-C that nobody can swallow: an ``except:`` of somebody's code, or a destructor, may hide it, but not from the next word of progress."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from hasten.contract.watch import Watch


@contextmanager
def interruptible(watch: Watch) -> Iterator[Watch]:
    """``watch``, which raises KeyboardInterrupt where Ctrl-C was pressed and the work goes on all the same."""
    pressed = False

    def interrupt(number: int, frame) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def watched(what: str, done: float, seconds_left: float | None = None) -> None:
        if pressed:
            raise KeyboardInterrupt
        watch(what, done, seconds_left)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # somebody else's business, or nobody's (nohup)
        yield watch
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield watched
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
