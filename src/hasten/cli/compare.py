"""Measures two recipes against each other in interleaved blocks, so that a slow minute of the machine affects both.

The exit code is 0 if recipe b is faster and 1 for every other verdict.
"""

from argparse import ArgumentParser, Namespace

from hasten.cli.argument_types import add_measuring_budget, add_processes, add_trial_timeout, resolve_recipe, values
from hasten.cli.output import CommandResult, page
from hasten.core.progress import ProgressCallback

HELP = "measure two recipes against each other"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten compare`` to its parser."""
    parser.add_argument("task", metavar="TASK")
    parser.add_argument(
        "--a",
        default="baseline",
        metavar="R",
        help='a recipe file, "baseline" (default), or methods as for --with',
    )
    parser.add_argument(
        "--b", required=True, metavar="R", help="the other recipe; the ratio is the time of a divided by the time of b"
    )
    parser.add_argument(
        "--with",
        dest="extra",
        metavar="./file.py:Class",
        action="append",
        default=[],
        help="allow the recipe files to refer to this method in a Python file; can be repeated",
    )
    add_processes(parser, "compare jobs of N processes on this machine")
    add_trial_timeout(parser, "2m")
    add_measuring_budget(parser)


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Compare and map the verdict to the exit code, so that ``hasten compare ... && use b`` works in a script."""
    from hasten.benchmarking.compare import compare
    from hasten.core.recipe import Recipe

    extra = Recipe.parse(options.extra)
    a, b = (resolve_recipe(text, extra) for text in (options.a, options.b))
    given = values(options, "budget", "processes", "timeout", "device", "seed")
    result = compare(options.task, a, b, **given, on_progress=on_progress)
    return CommandResult(result, page("terminal", "compare_answer"), code=0 if result["verdict"] == "faster" else 1)
