"""Writes the composed run as one flat PyTorch script that does not need hasten; data from hasten.data it still reads with that."""

import os
from pathlib import Path

from hasten.cli import argument_types
from hasten.cli.output import CommandResult
from hasten.core.errors import ConfigurationError

HELP = "the composed run as one flat PyTorch script without hasten"


def arguments(parser) -> None:
    parser.add_argument("task", metavar="TASK")
    argument_types.add_recipe(parser)
    parser.add_argument("--out", metavar="FILE", help="the script's file; standard output unless said")


def run(options, watch) -> CommandResult:
    from hasten.export.eject import eject

    if options.out and os.path.exists(options.out):
        raise ConfigurationError(f"{options.out} exists already; choose another --out")
    source = eject(options.task, argument_types.recipe(options), device=options.device)
    if not options.out:
        return CommandResult({"source": source}, lambda: source.rstrip("\n"))
    _write(Path(options.out), source)
    lines = source.count("\n")
    return CommandResult(
        {"out": options.out, "lines": lines}, lambda: f"{options.out}: {lines} lines; run it with: python {options.out}"
    )


def _write(path: Path, source: str) -> None:
    from hasten.engine.error_messages import writable

    with writable(path), open(path, "x", encoding="utf-8") as file:
        try:
            file.write(source)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)  # half a script is of no use
            raise
