"""Searches for methods that make a task faster at equal quality, and proves the result; or finds that nothing does."""

import time
from argparse import ArgumentParser, Namespace
from typing import Any

from hasten.cli import argument_types as types
from hasten.cli.output import CommandResult, page
from hasten.cli.progress import print_stderr
from hasten.core.errors import RunError
from hasten.core.progress import ProgressCallback

HELP = "search for a faster recipe of equal quality, with evidence"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten tune`` to its parser."""
    parser.add_argument("task", metavar="TASK")
    types.add_processes(parser, "search for a recipe for N processes on this machine, distributed strategies included")
    types.add_trial_timeout(parser, "the largest of 30s, an eighth of the budget and two runs of the task")
    parser.add_argument(
        "--budget",
        type=types.search_budget,
        metavar="TIME",
        help="time for the search, such as 10m; +10m continues a search for 10 more minutes (default: it depends on "
        "the time of a training)",
    )
    parser.add_argument(
        "--evidence",
        type=types.evidence_level,
        metavar="LEVEL",
        help="recommend only recipes with at least this evidence: exact, precision, proven or estimated, the strongest "
        "first; exact and precision try no method that changes the training, proven and estimated require a metric and "
        "validation data (default: proven, without this requirement; estimated recipes are then shown only)",
    )
    parser.add_argument(
        "--price-per-hour",
        type=types.positive_number("an amount of money above 0, such as 2.50"),
        metavar="MONEY",
        help="price of an hour on this machine; the answer then states the price of a training, too",
    )
    parser.add_argument(
        "--margin",
        # 0 could not be passed: the metric is never free of noise
        type=types.positive_number("a positive number in the metric's unit"),
        metavar="M",
        help="how much worse the metric may become, in its own unit (default: the larger of 0.5 %% of the metric and "
        "one standard deviation between seeds)",
    )
    types.add_metric(parser)
    parser.add_argument(
        "--vary",
        type=types.name_list,
        metavar="A1,A2",
        help="arguments of your own command, such as lr,epochs,batch_size, of which other values are tried, too",
    )
    parser.add_argument("--methods", type=types.name_list, metavar="M1,M2", help="try only these methods")
    parser.add_argument(
        "--with",
        dest="extra",
        action="append",
        default=[],
        metavar="./file.py:Class",
        help="also try this method from a Python file; can be repeated",
    )
    parser.add_argument(
        "--runs",
        type=types.positive_int,
        default=10,
        metavar="N",
        help="number of trainings that you expect to do with the result; the answer says whether the search pays for "
        "itself within them (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=types.directory,
        metavar="DIR",
        help="run directory of the search (default: runs/tune-TASK); an interrupted search continues there",
    )


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Search; the exit code is 0 only for the verdict "faster"."""
    began = time.monotonic()  # importing torch counts in the budget
    from hasten.tuning.tune import SearchInterrupted, tune

    try:
        result: Any = tune(
            options.task,
            **types.values(options, "budget", "evidence", "margin", "methods", "extra", "price_per_hour", "runs"),
            **types.values(options, "out", "processes", "timeout", "device", "seed"),
            spent=time.monotonic() - began,
            on_progress=on_progress,
        )
    except SearchInterrupted as interrupt:
        print_stderr("hasten: interrupted; the same command continues the search")
        return CommandResult(interrupt.result, page("terminal", "tune_answer"), code=1)
    except KeyboardInterrupt:
        raise RunError("interrupted before the first answer; the same command starts again") from None
    return CommandResult(result, page("terminal", "tune_answer"), code=0 if result.get("verdict") == "faster" else 1)
