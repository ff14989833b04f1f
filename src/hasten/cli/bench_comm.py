"""Measures the communication between processes: latency and bandwidth of each collective, by message size.

On several nodes: hasten launch --nproc-per-node N --nnodes M --rdzv-endpoint HOST:PORT -- bench-comm
"""

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any

from hasten.cli import argument_types
from hasten.cli.output import CommandResult
from hasten.core.progress import ProgressCallback
from hasten.launch.rank_results import in_job

HELP = "measure latency and bandwidth of each collective"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten bench-comm`` to its parser."""
    argument_types.add_processes(parser, "number of processes on this machine", default=2)
    argument_types.add_timeout(parser)


def run(options: Namespace, watch: ProgressCallback) -> CommandResult:
    """Measure if this process is a rank of a job; else start a job of ``--processes`` ranks that do."""
    if not in_job():
        from hasten.launch.launcher import launch

        return CommandResult(None, deferred=partial(launch, options.argv, options.processes))
    from hasten.launch.comm_benchmark import bench_comm

    return CommandResult(bench_comm(options.device, watch=watch, timeout=options.timeout), _page)


def _page(result: dict) -> Any:
    from hasten.reporting.terminal_bench_comm import bench_comm_answer

    return bench_comm_answer(result)
