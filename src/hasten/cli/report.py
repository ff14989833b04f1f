"""Writes the page about a search or a run: one HTML file that needs no network."""

from hasten.cli import argument_types
from hasten.cli.output import CommandResult

HELP = "write the page about a search or a run"


def arguments(parser) -> None:
    parser.add_argument(
        "folder", type=argument_types.folder, metavar="DIR", help="what `hasten tune` or `hasten train` left"
    )


def run(options, watch) -> CommandResult:
    from hasten.reporting.report import report

    page = str(report(options.folder))
    return CommandResult({"report": page}, lambda: page)
