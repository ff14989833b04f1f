"""Writes the HTML report about a search or a run: one file that works offline."""

from argparse import ArgumentParser, Namespace

from hasten.cli.argument_types import directory
from hasten.cli.output import CommandResult
from hasten.core.progress import ProgressCallback

HELP = "write the HTML report about a search or a run"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten report`` to its parser."""
    parser.add_argument(
        "directory", type=directory, metavar="DIR", help="directory of `hasten tune`, `train` or `quantize` (--out)"
    )


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Write ``report.html`` into the run directory and print its path."""
    from hasten.reporting.report import report

    return CommandResult({"report": str(report(options.directory))}, lambda result: result["report"])
