"""The result of a command, and how it reaches standard output: text for a person or one JSON object for a program."""

import ctypes
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class CommandResult:
    """The result of a command with its page and exit code; or ``deferred``, which starts processes that answer."""

    result: Any  # plain data that ``--json`` prints; None if ``deferred`` is set
    page: Callable[[Any], Any] = str  # ``(result) -> text or rich renderable`` for a person; not called with ``--json``
    code: int = 0  # exit code: 0 done, 1 a result that is a "no"
    # starts the processes that print the answer themselves, and returns the exit code; None if there are none
    deferred: Callable[[], int] | None = None


def page(module: str, function: str) -> Callable[[Any], Any]:
    """A function of ``hasten.reporting``, imported when the page is made: with ``--json`` rich is not needed."""
    return lambda result: getattr(import_module(f"hasten.reporting.{module}"), function)(result)


def show(answer: CommandResult) -> None:
    """Print an answer for a person. A plain text is printed unchanged, so that it can be redirected into a file."""
    content = answer.page(answer.result)
    if isinstance(content, str):
        print(content)
        return
    from rich.console import Console

    Console(highlight=False).print(content, crop=False)  # a command stays on one line even in a narrow terminal


def strict_json(value: Any) -> str:
    """One line of JSON. NaN and infinity, which JSON cannot hold, become null."""
    return json.dumps(_plain(value), allow_nan=False)


@contextmanager
def stdout_reserved_for_answer() -> Iterator[None]:
    """Redirect file descriptor 1 to standard error while a command runs. Output of the task's code, of C libraries and
    of child processes then cannot mix with the answer on standard output.
    """
    stream = sys.stdout
    stream.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(OSError, ValueError):  # it still goes to standard error; the task may have closed it
            stream.flush()
        ctypes.CDLL(None).fflush(None)  # what C libraries have printed
        os.dup2(saved, 1)
        os.close(saved)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _plain(value.item()) if hasattr(value, "item") else str(value)
