"""The arguments that a program parses with argparse: seen, or replaced, before the program reads them."""

import functools
import inspect
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

LENGTH = {"epoch", "epochs", "step", "steps", "iter", "iters", "iteration", "iterations", "updates"}
NO_LENGTH = {
    "warmup",
    "eval",
    "log",
    "save",
    "print",
    "interval",
    "every",
    "per",
    "accumulation",
    "size",
    "start",
    "resume",
    "patience",
}


def names_length(name: str) -> bool:
    """Whether the name of an argument is that of the length of a training, such as ``max_steps``."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return bool(words & LENGTH) and not words & NO_LENGTH


def after_parsing(call: Callable[[Namespace], None]) -> None:
    """Calls a function with everything that this process parses, also with what it has parsed and holds already.

    A parser of a subcommand counts as a part of the one that calls it. ``call`` may set attributes.
    """
    for namespace in _held_by_callers():
        call(namespace)
    original = ArgumentParser.parse_known_args
    depth = 0

    @functools.wraps(original)
    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            depth -= 1
        if not depth:
            call(result[0])
        return result

    ArgumentParser.parse_known_args = parse_known_args


def _held_by_callers() -> list[Namespace]:
    """The parsed arguments among the variables of the functions and modules that are running."""
    found: dict[int, Namespace] = {}
    frame = inspect.currentframe()
    while frame is not None:
        values = (*frame.f_globals.values(), *frame.f_locals.values())
        # not isinstance, which would run the properties of objects that are made lazily
        found |= {id(value): value for value in values if issubclass(type(value), Namespace)}
        frame = frame.f_back
    return list(found.values())
