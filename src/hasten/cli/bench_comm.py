"""Measures the communication between processes: latency and bandwidth of each collective, by message size.

On several nodes: hasten launch --nproc-per-node N --nnodes M --rdzv-endpoint HOST:PORT -- bench-comm
"""

from argparse import ArgumentParser, Namespace
from functools import partial

from hasten.cli.argument_types import add_processes, add_timeout
from hasten.cli.output import CommandResult, page
from hasten.core.progress import ProgressCallback
from hasten.launch.rank_results import in_job

HELP = "measure latency and bandwidth of each collective"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    add_processes(parser, "number of processes on this machine", default=2)
    add_timeout(parser, minimum="")


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Measure if this process is a rank of a job; else start a job of ``--processes`` ranks that do."""
    if not in_job():
        from hasten.launch.launcher import launch

        return CommandResult(None, deferred=partial(launch, options.argv, options.processes))
    from hasten.launch.comm_benchmark import bench_comm

    result = bench_comm(options.device, on_progress=on_progress, timeout=options.timeout)
    return CommandResult(result, page("terminal_ranks", "bench_comm_answer"))
