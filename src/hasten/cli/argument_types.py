"""Reads the values of options: times, counts, lists. What does not fit is refused with the form that would."""

from __future__ import annotations

import math
import os
import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.core.errors import ConfigurationError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S
from hasten.utils.durations import parse_duration

if TYPE_CHECKING:
    from hasten.core.recipe import Recipe

MOST_PROCESSES = 4096
RESTARTS = 3  # of a job that loses processes


def seconds(text: str) -> float:
    """``90``, ``90s``, ``10m`` or ``1h`` as seconds."""
    try:
        return parse_duration(text)
    except ConfigurationError as why:
        raise ArgumentTypeError(str(why)) from None


def timeout(text: str) -> float:
    """A time of a second or more."""
    if (value := seconds(text)) < 1:
        raise ArgumentTypeError(f"must be at least 1s, not {text!r}")
    return value


def count(text: str) -> int:
    """A whole number from 1 on, below 10**9."""
    if not re.fullmatch(r"\d{1,9}", text.strip()) or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number from 1 to {10**9 - 1}, not {text!r:.40}")
    return int(text)


def processes(text: str) -> int:
    """A number of processes that a machine can hold, or of machines."""
    if (number := count(text)) > MOST_PROCESSES:
        raise ArgumentTypeError(f"must be at most {MOST_PROCESSES}, not {number}")
    return number


def nodes(text: str) -> tuple[int, int]:
    """``M`` or ``MIN:MAX`` machines."""
    low, _, high = text.partition(":")
    least, most = processes(low), processes(high or low)
    if least > most or text.endswith(":"):
        raise ArgumentTypeError(f"must be M or MIN:MAX, MIN not above MAX, not {text!r}")
    return least, most


def restarts(text: str) -> int:
    """A whole number from 0 to 999."""
    if not re.fullmatch(r"\d{1,3}", text.strip()):
        raise ArgumentTypeError(f"must be a whole number from 0 to 999, not {text!r:.40}")
    return int(text)


def seed(text: str) -> int:
    """A whole number from 0 to 2**32 - 1: what every generator of random numbers takes."""
    if not re.fullmatch(r"\d{1,10}", text.strip()) or int(text) >= 2**32:
        raise ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, not {text!r}")
    return int(text)


def margin(text: str) -> float:
    """How much worse the metric may be, in its own unit; a margin of nothing can never be passed with noise."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be a positive number in the metric's unit, not {text!r}")
    return value


def folder(text: str) -> str:
    """The path of a folder, or of nothing yet."""
    if not text:
        raise ArgumentTypeError("must be a folder, but it is empty")
    if os.path.exists(text) and not os.path.isdir(text):
        raise ArgumentTypeError(f"must be a folder, but {text} is a file")
    return text


def names(text: str) -> list[str]:
    """``a,b,c`` as a list."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ArgumentTypeError("must be names separated by commas")
    return found


def everywhere() -> ArgumentParser:
    """Options that may stand before or after the verb; without defaults, so that neither place overrides the other."""
    parser = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    group = parser.add_argument_group("everywhere")
    group.add_argument("--json", action="store_true", help="one JSON object on standard output, for programs")
    group.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:1; an NVIDIA GPU where there is one, unless said"
    )
    group.add_argument("--seed", type=seed, metavar="N", help="of all random numbers; 0 unless said")
    group.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def add_restarts(parser: ArgumentParser) -> None:
    """The option that says how often a job goes on by itself."""
    parser.add_argument(
        "--max-restarts",
        type=restarts,
        default=RESTARTS,
        metavar="K",
        help=f"go on from the newest checkpoint, up to K times, when a process is lost without a word; {RESTARTS} unless said",
    )


def add_timeout(parser: ArgumentParser) -> None:
    """The option that says when a rank hangs."""
    parser.add_argument(
        "--timeout",
        type=timeout,
        default=DEFAULT_TIMEOUT_S,
        metavar="TIME",
        help="a process that keeps the others waiting for so long counts as lost; 30m unless said, and longer than one evaluation has to be",
    )


def add_measuring_timeout(parser: ArgumentParser, usual: str) -> None:
    """The same of a job that is measured."""
    parser.add_argument(
        "--timeout",
        type=timeout,
        metavar="TIME",
        help=f"a job that says nothing for so long, beyond the budget, counts as hanging; {usual} unless said, and longer than one evaluation",
    )


def add_processes(parser: ArgumentParser, what: str) -> None:
    """The option that says how many train together: ``--processes``."""
    parser.add_argument("--processes", type=processes, default=1, metavar="N", help=what)


def add_recipe(parser: ArgumentParser) -> None:
    """The options that say which methods: ``--recipe`` and ``--with``."""
    parser.add_argument("--recipe", metavar="R.toml", help="a recipe file; without one, the task as it is")
    parser.add_argument(
        "--with",
        dest="methods",
        metavar="METHOD[:key=value,...]",
        action="append",
        default=[],
        help="one method more, installed or ./file.py:Class; may be given several times",
    )


def recipe(options: Namespace) -> Recipe:
    """What ``--recipe`` and ``--with`` say together; where both give a setting, ``--with`` has the last word."""
    from hasten.core.recipe import Recipe  # TOML is not needed to show the help

    given = Recipe.parse(options.methods)
    written = Recipe() if options.recipe is None else named_recipe(options.recipe, given)
    return written | Recipe(
        {name: written.methods.get(name, {}) | settings for name, settings in given.methods.items()}
    )


def recipe_of_ranks(options: Namespace) -> Recipe:
    """What the ranks of a job will train with, as far as whoever starts them can tell; code of a folder that is gone on with is not loaded."""
    from hasten.core.recipe import Recipe

    given = recipe(options)
    if given or not (getattr(options, "resume", False) and options.out):
        return given
    try:
        found = Recipe.load(f"{options.out}/recipe.toml")
    except ConfigurationError:  # on another machine, or nothing to go on with: the run itself looks again
        return given
    return found.drop(*(name for name in found.methods if ":" in name))


def named_recipe(what: str, given: Recipe) -> Recipe:
    """A recipe as options name one. A file brings no code of its own: a method from outside has to be in ``given``, too.

    Raises:
        Refusal: the file names code that the command line does not.
    """
    from hasten.core.recipe import Recipe

    if not what.strip():
        raise ConfigurationError('a recipe is named by a file, "baseline" or methods; this name is empty')
    if not what.endswith(".toml"):
        try:
            return Recipe.coerce(what)
        except ConfigurationError:
            if os.path.exists(what):
                raise ConfigurationError(f"{what} is no recipe: its name does not end in .toml") from None
            raise
    written, known = Recipe.load(what), {_place(name, Path()): name for name in given.methods}
    named = {
        name: name if name in given.methods else known.get(_place(name, Path(what).parent)) for name in written.methods
    }
    for name in written.methods:
        if ":" in name and named[name] is None:
            raise ConfigurationError(
                f"{what} names code from outside, {name}; if you trust it, name it after --with, too"
            )
    return Recipe({named[name] or name: settings for name, settings in written.methods.items()})


def _place(name: str, folder: Path) -> str:
    """``./mine.py:Faster``, as seen from a folder, in the one form that it has from everywhere."""
    where, _, cls = name.rpartition(":")
    return f"{(folder / where).resolve()}:{cls}" if where.endswith(".py") else name
