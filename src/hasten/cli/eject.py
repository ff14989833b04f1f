"""Writes a run as one flat PyTorch script, or a recipe as a patch of your own script.

The script does not import hasten, unless the task reads its data through hasten.data. The patch is a unified diff that
patch -p1 applies; what cannot be written as an edit stands above it.
"""

import itertools
import os
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hasten.cli.argument_types import add_recipe_options, recipe_from_options
from hasten.cli.output import CommandResult
from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.core.progress import ProgressCallback

HELP = "write a run as one flat PyTorch script, or a recipe as a patch of your script"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten eject`` to its parser."""
    parser.add_argument("task", metavar="TASK")
    add_recipe_options(parser, "for a task no method, for a command the recipe of its search")
    parser.add_argument("--out", metavar="FILE", help="file of the script or the patch (default: standard output)")


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Generate the script or the patch and write it to ``--out``, which must not exist, or to standard output."""
    if options.out and os.path.exists(options.out):
        raise ConfigurationError(f"{options.out} already exists; choose another --out")
    if not isinstance(options.task, str):
        return _run_script(options)
    from hasten.export.eject import eject

    source = eject(options.task, recipe_from_options(options), device=options.device)
    if not options.out:
        return CommandResult({"source": source}, lambda result: result["source"].rstrip("\n"))
    _write(Path(options.out), source)
    lines = source.count("\n")
    return CommandResult(
        {"out": options.out, "lines": lines},
        lambda result: f"{result['out']}: {result['lines']} lines; run it with: python {result['out']}",
    )


def _run_script(options: Namespace) -> CommandResult:
    """Print the patch of the user's script, or write it to ``--out``."""
    from hasten.hosts.script_patch import patch_script
    from hasten.tuning.tune import latest_search

    found = latest_search(options.task) / "recipe.toml"
    if options.recipe is None and not options.methods and found.is_file():
        options.recipe = str(found)
        warnings.warn(f"the recipe is that of the search, {found}", HastenWarning, 2)
    recipe = recipe_from_options(options)
    if not recipe and options.recipe:
        raise ConfigurationError(f"the recipe {options.recipe} has no method, so there is nothing to change")
    if not recipe:
        what = f"there is no recipe of this command in {found.parent.parent}"
        raise ConfigurationError(f"{what}; tune it first, or add --recipe FILE or --with METHOD")
    patch = patch_script(options.task, recipe, options.recipe, options.device)
    left = _not_in_patch(patch)
    if "\n+++ " not in patch:  # nothing that patch -p1 could apply
        raise ConfigurationError(f"the recipe cannot be written as a patch: {_in_one_line(patch)}")
    if left:  # its reader may apply it unread
        warnings.warn(f"not in the patch, which says at its top what to do by hand: {left}", HastenWarning, 2)
    if not options.out:
        return CommandResult({"patch": patch}, lambda result: result["patch"].rstrip("\n"))
    _write(Path(options.out), patch)
    return CommandResult({"out": options.out}, lambda result: f"apply it with: patch -p1 < {result['out']}")


def _not_in_patch(patch: str) -> str:
    """The methods that the heading of the patch leaves to its reader; "" if the patch holds the whole recipe."""
    from hasten.export.patch import NOT_IN_PATCH

    if not patch.startswith(NOT_IN_PATCH):
        return ""
    heading = itertools.takewhile(lambda line: line.startswith("#  "), patch.splitlines()[1:])
    return "; ".join(line.removeprefix("#   ") for line in heading if not line.startswith("#    "))


def _in_one_line(heading: str) -> str:
    """The comment at the top of a patch without its first line, joined to one line."""
    return "; ".join(line.removeprefix("#").strip() for line in heading.splitlines()[1:])


def _write(path: Path, source: str) -> None:
    from hasten.engine.error_messages import writable

    with writable(path), open(path, "x", encoding="utf-8") as file:
        try:
            file.write(source)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)  # an incomplete script would look like a finished one
            raise
