"""Handlers of signals: in force within the block, restored after it, left as they are outside of the main thread."""

import os
import signal
import threading

import pytest

from hasten.utils.signals import handle_signals


def test_handler_receives_signals_until_the_block_ends():
    received, before = [], signal.getsignal(signal.SIGUSR1)
    with (
        pytest.raises(ValueError, match="of the block"),
        handle_signals([signal.SIGUSR1], lambda *of: received.append(of[0])),
    ):
        os.kill(os.getpid(), signal.SIGUSR1)
        raise ValueError("of the block")
    assert received == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_handlers_stay_as_they_are_in_another_thread():
    seen = []

    def run():
        with handle_signals([signal.SIGUSR1], signal.SIG_IGN):
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGUSR1)] and seen[0] is not signal.SIG_IGN
