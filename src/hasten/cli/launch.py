"""Runs a command of hasten in several processes, on one machine or on many: a thin face over torchrun.

The same words have to be said on every machine.
"""

import argparse
import math
import re
from functools import partial

from hasten.cli import argument_types
from hasten.cli.output import CommandResult
from hasten.core.errors import ConfigurationError

HELP = "run a command in several processes, on one machine or many"
FORM = "hasten launch --processes N [--nnodes M --rdzv-endpoint HOST:PORT] -- train TASK ..."
COMMANDS = ("train", "diagnose", "network")
SHARES = ("degree", "shards", "inner")  # settings of methods that have to divide the processes
BEFORE = ("--processes", "--max-restarts", "--timeout")  # and not in the command


def arguments(parser) -> None:
    parser.add_argument(
        "--processes", type=argument_types.processes, required=True, metavar="N", help="on each machine"
    )
    parser.add_argument(
        "--nnodes",
        type=argument_types.nodes,
        default=(1, 1),
        metavar="M",
        help="machines in all, 1 unless said; MIN:MAX goes on with fewer when some are lost, and takes in who comes",
    )
    argument_types.add_restarts(parser)
    argument_types.add_timeout(parser)
    parser.add_argument(
        "--rdzv-endpoint", type=_address, metavar="HOST:PORT", help="where the machines meet; one of them is HOST"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- train TASK ...")


def run(options, watch) -> CommandResult:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if command[:1] not in [[name] for name in COMMANDS]:
        raise ConfigurationError(f"launch runs {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}; say {FORM}")
    if options.nodes[1] > 1 and options.rendezvous is None:
        raise ConfigurationError(
            f"{options.nodes[1]} nodes have to meet somewhere; say --rdzv-endpoint HOST:PORT, where HOST is one of them"
        )
    if misplaced := [word for word in command if word.partition("=")[0] in BEFORE]:
        raise ConfigurationError(f"say {misplaced[0].partition('=')[0]} before the command, once: {FORM}")
    _refuse_what_does_not_fit(command, options)
    from hasten.launch.launcher import launch

    restarts = options.restarts if command[0] == "train" else 0  # the others keep nothing to go on from
    command += ["--timeout", str(options.timeout)]
    command += [f"--{name}" for name in ("json", "quiet") if getattr(options, name)]
    command += [
        word for name in ("device", "seed") if (given := getattr(options, name)) for word in (f"--{name}", str(given))
    ]
    return CommandResult(
        None, deferred=partial(launch, command, options.processes, options.nodes, options.rendezvous, restarts)
    )


def _refuse_what_does_not_fit(command: list[str], options) -> None:
    """What is asked for has to fit every number of machines that may come together, or the job would end with the machine that comes or goes.

    Raises:
        Refusal: words that the command does not know; a method that nobody knows; ranks that a setting of one does not divide, or with less
            than a sample each; what one process alone can do.
    """
    from hasten.cli.main import read
    from hasten.engine.registry import make_methods

    if {"-h", "--help"}.intersection(command):
        return
    given = read(command)
    if given.verb == "network":
        return
    methods = make_methods(argument_types.recipe_of_ranks(given))
    if options.processes * options.nodes[1] == 1:
        return
    if given.verb == "train" and given.max_bad_rows:
        raise ConfigurationError(
            "--max-bad-rows is for one process: several would count their bad rows apart; leave it out, or mend the data"
        )
    if ":" in (device := given.device or options.device or ""):
        raise ConfigurationError(
            f"several processes cannot share {device}; say --device cuda, and each gets a GPU of its own"
        )
    _refuse_what_divides_not(methods, options.processes, *options.nodes)
    from hasten.launch.launcher import preflight_check

    preflight_check(given.task, options.processes, methods, nnodes=options.nodes[0])


def _refuse_what_divides_not(methods, processes: int, fewest: int, most: int) -> None:
    settings = [(method.name, *each) for method in methods for each in vars(method).items()]
    shares = [
        (f"{name}:{setting}={value}", value)
        for name, setting, value in settings
        if setting in SHARES and isinstance(value, int) and value > 0
    ]
    degrees = [(told, value) for told, value in shares if ":degree=" in told]
    together = " with ".join(told for told, _ in degrees), math.prod(value for _, value in degrees)
    for told, value in [*shares, together]:
        odd = [machines * processes for machines in range(fewest, most + 1) if machines * processes % value]
        if odd and fewest < most:
            raise ConfigurationError(
                f"--nnodes {fewest}:{most} may come to {odd[0]} processes, which {told} does not divide; take other numbers"
            )


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (colon and host and re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, not {text!r}")
    return text
