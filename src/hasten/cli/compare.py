"""Measures two recipes against each other: both run in turns, so that the machine's moods hit both alike."""

from hasten.cli import argument_types
from hasten.cli.output import CommandResult

HELP = "measure two recipes against each other, in turns"


def arguments(parser) -> None:
    parser.add_argument("task", metavar="TASK")
    parser.add_argument("--a", required=True, metavar="R", help='a recipe file, "baseline", or methods as after --with')
    parser.add_argument(
        "--b", required=True, metavar="R", help="the other one; the ratio is the time of a over the time of b"
    )
    parser.add_argument(
        "--with",
        dest="extra",
        metavar="./file.py:Class",
        action="append",
        default=[],
        help="a method from outside that a recipe file may name; may be given several times",
    )
    argument_types.add_processes(parser, "compare whole jobs of N processes on this machine")
    argument_types.add_measuring_timeout(parser, "2m")
    parser.add_argument(
        "--budget",
        type=argument_types.seconds,
        default=60.0,
        metavar="TIME",
        help="time to spend, such as 90s or 10m; 60s unless said",
    )


def run(options, watch) -> CommandResult:
    """Exit code 0 where b is faster; 1 for every other verdict, so that a script can ask ``compare && use b``."""
    from hasten.benchmarking.compare import compare
    from hasten.core.recipe import Recipe

    extra = Recipe.parse(options.extra)
    a, b = (argument_types.named_recipe(what, extra) for what in (options.a, options.b))
    result = compare(
        options.task,
        a,
        b,
        budget=options.budget,
        processes=options.processes,
        timeout=options.timeout,
        device=options.device,
        seed=options.seed,
        watch=watch,
    )

    def page():
        from hasten.reporting.terminal import compare_answer

        return compare_answer(result)

    return CommandResult(result, page, code=0 if result["verdict"] == "faster" else 1)
