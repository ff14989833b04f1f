"""The program ``hasten``: parses the command line, runs one command, and turns its result or error into an exit code.

Exit codes: 0 done; 1 a result that is a "no", or a run that could not continue; 2 a wrong request. Errors and warnings
are one line on standard error. Modules that import torch or rich are imported by the commands, so that ``--help`` is
fast.
"""

import argparse
import atexit
import io
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from hasten import __version__
from hasten.cli import argument_types, launch
from hasten.cli.output import CommandResult, show, stdout_reserved_for_answer, strict_json
from hasten.cli.progress import print_stderr, progress_display, redirect_to_devnull
from hasten.core.errors import (
    CollectiveTimeout,
    ConfigurationError,
    HastenWarning,
    PeerFailure,
    ProgressWarning,
    RunError,
    RunInterrupted,
    format_error,
    suggest,
)
from hasten.hosts.script_files import ScriptChangedError
from hasten.launch.rank_results import (
    RankResult,
    die_with_parent,
    in_job,
    is_main_process,
    is_managed_rank,
    peer_error,
    write_result,
)

NAMES = "methods diagnose train compare tune report eject export quantize serve data launch bench-comm"
COMMANDS: dict[str, Any] = {name: import_module(f"hasten.cli.{name.replace('-', '_')}") for name in NAMES.split()}
OF_SCRIPTS = ("diagnose", "train", "compare", "tune", "eject")  # that also take the user's own command after --
COMMAND = "command"  # stands for it where a task is parsed
TASK_HELP = (
    "TASK is the name of a workload, such as digits, or path/to/file.py:function. "
    "diagnose, compare, tune, train and eject also take your own command: hasten tune -- python train.py --epochs 90."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. ``argv`` are the arguments without the program's name. None reads
    ``sys.argv``; the process then belongs to this call, which sets signal handlers and may end the process.
    """
    owns_process = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    own, command = split_command(argv)
    as_json, is_script = "--json" in own, command is not None
    _prepare_streams()
    _silence_libraries()
    _show_hasten_warnings()
    # Rank 0 answers for all ranks of a job, of which a script is none: a cluster's WORLD_SIZE is that of its own.
    verb = next((argument for argument in argv if argument in COMMANDS), None)
    is_rank = in_job() and not is_script and verb in launch.COMMANDS
    mute = is_rank and not is_main_process()
    signals = _interrupt_on_signals() if owns_process else []
    if is_managed_rank() and owns_process:
        die_with_parent()
    answer, interrupted = None, False
    try:
        _check_working_directory()
        answer = _run_command(argv)
        if answer is None:
            return 0
        if signals and answer.deferred:  # the KeyboardInterrupt was lost: a module swallowed it while it was imported
            raise KeyboardInterrupt
        if answer.deferred is None and not mute:
            if is_managed_rank():
                error = peer_error()
                if error:  # the failed rank reports; two answers would contradict each other
                    raise PeerFailure(error)
            _print_answer(answer, as_json)
        ending = RankResult(answer.deferred() if answer.deferred else answer.code)
    except BaseException as error:  # the task's code may raise anything
        ending, interrupted = _result_of_error(error), isinstance(error, KeyboardInterrupt)
    code, line = ending.code, ending.message
    if is_rank and line is None:
        code = 0  # a result that is a "no" must not make torchrun stop or restart the other ranks
    if is_managed_rank():  # the launcher prints the result
        try:
            write_result(ending)
        except OSError as error:  # such as a full disk, which may be what ended the rank
            _print_line(line or f"the result of this rank cannot be written: {error.strerror}")
            code = code or 1
        return _exit_now(code) if owns_process else code
    if owns_process:  # another Ctrl-C must not interrupt torch's clean-up
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    if line is not None and not (mute and ending.is_peer_failure):
        _print_line(line)
        if as_json and not mute:
            print(strict_json({"error": line}))
    if owns_process and (interrupted or (answer and answer.deferred)):
        atexit._run_exitfuncs()
        return _exit_now(code)
    return code


def _run_command(argv: list[str]) -> CommandResult | None:
    """The result of the command; None if argparse has printed the answer (``--help``, ``--version``)."""
    options = None
    with suppress(SystemExit):
        options = parse_arguments(argv)
    if options is None:
        return None
    if options.quiet:
        warnings.simplefilter("ignore", ProgressWarning)
    with stdout_reserved_for_answer(), progress_display(options.quiet) as on_progress:
        try:
            return COMMANDS[options.verb].run(options, on_progress)
        except ConfigurationError as error:
            command = split_command(argv)[1] or []
            message = str(error).replace(" ".join(command), "").replace(shlex.join(command), "")
            if misplaced := _misplaced_option(message, options.verb, command):
                hint = f"{misplaced} is an option of hasten, too: those come before --"
                raise ConfigurationError(f"{error}; {hint}") from None
            raise


def parse_arguments(argv: list[str]) -> argparse.Namespace | None:
    """Parse the command line; ConfigurationError if it is wrong, None if it has no command and the help was printed."""
    parser = build_parser()
    own, command = split_command(argv)
    task = [] if command is None else [" ".join(command) or COMMAND]
    options, unknown = parser.parse_known_args([*own, *task])
    options.argv = argv
    if unknown:  # the command is where another word before -- took its place
        raise _unknown_argument([options.task] if unknown == task else unknown, options.verb, command is not None)
    if command is not None:
        from hasten.hosts.script_ref import ScriptRef

        wishes = {name: getattr(options, name, None) for name in ("metric", "vary")}
        options.task = ScriptRef.of_command(command, **wishes)
    elif getattr(options, "vary", None):
        raise ConfigurationError("--vary names arguments of your own command: hasten tune --vary lr -- python train.py")
    elif getattr(options, "metric", None):
        raise ConfigurationError("--metric is for your own command, after --; a task states its metric itself")
    if options.verb is None:
        if getattr(options, "json", False):
            raise ConfigurationError("no command is given; see hasten --help")
        parser.print_help()
        return None
    return argparse.Namespace(**(argument_types.DEFAULTS | vars(options)))


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The arguments before ``--``, and the user's own command after it; None for commands that take a task only."""
    argv = list(argv)
    verb = next((argument for argument in argv if argument in COMMANDS), None)
    if verb not in OF_SCRIPTS or "--" not in argv:
        return argv, None
    index = argv.index("--")
    return argv[:index], argv[index + 1 :]


def build_parser() -> argparse.ArgumentParser:
    """The argparse parser of the whole command line, with a subparser for each command."""
    common = argument_types.common_options()
    parser = _Parser(
        prog="hasten",
        description="Makes PyTorch training faster and proves it.",
        parents=[common],
        allow_abbrev=False,
        epilog=f'{TASK_HELP} Exit codes: 0 done, 1 a result that is a "no" or a failed run, 2 a wrong request.'
        " `hasten train -- COMMAND` has that of the command.",
    )
    parser.add_argument("--version", action="version", version=f"hasten {__version__}")
    subparsers: Any = parser.add_subparsers(dest="verb", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.HELP, description=command.__doc__, parents=[common], allow_abbrev=False
        )
        command.add_arguments(subparser)
        if any(action.dest == "task" for action in subparser._actions):
            subparser.epilog = TASK_HELP
    subparsers.choices["launch"].set_defaults(parse=parse_arguments)  # it checks the command that it runs
    return parser


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line and suggest similar names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # makes -1s a wrong duration, not an unknown option

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            known = re.findall(r"[\w-]+", choice[2])
            raise ConfigurationError(f"there is no command {choice[1]!r}{suggest(choice[1], known)}")
        message = re.sub(r"^argument (?:-\w, )?(\S+): ", r"\1 ", message)
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def _unknown_argument(unknown: list[str], verb: str | None, has_command: bool) -> ConfigurationError:
    names = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
    if not names:
        program = f"hasten {verb}" if verb else "hasten"
        place = " before --" if has_command else ""
        hint = f"; a command of yours comes after --: {program} -- python train.py"
        remedy = hint if verb in OF_SCRIPTS and not has_command else f"; see {program} --help"
        return ConfigurationError(f"unexpected argument {unknown[0]!r}{place}{remedy}")
    return ConfigurationError(f"there is no option {names[0]}{suggest(names[0], _option_names(_parser_of(verb)))}")


def _misplaced_option(message: str, verb: str, command: list[str]) -> str:
    """The option of ``verb`` in the user's own command that the error ``message`` names; "" if there is none."""
    if " failed by itself" not in message:
        return ""  # an error of hasten names an option of hasten
    names = [argument.partition("=")[0] for argument in command if argument.startswith("--")]
    refused = [name for name in names if re.search(rf"{re.escape(name)}(?![\w-])", message)]
    return next((name for name in refused if name in _option_names(_parser_of(verb))), "")


def _parser_of(verb: str | None) -> argparse.ArgumentParser:
    """A parser with the options of ``verb`` and those of every command."""
    parser = argument_types.common_options()
    if verb:
        COMMANDS[verb].add_arguments(parser)
    return parser


def _option_names(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of its subparsers."""
    names = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names.update(*map(_option_names, action.choices.values()))
    return names


def _result_of_error(error: BaseException) -> RankResult:
    code, line = _code_and_message(error)
    return RankResult(
        code,
        line,
        # The launcher may have interrupted this rank.
        is_peer_failure=isinstance(error, (PeerFailure, KeyboardInterrupt)),
        stopped=isinstance(error, RunInterrupted),
        waited=error.seconds if isinstance(error, CollectiveTimeout) else 0.0,
    )


def _code_and_message(error: BaseException) -> tuple[int, str]:
    if os.environ.get("HASTEN_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, (ConfigurationError, ScriptChangedError)):
        return 2, str(error)
    if isinstance(error, RunError):
        return 1, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 1, "interrupted"
    if isinstance(error, SystemExit):
        return 1, "the task's own code ended the program (sys.exit), so there is no result"
    if not isinstance(error, Exception):
        return 1, f"the task's own code raised {type(error).__name__}, so there is no result"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("hasten"):
        return 1, f"the package {error.name} is not installed; pip install {error.name}"
    return 1, f"internal error: {format_error(error)} (set HASTEN_TRACEBACK=1 for the traceback; please report it)"


def _exit_now(code: int) -> NoReturn:
    """Exit without Python's finalization. There, threads of libraries can crash the process, and the launcher would
    count a rank that has finished as lost.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _print_answer(answer: CommandResult, as_json: bool) -> None:
    """Print the answer as text or JSON. A reader that closes the pipe early (``| head``) is no error."""
    try:
        if as_json:
            print(strict_json(answer.result))
        else:
            show(answer)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the first into the second
        redirect_to_devnull(1)
    except OSError as error:
        redirect_to_devnull(1)  # otherwise Python tries to flush again at exit
        what = "the command finished, but its answer cannot be written to standard output"
        raise RunError(f"{what}: {error.strerror}") from None


def _prepare_streams() -> None:
    """Reopen closed output streams (daemons) on /dev/null; print a replacement for unencodable characters."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            redirect_to_devnull(descriptor)
            setattr(sys, name, open(descriptor, "w"))  # noqa: SIM115  open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if os.environ.get("COLUMNS") == "0":  # set by some shells without a terminal; rich would print nothing
        del os.environ["COLUMNS"]


def _interrupt_on_signals() -> list[int]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that the run ends as with Ctrl-C; ``nohup`` keeps working. The
    returned list receives the signals.
    """
    owner, received = os.getpid(), []

    def handler(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child has no answer to print
            os._exit(128 + number)
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)
    return received


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError:
        raise ConfigurationError("the current directory does not exist any more; cd into another one") from None


def _silence_libraries() -> None:
    """Hide warnings of libraries, here and in child processes: they are for developers and would bury the answer."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_LOGS", "-all")  # graph breaks and recompilations; methods report what matters


def _show_hasten_warnings() -> None:
    """Print each HastenWarning as one line, whatever happens to other warnings."""
    warnings.simplefilter("always", HastenWarning)
    show_other = warnings.showwarning

    def show_warning(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, HastenWarning):
            _print_line(str(message))
        else:
            show_other(message, category, *args, **kwargs)

    warnings.showwarning = show_warning


def _print_line(text: str) -> None:
    """Print ``hasten: text`` as one line on standard error, with control characters escaped."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    print_stderr(f"hasten: {line}")
