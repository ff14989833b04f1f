"""Draws progress on standard error: a bar on a terminal, a line now and then elsewhere, nothing when asked for quiet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hasten.core.progress import ProgressCallback, no_progress

PATIENCE = 2.0  # seconds that may pass without a word
REDRAW = 0.5  # seconds between two pictures of the bar; drawing one takes a millisecond
BETWEEN_LINES = 15.0  # seconds between two lines where there is no terminal


@contextmanager
def watching(quiet: bool) -> Iterator[ProgressCallback]:
    """A ``watch`` that draws what it is told; gone without a trace when the work is done."""
    if quiet:
        yield no_progress
    elif sys.stderr.isatty():
        yield from _bar()
    else:
        yield _lines()


def tell(line: str) -> None:
    """One line on standard error. That nobody reads it any more (``2> >(head)``) stops no work, nor that the disk is full for a moment."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    except OSError:
        pass


def _bar() -> Iterator[ProgressCallback]:
    bar, is_due = None, _regularly(REDRAW)

    def watch(what: str, done: float, seconds_left: float | None = None) -> None:
        nonlocal bar
        if not is_due():
            return
        with suppress(OSError):  # the terminal is gone; the work goes on
            bar = bar or _started_bar()
            bar.update(bar.task_ids[0], description=what, completed=done, left=_left(seconds_left), refresh=True)

    try:
        yield watch
    finally:
        if bar:
            with suppress(OSError):
                bar.stop()


def _started_bar():
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}")
    bar = Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False
    )  # no thread beside the training
    bar.add_task("", total=1.0, left="")
    bar.start()
    return bar


def _lines() -> ProgressCallback:
    is_due = _regularly(BETWEEN_LINES)

    def watch(what: str, done: float, seconds_left: float | None = None) -> None:
        if is_due():
            tell(f"{what}: {done:.0%} {_left(seconds_left)}".rstrip())

    return watch


def _regularly(seconds: float) -> Callable[[], bool]:
    """``is_due()``: true every so many seconds, for the first time when patience is over since it was first asked."""
    due = None

    def is_due() -> bool:
        nonlocal due
        now = time.monotonic()
        due = now + PATIENCE if due is None else due
        if now < due:
            return False
        due = now + seconds
        return True

    return is_due


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"
