"""What a command gives back, and how it reaches standard output: a page for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CommandResult:
    """The result of a command.

    Attributes:
        result: the plain data behind ``--json``; None where other processes answer.
        page: makes what a person sees: a rich renderable or a text. Only called where a person looks.
        code: 0 done, 1 a result that is a "no".
        elsewhere: runs the processes that answer, on this one's standard output, and returns their code.
    """

    result: dict | None
    page: Callable[[], Any] = str
    code: int = 0
    deferred: Callable[[], int] | None = None


def show(answer: CommandResult) -> None:
    """Prints an answer for a person. A text goes out as it is, so that it can be redirected into a file."""
    page = answer.page()
    if isinstance(page, str):
        print(page)
        return
    from rich.console import Console

    Console(highlight=False).print(page, crop=False)  # a command is one line, however wide the terminal is


def strict_json(value) -> str:
    """One line of JSON that every parser takes: no NaN, no Infinity."""
    return json.dumps(_plain(value), allow_nan=False)


@contextmanager
def stdout_kept_for_the_answer() -> Iterator[None]:
    """Inside, whatever is written to standard output goes to standard error: a task file's ``print``, a C library, a
    child process. So a program that reads the answer finds the answer and nothing else."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _plain(value):
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return _plain(value.item()) if hasattr(value, "item") else str(value)
