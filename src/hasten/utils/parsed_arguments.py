"""The arguments of a program: seen, or replaced, before the program reads them.

Those that argparse parses, and those that are numbers on the command line itself, whoever parses it: ``--lr 0.1``,
``--lr=0.1``, and ``lr=0.1`` or ``trainer.max_epochs=5`` as OmegaConf, Hydra and many a script of its own read them.
"""

import functools
import inspect
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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


ASSIGNMENT = re.compile(r"[-+]{0,2}([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)  # Hydra adds and overrides with +
OPTION = re.compile(r"--?([A-Za-z_][\w.-]*)")


def numbers_on_command_line(argv: Sequence[str]) -> dict[str, int | float]:
    """The arguments that are numbers: name, without dashes before it and with ``_`` for those in it -> value."""
    return {name: value for _, name, value in _numbers(argv)}


def replace_on_command_line(argv: list[str], values: Mapping[str, Any]) -> dict[str, int | float]:
    """Replaces numbers in ``argv``, in place. Returns those that were there, by name."""
    before: dict[str, int | float] = {}
    for index, name, value in _numbers(argv):
        if name in values:
            before[name] = value
            head, is_assignment, _ = argv[index].partition("=")
            argv[index] = f"{head}={values[name]}" if is_assignment else str(values[name])
    return before


def _numbers(argv: Sequence[str]) -> Iterator[tuple[int, str, int | float]]:
    """(position in ``argv`` of the value, name, value) of each argument that is a number; the command is skipped."""
    for index, word in enumerate(argv[1:], start=1):
        if assigned := ASSIGNMENT.fullmatch(word):
            position, (name, text) = index, assigned.groups()
        elif (option := OPTION.fullmatch(word)) and index + 1 < len(argv):
            position, name, text = index + 1, option.group(1), argv[index + 1]
        else:
            continue
        with suppress(ValueError):
            yield position, name.replace("-", "_"), int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)


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
