"""Writes a run as one flat PyTorch script.

The script does not import hasten, unless the task reads its data through hasten.data.
"""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hasten.cli.argument_types import add_recipe_options, recipe_from_options
from hasten.cli.output import CommandResult
from hasten.core.errors import ConfigurationError
from hasten.core.progress import ProgressCallback

HELP = "write a run as one flat PyTorch script"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten eject`` to its parser."""
    parser.add_argument("task", metavar="TASK")
    add_recipe_options(parser)
    parser.add_argument("--out", metavar="FILE", help="file of the script (default: standard output)")


def run(options: Namespace, watch: ProgressCallback) -> CommandResult:
    """Generate the script and write it to ``--out``, which must not exist, or to standard output."""
    from hasten.export.eject import eject

    if options.out and os.path.exists(options.out):
        raise ConfigurationError(f"{options.out} already exists; choose another --out")
    source = eject(options.task, recipe_from_options(options), device=options.device)
    if not options.out:
        return CommandResult({"source": source}, lambda result: result["source"].rstrip("\n"))
    _write(Path(options.out), source)
    lines = source.count("\n")
    return CommandResult(
        {"out": options.out, "lines": lines},
        lambda result: f"{result['out']}: {result['lines']} lines; run it with: python {result['out']}",
    )


def _write(path: Path, source: str) -> None:
    from hasten.engine.error_messages import writable

    with writable(path), open(path, "x", encoding="utf-8") as file:
        try:
            file.write(source)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)  # an incomplete script would look like a finished one
            raise
