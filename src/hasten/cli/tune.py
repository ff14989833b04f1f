"""Finds the methods that make a task faster at equal quality, and proves it; or reports "no improvement"."""

from hasten.cli import argument_types
from hasten.cli.output import CommandResult
from hasten.core.errors import RunError

HELP = "find a faster recipe of equal quality, with evidence"


def arguments(parser) -> None:
    parser.add_argument("task", metavar="TASK")
    argument_types.add_processes(
        parser, "find a recipe for N processes on this machine; distributed strategies are tried, too"
    )
    argument_types.add_measuring_timeout(parser, "an eighth of the budget, or two runs of the task,")
    parser.add_argument(
        "--budget",
        type=argument_types.seconds,
        metavar="TIME",
        help="time for the search, such as 10m; a few runs of the task unless said",
    )
    parser.add_argument(
        "--margin", type=argument_types.margin, metavar="M", help="how much worse the metric may be, in its own unit"
    )
    parser.add_argument("--methods", type=argument_types.names, metavar="M1,M2", help="try these methods only")
    parser.add_argument(
        "--with",
        dest="extra",
        action="append",
        default=[],
        metavar="./file.py:Class",
        help="try a method from outside too; may be given several times",
    )
    parser.add_argument(
        "--runs",
        type=argument_types.count,
        default=10,
        metavar="N",
        help="runs you expect to do, which the search has to pay for; 10 unless said",
    )
    parser.add_argument(
        "--out",
        type=argument_types.folder,
        metavar="DIR",
        help="where trials and the report go; a search that was stopped goes on there",
    )


def run(options, watch) -> CommandResult:
    from hasten.tuning.tune import tune

    try:
        result = tune(
            options.task,
            budget=options.budget,
            margin=options.margin,
            methods=options.methods,
            extra=tuple(options.extra),
            out=options.out,
            runs=options.runs,
            processes=options.processes,
            timeout=options.timeout,
            device=options.device,
            seed=options.seed,
            watch=watch,
        )
    except KeyboardInterrupt:
        raise RunError("stopped; the same command goes on where it was, and no finished trial is lost") from None

    def page():
        from hasten.reporting.terminal import tune_answer

        return tune_answer(result)

    return CommandResult(result, page, code=0 if result["verdict"] == "faster" else 1)
