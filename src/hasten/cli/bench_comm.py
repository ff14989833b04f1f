"""Measures how fast processes talk to each other: latency and bandwidth of each collective, by size.

Between machines: hasten launch --processes N --nnodes M --rdzv-endpoint HOST:PORT -- network
"""

from functools import partial

from hasten.cli import argument_types
from hasten.cli.output import CommandResult
from hasten.launch.rank_results import in_job

HELP = "latency and bandwidth between processes, by collective and size"


def arguments(parser) -> None:
    parser.add_argument(
        "--processes", type=argument_types.processes, default=2, metavar="N", help="on this machine; 2 unless said"
    )
    argument_types.add_timeout(parser)


def run(options, watch) -> CommandResult:
    if not in_job():
        from hasten.launch.launcher import launch

        return CommandResult(None, deferred=partial(launch, options.words, options.processes))
    from hasten.launch.comm_benchmark import bench_comm

    result = bench_comm(options.device, watch=watch, timeout=options.timeout)

    def page():
        from hasten.reporting.terminal_bench_comm import network_answer

        return network_answer(result)

    return CommandResult(result, page)
