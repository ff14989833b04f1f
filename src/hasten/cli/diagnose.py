"""Finds where the time of a step goes, and how much each part could give at most."""

from hasten.cli import values
from hasten.cli.answer import Answer

HELP = "where the step's time goes, and what each part could give at most"


def arguments(parser) -> None:
    parser.add_argument("task", metavar="TASK")
    values.add_recipe(parser)
    parser.add_argument(
        "--budget", type=values.seconds, default=60.0, metavar="TIME", help="time to spend, such as 90s or 10m; 60s unless said"
    )


def run(options, watch) -> Answer:
    from hasten.diagnosis.diagnose import diagnose

    result = diagnose(
        options.task, recipe=values.recipe(options), budget=options.budget, device=options.device, seed=options.seed, watch=watch
    )

    def page():
        from hasten.reporting.terminal import diagnose_answer

        return diagnose_answer(result)

    return Answer(result, page)
