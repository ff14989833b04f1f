"""Inspects stored data and converts them to a faster format."""

from __future__ import annotations

import shlex

from hasten.cli import argument_types
from hasten.cli.output import CommandResult
from hasten.core.errors import RunError

HELP = "inspect stored data, convert them to a faster format"
FORMS = "parquet, feather, tfrecord, rows (.npy matrices) or, for pictures, shards (tar files)"


def arguments(parser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for name, (add, run) in ACTIONS.items():
        what, _, more = run.__doc__.partition("\n")
        action = actions.add_parser(
            name, help=what, description=f"{what}. {more}", parents=[argument_types.everywhere()], allow_abbrev=False
        )
        add(action)


def run(options, watch) -> CommandResult:
    return ACTIONS[options.action][1](options, watch)


def _inspect_arguments(parser) -> None:
    parser.add_argument("path", metavar="PATH", help="a folder, a file or a pattern in quotes")
    parser.add_argument(
        "--target", metavar="NAME", help="the column of a table to predict; the others are then read as one matrix"
    )
    _add_skip_bad(parser, "leave out up to N rows, or files, that cannot be read, and list them")
    parser.add_argument(
        "--budget", type=argument_types.seconds, default=20.0, metavar="TIME", help="time to spend; 20s unless said"
    )


def _inspect(options, watch) -> CommandResult:
    """what is there, how fast it is read, what limits that, which storage would be faster

    All speeds are measured on one core of this machine, each three times where that does not take long; it prints the median, and from
    where to where the readings lie. Exit code 1 where rows cannot be read, so that nothing was measured.
    """
    from hasten.datatools.inspection import inspect

    result = inspect(
        options.path, target=options.target, max_bad_rows=options.max_bad_rows, budget=options.budget, watch=watch
    )
    return CommandResult(result, lambda: _pages().inspect_answer(result), code=1 if result["trouble"] else 0)


def _convert_arguments(parser) -> None:
    parser.add_argument("path", metavar="PATH", help="a folder, a file or a pattern in quotes")
    parser.add_argument("--to", required=True, metavar="FORM", help=FORMS)
    parser.add_argument(
        "--out",
        required=True,
        type=argument_types.folder,
        metavar="DIR",
        help="where it is written; a killed conversion goes on there",
    )
    parser.add_argument(
        "--resize", type=argument_types.count, metavar="N", help="pictures become squares of N pixels a side"
    )
    parser.add_argument(
        "--shards", type=argument_types.count, metavar="N", help="files to write; one for every 256 MB unless said"
    )
    parser.add_argument(
        "--target", metavar="NAME", help="with --to rows: this column of a table apart, the others as one matrix"
    )
    parser.add_argument("--fill", type=float, metavar="NUMBER", help="what stands for missing numbers")
    _add_skip_bad(parser, "leave out up to N rows, or files, that cannot be read; DIR/skipped.jsonl lists them")


def _convert(options, watch) -> CommandResult:
    """store the same samples in another form, each part read back; started again, it goes on

    The files get their names when all is written. At the end it tells by how much reading became faster: as some rows made it
    expect, and as it was measured.
    """
    from hasten.datatools.conversion import convert

    settings = {name: getattr(options, name) for name in ("to", "target", "fill", "resize", "shards", "skip_bad")}
    try:
        result = convert(options.path, options.out, **settings, watch=watch)
    except KeyboardInterrupt:
        words = [
            word
            for name, value in settings.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", f"{value}")
        ]
        command = shlex.join(["hasten", "data", "convert", options.path, *words, "--out", options.out])
        raise RunError(f"stopped; go on with: {command}") from None
    return CommandResult(result, lambda: _pages().convert_answer(result))


def _add_skip_bad(parser, what: str) -> None:
    parser.add_argument("--max-bad-rows", type=argument_types.count, metavar="N", help=what)


def _pages():
    from hasten.reporting import terminal_data

    return terminal_data


ACTIONS = {
    "inspect": (_inspect_arguments, _inspect),
    "convert": (_convert_arguments, _convert),
}
