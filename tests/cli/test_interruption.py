"""Ctrl-C reaches the work also where somebody's code swallowed it."""

import signal
from contextlib import suppress

import pytest

from hasten.cli.interruption import interruptible
from hasten.contract.watch import silent


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["usual", "ignored"])
def handler(request):
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_what_somebody_swallowed_comes_with_the_next_word_of_progress(handler):
    with interruptible(silent) as watch:
        watch("working", 0.1, None)
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if handler is signal.SIG_IGN:
            watch("working", 0.2, None)
        else:
            with pytest.raises(KeyboardInterrupt):
                watch("working", 0.2, None)
    assert signal.getsignal(signal.SIGINT) is handler
