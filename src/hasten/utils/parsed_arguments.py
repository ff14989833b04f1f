"""The arguments that a program parses with argparse: seen, or replaced, before the program reads them.

Arguments that a program passes to a framework in its code can be offered in the same way.
"""

import functools
import inspect
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from hasten.utils.typed_arguments import typed_numbers

LENGTH = {"epoch", "epochs", "step", "steps", "iter", "iters", "iteration", "iterations", "updates"}
_INTERVALS = {"eval", "val", "validation", "log", "logging", "save", "print", "interval", "every", "per"}
_INTERVALS |= {"checkpoint", "checkpointing"}
_PARTS = {"cooldown", "decay", "lr", "drop", "freeze", "unfreeze", "milestones"}  # get shorter with the training
NO_LENGTH = _INTERVALS | _PARTS | {"warmup", "warm", "patience", "accumulation", "size", "start", "initial", "resume"}
_OF_ALL = {"num", "n", "nb", "number", "of", "max", "maximum", "total", "train", "training"}

_calls: list[Callable[[Namespace], None]] = []  # with everything that is parsed or offered
_parsed: set[str] = set()  # names that the program's own parsers declare
_offered: dict[str, Any] = {}  # what the program has passed to a framework, by name


def names_length(name: str) -> bool:
    """Whether the name of an argument is that of the length of a training, such as ``max_steps``."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return bool(words & LENGTH) and not words & NO_LENGTH


def scales_with_length(name: str) -> bool:
    """Whether an argument is the length of the training or of a part of its schedule, such as ``lr_decay_iters``."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return bool(words & LENGTH) and not words & (NO_LENGTH - _PARTS)


def names_whole_length(name: str) -> bool:
    """Whether the name says nothing but that: ``epochs``, ``num_train_epochs``, ``max_steps``."""
    return names_length(name) and set(re.split(r"[^a-z]+", name.lower())) <= LENGTH | _OF_ALL | {""}


def after_parsing(call: Callable[[Namespace], None]) -> None:
    """Replaces ``ArgumentParser.parse_known_args`` in this process, so that ``call`` gets every result, as well as the
    Namespaces that running functions and modules hold already, and what ``offer_arguments`` offers.

    A parser of a subcommand counts as a part of the one that calls it. ``call`` may set attributes.
    """
    for namespace in _held_by_callers():
        _parsed.update(vars(namespace))
        call(namespace)
    _calls.append(call)
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
            _parsed.update(getattr(result[0], "__dict__", {}))
            call(result[0])
        return result

    ArgumentParser.parse_known_args = parse_known_args


def offer_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Offers numbers that a program passes to a framework to the functions of ``after_parsing``, which may replace
    them. Returns {name: number, replaced or not}.

    A name that the program also parses, or that its command line gives, belongs to the program: it is left out. One
    that was offered before with another number, such as by two optimizers, is seen as a text that holds both.
    """
    own = _parsed | typed_numbers(sys.argv).keys()
    values = {name: value for name, value in values.items() if name not in own}
    seen = Namespace()
    for name, value in values.items():
        before = _offered.setdefault(name, value)
        setattr(seen, name, value if before == value else f"{before} and {value}")
    for call in _calls if values else ():
        call(seen)
    return {name: value if isinstance(found := getattr(seen, name), str) else found for name, value in values.items()}


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
