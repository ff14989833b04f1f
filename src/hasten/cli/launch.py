"""Runs a command in several processes, on one machine or on several nodes, with torchrun's elastic agent.

On several nodes the same command must be started on every node.
"""

import argparse
import math
import re
from collections.abc import Sequence
from functools import partial

from hasten.cli.argument_types import add_max_restarts, add_timeout, node_range, preflight_recipe, process_count
from hasten.cli.output import CommandResult
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method
from hasten.core.progress import ProgressCallback

HELP = "run a command in several processes, on one machine or several nodes"
USAGE = "hasten launch --nproc-per-node N [--nnodes M --rdzv-endpoint HOST:PORT] -- train TASK ..."
COMMANDS = ("train", "diagnose", "bench-comm")
SHARES = ("degree", "hybrid_shard_size", "group_size")  # options of methods that must divide the number of processes
LAUNCH_OPTIONS = ("--processes", "--nproc-per-node", "--nnodes", "--max-restarts", "--timeout")  # not in the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hasten launch``, named as in torchrun, to its parser."""
    parser.add_argument(
        "--nproc-per-node", type=process_count, required=True, metavar="N", help="number of processes on each node"
    )
    parser.add_argument(
        "--nnodes",
        type=node_range,
        default=(1, 1),
        metavar="M|MIN:MAX",
        help="number of nodes; MIN:MAX keeps training while at least MIN nodes are alive and admits nodes up to MAX "
        "(default: 1)",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        type=_endpoint,
        metavar="HOST:PORT",
        help="where the nodes find each other; HOST is one of the nodes; required for several nodes",
    )
    add_max_restarts(parser)
    add_timeout(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help=", ".join(COMMANDS))


def run(options: argparse.Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Check the request on this node (ConfigurationError); ``deferred`` of the result starts the processes."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or command[0] not in COMMANDS:
        raise ConfigurationError(f"launch runs {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}: {USAGE}")
    if options.nnodes[1] > 1 and options.rdzv_endpoint is None:
        advice = "add --rdzv-endpoint HOST:PORT, where HOST is one of them"
        raise ConfigurationError(f"{options.nnodes[1]} nodes need a rendezvous; {advice}")
    misplaced = [name for word in command if (name := word.partition("=")[0]) in LAUNCH_OPTIONS]
    if misplaced:
        raise ConfigurationError(f"put {misplaced[0]} before the command, as an option of launch: {USAGE}")
    _check_command(command, options)
    from hasten.launch.launcher import launch

    restarts = options.max_restarts if command[0] == "train" else 0  # the other commands have no checkpoint
    command += ["--timeout", str(options.timeout)]
    command += [f"--{name}" for name in ("json", "quiet") if getattr(options, name)]
    for name in ("device", "seed"):
        value = getattr(options, name)
        command += [f"--{name}", str(value)] if value else []
    nodes, endpoint = options.nnodes, options.rdzv_endpoint
    return CommandResult(None, deferred=partial(launch, command, options.nproc_per_node, nodes, endpoint, restarts))


def _check_command(command: list[str], options: argparse.Namespace) -> None:
    """Check the command for every number of nodes that the job may have; ConfigurationError if it cannot run."""
    from hasten.engine.registry import make_methods

    if {"-h", "--help"}.intersection(command):
        return
    inner = options.parse(command)
    if inner is None or inner.verb == "bench-comm":
        return
    if not isinstance(inner.task, str):
        what = f"launch starts the ranks of a task, and {inner.task} starts its own processes"
        raise ConfigurationError(f"{what}; write hasten {inner.verb} -- {inner.task.command}")
    methods = make_methods(preflight_recipe(inner))
    if options.nproc_per_node * options.nnodes[1] == 1:
        return
    if inner.verb == "train" and inner.max_bad_rows:
        what = "--max-bad-rows supports a single process, because each rank would count its own bad rows"
        raise ConfigurationError(f"{what}; remove the option or fix the data")
    device = inner.device or options.device or ""
    if ":" in device:
        advice = "use --device cuda, which assigns one GPU to each process"
        raise ConfigurationError(f"several processes cannot share {device}; {advice}")
    _check_divisible(methods, options.nproc_per_node, *options.nnodes)
    from hasten.launch.launcher import preflight_check

    nodes, is_elastic = options.nnodes[1], options.nnodes[0] < options.nnodes[1]
    preflight_check(inner.task, options.nproc_per_node, methods, nodes, is_elastic)


def _check_divisible(methods: Sequence[Method], nproc_per_node: int, min_nodes: int, max_nodes: int) -> None:
    """ConfigurationError unless options such as ``degree`` divide every number of processes that --nnodes allows."""
    if min_nodes == max_nodes:
        return  # the ranks check a fixed number themselves
    shares = {
        f"{method.name}:{option}={value}": value
        for method in methods
        for option, value in vars(method).items()
        if option in SHARES and isinstance(value, int) and value > 0
    }
    degrees = {text: value for text, value in shares.items() if ":degree=" in text}
    for text, value in [*shares.items(), (" with ".join(degrees), math.prod(degrees.values()))]:
        for nodes in range(min_nodes, max_nodes + 1):
            world_size = nodes * nproc_per_node
            if world_size % value:
                what = f"--nnodes {min_nodes}:{max_nodes} can result in {world_size} processes"
                raise ConfigurationError(f"{what}, which {text} does not divide; change one of them")


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (colon and host and re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, not {text!r}")
    try:
        host.encode("idna")  # as the socket module does
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, and {host!r} is no name of a host") from None
    return text
