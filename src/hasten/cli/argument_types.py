"""Types and groups of options that several commands share: durations, counts, directories, recipes."""

from __future__ import annotations

import math
import os
import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.core.errors import ConfigurationError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S
from hasten.launch.rank_results import in_job, is_managed_rank
from hasten.utils.durations import parse_duration

if TYPE_CHECKING:
    from hasten.core.recipe import Recipe

DEFAULT_RESTARTS = 3
DEFAULTS = {"json": False, "device": None, "seed": 0, "quiet": False}  # of the common options


def duration(text: str) -> float:
    """Parse ``90``, ``90s``, ``10m`` or ``1h``; the result is in seconds."""
    try:
        return parse_duration(text)
    except ConfigurationError as error:
        raise ArgumentTypeError(str(error)) from None


def timeout(text: str) -> float:
    """Parse a duration of at least one second; the result is in seconds."""
    seconds = duration(text)
    if seconds < 1:
        raise ArgumentTypeError(f"must be at least 1s, not {text!r}")
    return seconds


def search_budget(text: str) -> float | str:
    """Parse a duration to seconds; ``+10m``, which continues a search, is checked and stays a text."""
    if text.startswith("+"):
        duration(text[1:])
        return text
    return duration(text)


def add_trained_model_options(parser: ArgumentParser, out: str) -> None:
    """Add the run directory, the task that it was trained on, and ``--out``, whose help is ``out``."""
    parser.add_argument("run_dir", type=directory, metavar="RUN", help="run directory of `hasten train` (--out)")
    text = "the task that was trained, as path/to/file.py:function; a workload needs none"
    parser.add_argument("--task", dest="trained_task", metavar="TASK", help=text)
    parser.add_argument("--out", metavar="DIR", help=out)


def checked(parse: Callable[[str], Any], is_valid: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """The type of an argument: ``parse(text)`` if that is valid, else an error that states what was ``expected``."""

    def convert(text: str) -> Any:
        with suppress(ValueError):
            if is_valid(value := parse(text)):
                return value
        raise ArgumentTypeError(f"must be {expected}, not {text!r:.40}")

    return convert


def one_of(*names: str) -> Callable[[str], str]:
    """The type of an argument that is one of some names."""
    return checked(str, names.__contains__, f"{', '.join(names[:-1])} or {names[-1]}")


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        return int(text) if re.fullmatch(r"\d{1,10}", text.strip()) else low - 1

    return checked(parse, lambda number: low <= number <= high, f"a whole number from {low} to {high}")


def positive_number(expected: str) -> Callable[[str], float]:
    """The type of an argument that is a number above 0; ``expected`` describes it in the error message."""
    return checked(float, lambda number: 0 < number < math.inf, expected)


fraction = checked(float, lambda number: 0.0 <= number < 1.0, "a fraction from 0 up to 1, such as 0.01")
evidence_level = one_of("exact", "precision", "proven", "estimated")  # strongest first
positive_int = whole_number(1, 10**9 - 1)
process_count = whole_number(1, 4096)
seed = whole_number(0, 2**32 - 1)  # the range that every random number generator accepts


def node_range(text: str) -> tuple[int, int]:
    """Parse ``M`` or ``MIN:MAX`` nodes, MIN at most MAX; the result is (minimum, maximum)."""
    low, _, high = text.partition(":")
    minimum, maximum = process_count(low), process_count(high or low)
    if minimum > maximum or text.endswith(":"):
        raise ArgumentTypeError(f"must be M or MIN:MAX with MIN at most MAX, not {text!r}")
    return minimum, maximum


def directory(text: str) -> str:
    """Check that ``text`` is the path of a directory, or of nothing yet; returns it."""
    if not text:
        raise ArgumentTypeError("must be a directory, not an empty text")
    if os.path.exists(text) and not os.path.isdir(text):
        raise ArgumentTypeError(f"must be a directory, but {text} is a file")
    return text


def name_list(text: str) -> list[str]:
    """Parse ``a,b,c`` to a list of names, at least one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ArgumentTypeError("must be names separated by commas")
    return names


def common_options() -> ArgumentParser:
    """Options accepted before and after the command; without defaults, so that neither position overrides the other."""
    parser = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    group = parser.add_argument_group("common options")
    group.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    group.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: an NVIDIA GPU if there is one, else cpu)"
    )
    group.add_argument("--seed", type=seed, metavar="N", help="seed of all random numbers (default: 0)")
    group.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def add_max_restarts(parser: ArgumentParser) -> None:
    """Add ``--max-restarts``: how often a job is restarted after ranks were lost."""
    parser.add_argument(
        "--max-restarts",
        type=whole_number(0, 999),
        default=DEFAULT_RESTARTS,
        metavar="K",
        help="restart all processes from the newest checkpoint up to K times if one is lost (default: %(default)s)",
    )


def add_timeout(parser: ArgumentParser, minimum: str = "; must exceed one evaluation") -> None:
    """Add ``--timeout``: seconds that a rank waits for another one in a collective.

    ``minimum`` is the part of the help that says what the value must exceed; empty for a command without evaluations.
    """
    text = f"a process that others wait for longer than this is lost{minimum} (default: 30m)"
    parser.add_argument("--timeout", type=timeout, default=DEFAULT_TIMEOUT_S, metavar="TIME", help=text)


def add_trial_timeout(parser: ArgumentParser, default: str) -> None:
    """Add ``--timeout`` of jobs that are measured; ``default`` describes the value that the command computes."""
    text = "a trial that reports nothing for this long beyond its budget hangs; must exceed one evaluation"
    parser.add_argument("--timeout", type=timeout, metavar="TIME", help=f"{text} (default: {default})")


def add_processes(parser: ArgumentParser, help_text: str, default: int = 1) -> None:
    """Add ``--processes``, the number of ranks on this machine."""
    text = f"{help_text} (default: %(default)s)"
    parser.add_argument("--processes", type=process_count, default=default, metavar="N", help=text)


def check_not_in_job(processes: int) -> None:
    """ConfigurationError for ``--processes`` in a process that is already a rank, which hasten has not started."""
    if processes > 1 and in_job() and not is_managed_rank():
        size = os.environ["WORLD_SIZE"]
        problem = f"--processes {processes} in a process that is one of {size} already (WORLD_SIZE={size})"
        remedy = "let torchrun or the cluster start all of them, or unset WORLD_SIZE"
        raise ConfigurationError(f"{problem} would start none; {remedy}")


def add_measuring_budget(parser: ArgumentParser, default_s: int = 60) -> None:
    """Add ``--budget`` of a command that measures for a fixed time."""
    text = f"time to spend, such as 90s or 10m (default: {default_s}s)"
    parser.add_argument("--budget", type=duration, default=float(default_s), metavar="TIME", help=text)


def add_metric(parser: ArgumentParser) -> None:
    """Add ``--metric``: what the training script of a command is judged by."""
    text = "the metric of your own command, as it prints or logs it (default: found, or asked for)"
    parser.add_argument("--metric", metavar="NAME[:min|max]", help=text)


def values(options: Namespace, *names: str) -> dict[str, Any]:
    """{name: value} of some options, to pass them on as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def add_recipe_options(parser: ArgumentParser, default: str = "the task without methods") -> None:
    """Add ``--recipe`` and ``--with``, which name the methods to train with."""
    parser.add_argument("--recipe", metavar="R.toml", help=f"a recipe file (default: {default})")
    parser.add_argument(
        "--with",
        dest="methods",
        metavar="METHOD[:key=value,...]",
        action="append",
        default=[],
        help="add a method, either installed or ./file.py:Class; ' + ' joins several; can be repeated",
    )


def recipe_from_options(options: Namespace) -> Recipe:
    """The recipe of ``--recipe`` and ``--with`` together; ``--with`` wins where both set an option."""
    from hasten.core.recipe import Recipe  # not at the top: --help needs no TOML

    extra = Recipe.parse(options.methods)
    base = Recipe() if options.recipe is None else resolve_recipe(options.recipe, extra)
    return base | Recipe({name: base.methods.get(name, {}) | values for name, values in extra.methods.items()})


def preflight_recipe(options: Namespace) -> Recipe:
    """The recipe of a job, as far as the launcher can know it before the ranks start. With ``--resume`` it is the
    recipe in the run directory, without methods from files: the launcher must not load their code.
    """
    from hasten.core.recipe import Recipe

    given = recipe_from_options(options)
    if given or not (getattr(options, "resume", False) and options.out):
        return given
    try:
        saved = Recipe.load(f"{options.out}/recipe.toml")
    except ConfigurationError:  # on another node, or no run there yet: the ranks check again
        return given
    return saved.drop(*(name for name in saved.methods if ":" in name))


def resolve_recipe(text: str, trusted: Recipe) -> Recipe:
    """Read a recipe from a TOML file, "baseline" or a list of methods: the value of ``--recipe``, ``--a`` or ``--b``.
    ConfigurationError if it is none, or a file names code outside hasten that ``trusted`` (--with) does not.
    """
    from hasten.core.recipe import Recipe

    if not text.strip():
        raise ConfigurationError('a recipe must be a file, "baseline" or methods, not an empty text')
    if not text.endswith(".toml"):
        try:
            return Recipe.coerce(text)
        except ConfigurationError:
            if os.path.exists(text):
                raise ConfigurationError(f"{text} is no recipe: its name does not end in .toml") from None
            raise
    loaded, methods = Recipe.load(text), {}
    trusted_names = {_absolute_name(name, Path()): name for name in trusted.methods}
    for name, values in loaded.methods.items():
        known = name if name in trusted.methods else trusted_names.get(_absolute_name(name, Path(text).parent))
        if known is None and ":" in name:
            advice = f"if you trust it, add --with {name}"
            raise ConfigurationError(f"{text} refers to code outside hasten, {name}; {advice}")
        methods[known or name] = values
    return Recipe(methods)


def _absolute_name(method: str, base: Path) -> str:
    """``./mine.py:Faster`` relative to ``base`` as an absolute path, so that two spellings can be compared."""
    path, _, cls = method.rpartition(":")
    return f"{(base / path).resolve()}:{cls}" if path.endswith(".py") else method
