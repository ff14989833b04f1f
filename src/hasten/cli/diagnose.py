"""Measures where the time of a step goes, and how fast each stage of the input pipeline is.

With several processes also what they lose to each other.
"""

from functools import partial

from hasten.cli import argument_types
from hasten.cli.output import CommandResult
from hasten.launch.rank_results import in_job

HELP = "where the step's time goes, and what each part could give at most"


def arguments(parser) -> None:
    parser.add_argument("task", metavar="TASK")
    argument_types.add_recipe(parser)
    parser.add_argument(
        "--processes",
        type=argument_types.processes,
        default=1,
        metavar="N",
        help="share every batch out among N processes on this machine (data parallel)",
    )
    argument_types.add_timeout(parser)
    parser.add_argument(
        "--budget",
        type=argument_types.seconds,
        default=60.0,
        metavar="TIME",
        help="time to spend, such as 90s or 10m; 60s unless said",
    )


def run(options, watch) -> CommandResult:
    if options.processes > 1 and not in_job():
        from hasten.engine.registry import make_methods
        from hasten.launch.launcher import launch, preflight_check

        preflight_check(options.task, options.processes, make_methods(argument_types.recipe_of_ranks(options)))
        return CommandResult(None, deferred=partial(launch, options.words, options.processes))
    if in_job():
        from hasten.profiling.rank_profile import diagnose_ranks

        diagnose = partial(diagnose_ranks, timeout=options.timeout)
    else:
        from hasten.profiling.diagnose import diagnose

    result = diagnose(
        options.task,
        recipe=argument_types.recipe(options),
        budget=options.budget,
        device=options.device,
        seed=options.seed,
        watch=watch,
    )

    def page():
        if result["kind"] == "diagnose_ranks":
            from hasten.reporting.terminal_ranks import ranks_answer

            return ranks_answer(result)
        from hasten.reporting.terminal import diagnose_answer

        return diagnose_answer(result)

    return CommandResult(result, page)
