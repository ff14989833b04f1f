"""Measures where the time of a training step goes, and how fast each stage of the input pipeline is.

With several processes it also measures stragglers and the cost of communication.
"""

from argparse import ArgumentParser, Namespace
from functools import partial

from hasten.cli import argument_types as types
from hasten.cli.output import CommandResult, page
from hasten.core.errors import ConfigurationError
from hasten.core.progress import ProgressCallback
from hasten.launch.rank_results import in_job

HELP = "measure where the time of a step goes, and the ceiling of each phase"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten diagnose`` to its parser."""
    parser.add_argument("task", metavar="TASK")
    types.add_recipe_options(parser)
    types.add_processes(parser, "shard every batch over N processes on this machine (data parallel)")
    types.add_timeout(parser)
    types.add_measuring_budget(parser)
    types.add_metric(parser)
    parser.add_argument(
        "--ops",
        action="store_true",
        help="also show which operations of a step run in which precision; needs a recipe with lower precision",
    )


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Measure in this process or in this rank of a job; with ``--processes`` above 1, start the job."""
    is_script = not isinstance(options.task, str)
    is_rank = in_job() and not is_script  # WORLD_SIZE, as a cluster sets it, is that of the script's own job
    if is_script and options.processes > 1:
        raise ConfigurationError(f"{options.task} starts its own processes; leave --processes out")
    if options.ops and (options.processes > 1 or is_rank):
        from hasten.profiling.ops import ONE_PROCESS

        raise ConfigurationError(ONE_PROCESS)
    types.check_not_in_job(options.processes)
    if options.processes > 1 and not is_rank:
        from hasten.engine.registry import make_methods
        from hasten.launch.launcher import launch, preflight_check

        preflight_check(options.task, options.processes, make_methods(types.preflight_recipe(options)))
        return CommandResult(None, deferred=partial(launch, options.argv, options.processes))
    if is_rank:
        from hasten.profiling.rank_profile import diagnose_ranks

        diagnose, answer = partial(diagnose_ranks, timeout=options.timeout), page("terminal_ranks", "ranks_answer")
    else:
        from hasten.profiling.diagnose import diagnose

        diagnose, answer = partial(diagnose, ops=options.ops), page("terminal", "diagnose_answer")
    recipe, given = types.recipe_from_options(options), types.values(options, "budget", "device", "seed")
    return CommandResult(diagnose(options.task, recipe=recipe, **given, on_progress=on_progress), answer)
