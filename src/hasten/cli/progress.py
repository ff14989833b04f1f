"""Shows progress on standard error: a bar on a terminal, else a line when something changes.

Nothing with ``--quiet``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hasten.core.progress import ProgressCallback, no_progress
from hasten.utils.durations import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress

WITHOUT_BAR = ("dumb", "unknown")  # terminals on which rich draws nothing
INITIAL_DELAY_S = 2.0
BAR_INTERVAL_S = 0.5  # drawing the bar takes about a millisecond
LINE_INTERVAL_S = 15.0  # between two lines at least
LINE_PROGRESS = 0.1  # after which there is another line although the work is the same


@contextmanager
def progress_display(quiet: bool) -> Iterator[ProgressCallback]:
    """Context manager: a callback that shows progress on standard error; a bar is erased at the end."""
    if quiet:
        yield no_progress
    elif sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in WITHOUT_BAR:
        yield from _bar()
    else:
        yield _lines()


def print_stderr(line: str) -> None:
    """Print a line on standard error. A closed pipe (``2> >(head)``) or a full disk must not stop the work."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        redirect_to_devnull(2)
    except OSError:
        pass


def redirect_to_devnull(descriptor: int) -> None:
    """Replace a file descriptor by one that discards what is written to it."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    if devnull != descriptor:  # equal if the descriptor was closed and is the lowest free one
        os.dup2(devnull, descriptor)
        os.close(devnull)


def _bar() -> Iterator[ProgressCallback]:
    bar, is_due = None, _rate_limit(BAR_INTERVAL_S)

    def on_progress(what: str, done: float, seconds_left: float | None = None) -> None:
        nonlocal bar
        if not is_due():
            return
        with suppress(OSError):  # the terminal was closed; the work continues
            bar = bar or _start_bar()
            bar.update(bar.task_ids[0], description=what, completed=done, left=_left(seconds_left), refresh=True)

    try:
        yield on_progress
    finally:
        if bar:
            with suppress(OSError):
                bar.stop()


def _start_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}")
    # Without auto_refresh no thread runs beside the training.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    bar.add_task("", total=1.0, left="")
    bar.start()
    return bar


def _lines() -> ProgressCallback:
    is_due, shown = _rate_limit(LINE_INTERVAL_S), ("", 0.0)

    def on_progress(what: str, done: float, seconds_left: float | None = None) -> None:
        nonlocal shown
        is_news = what != shown[0] or abs(done - shown[1]) >= LINE_PROGRESS
        if is_news and is_due():
            shown = what, done
            print_stderr(f"{what}: {done:.0%} {_left(seconds_left)}".rstrip())

    return on_progress


def _rate_limit(interval_s: float) -> Callable[[], bool]:
    """A function that returns True once per ``interval_s``, first INITIAL_DELAY_S after its first call."""
    due = None

    def is_due() -> bool:
        nonlocal due
        now = time.monotonic()
        due = now + INITIAL_DELAY_S if due is None else due
        if now < due:
            return False
        due = now + interval_s
        return True

    return is_due


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{format_duration(seconds)} left"
