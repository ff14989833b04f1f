"""Inspects stored data and converts it to a faster format."""

import shlex
from argparse import ArgumentParser, Namespace

from hasten.cli.argument_types import add_measuring_budget, common_options, directory, positive_int, values
from hasten.cli.output import CommandResult, page
from hasten.core.errors import RunError
from hasten.core.progress import ProgressCallback

HELP = "inspect stored data, convert it to a faster format"
FORMATS = "parquet, feather, tfrecord, rows (.npy matrices) or, for images, webdataset (tar shards)"


def add_arguments(parser: ArgumentParser) -> None:
    """Add ``inspect`` and ``convert``, each with its options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for name, (add, run_action) in ACTIONS.items():
        summary, _, details = (run_action.__doc__ or "").partition("\n")
        action = actions.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=f"{summary} {' '.join(details.split())}",
            parents=[common_options()],
            allow_abbrev=False,
        )
        add(action)


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Run the chosen action."""
    return ACTIONS[options.action][1](options, on_progress)


def _add_inspect_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a directory, a file or a quoted pattern")
    parser.add_argument(
        "--target", metavar="NAME", help="table column to predict; the other columns are then read as one matrix"
    )
    _add_max_bad_rows(parser, "skip up to N unreadable rows or files, and list them")
    add_measuring_budget(parser, 20)


def _inspect(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Show what is stored, how fast it is read, what limits that, and which format would be faster.

    Speeds are measured on one core of this machine, three times where that is quick; the median is printed with the
    range of the measurements. The exit code is 1 if rows cannot be read, because then nothing is measured.
    """
    from hasten.datatools.inspection import inspect

    result = inspect(options.path, **values(options, "target", "max_bad_rows", "budget"), on_progress=on_progress)
    return CommandResult(result, page("terminal_data", "inspect_answer"), code=1 if result["trouble"] else 0)


def _add_convert_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a directory, a file or a quoted pattern")
    parser.add_argument("--to", required=True, metavar="FORMAT", help=FORMATS)
    parser.add_argument(
        "--out",
        required=True,
        type=directory,
        metavar="DIR",
        help="output directory; an interrupted conversion continues there",
    )
    parser.add_argument("--resize", type=positive_int, metavar="N", help="resize images to N by N pixels")
    parser.add_argument("--shards", type=positive_int, metavar="N", help="number of files (default: one per 256 MB)")
    parser.add_argument(
        "--target", metavar="NAME", help="with --to rows: store this column separately, the others as one matrix"
    )
    parser.add_argument("--fill", type=float, metavar="NUMBER", help="value that replaces missing numbers")
    _add_max_bad_rows(parser, "skip up to N unreadable rows or files; DIR/skipped.jsonl lists them")


def _convert(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Store the same samples in another format and verify each part by reading it back.

    An interrupted conversion continues when the same command is given again. The files get their final names when all
    of them are written.
    """
    from hasten.datatools.conversion import convert

    given = values(options, "to", "target", "fill", "resize", "shards", "max_bad_rows")
    try:
        result = convert(options.path, options.out, **given, on_progress=on_progress)
    except KeyboardInterrupt:
        command = ["hasten", "data", "convert", options.path]
        for name, value in given.items():
            command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        raise RunError(f"interrupted; to continue: {shlex.join([*command, '--out', options.out])}") from None
    return CommandResult(result, page("terminal_data", "convert_answer"))


def _add_max_bad_rows(parser: ArgumentParser, help_text: str) -> None:
    parser.add_argument("--max-bad-rows", type=positive_int, metavar="N", help=help_text)


ACTIONS = {"inspect": (_add_inspect_arguments, _inspect), "convert": (_add_convert_arguments, _convert)}
