"""Reads the command line, runs one verb, and turns what comes of it into an exit code.

0: done. 1: a result that is a "no", or a run that could not go on. 2: a wrong request. Whatever goes
wrong, or is worth a notice, is told in one line on standard error. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import argparse
import atexit
import os
import re
import signal
import sys
import warnings
from typing import NoReturn

from hasten import __version__
from hasten.cli import argument_types, bench_comm, compare, data, diagnose, eject, launch, methods, report, train, tune
from hasten.cli.output import CommandResult, show, stdout_kept_for_the_answer, strict_json
from hasten.cli.progress import tell, watching
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
from hasten.launch.rank_results import (
    RankResult,
    die_with_parent,
    in_job,
    is_main_process,
    is_managed_rank,
    peer_error,
    write_result,
)

VERBS = {
    "methods": methods,
    "diagnose": diagnose,
    "train": train,
    "compare": compare,
    "tune": tune,
    "report": report,
    "eject": eject,
    "data": data,
    "launch": launch,
    "bench-comm": bench_comm,
}
TASK_HELP = "TASK is the name of a workload (such as digits) or path/to/file.py:function"


def main(words: list[str] | None = None) -> int:
    """The program ``hasten``; returns the exit code."""
    own_process = words is None
    words = sys.argv[1:] if own_process else words
    as_json = "--json" in words
    _open_what_is_closed()
    _write_in_any_encoding()
    _quieten_libraries()
    _show_notices()
    mute = not is_main_process() and any(word in launch.COMMANDS for word in words)  # rank 0 answers for all
    asked = _end_as_by_ctrl_c() if own_process else []
    if is_managed_rank() and own_process:
        die_with_parent()
    answer, interrupted = None, False
    try:
        _refuse_a_folder_that_is_gone()
        answer = _answer(words)
        if answer is None:
            return 0
        if asked and answer.deferred:  # while something was imported that swallows all exceptions
            raise KeyboardInterrupt
        if answer.deferred is None and not mute:
            if is_managed_rank() and (trouble := peer_error()):  # or two would answer
                raise PeerFailure(trouble)
            _show_to_whoever_reads(answer, as_json)
        ending = RankResult(answer.deferred() if answer.deferred else answer.code)
    except BaseException as error:  # a task's own code may raise anything
        ending, interrupted = _ending(error), isinstance(error, KeyboardInterrupt)
    code, line = ending.code, ending.message
    if (
        in_job() and line is None
    ):  # a "no" is no failure of the job, and must not make anybody end the other ranks or start them again
        code = 0
    if is_managed_rank():  # whoever started it tells what there is to tell
        write_result(ending)
        return _end_now(code) if own_process else code
    if own_process:  # Ctrl-C once more would end us by the signal while torch clears up, under any handler but this one
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    if line is not None and not (mute and ending.is_peer_failure):
        _say(line)
        if as_json and not mute:
            print(strict_json({"error": line}))
    if own_process and (interrupted or (answer and answer.deferred)):
        atexit._run_exitfuncs()
        return _end_now(code)
    return code


def _end_now(code: int) -> NoReturn:
    """Threads of a library may crash in an interpreter that is going, and a rank that has done its work would count as lost.

    One that was interrupted while it imported something ends by the signal, whatever it returns.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show_to_whoever_reads(answer: CommandResult, as_json: bool) -> None:
    """Prints the answer; a reader that has seen enough (``hasten methods | head``) is no mistake."""
    try:
        print(strict_json(answer.result)) if as_json else show(answer)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries once more at its end
        raise RunError(
            f"the work is done, but its answer cannot be written to standard output: {error.strerror}"
        ) from None


def _open_what_is_closed() -> None:
    """A daemon may start us without an output; then it goes nowhere."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, open(number, "w"))  # noqa: SIM115  open as long as the process


def _write_in_any_encoding() -> None:
    """An output that has no en dash or multiplication sign shows something else there."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if os.environ.get("COLUMNS") == "0":  # some shells say so where there is no terminal
        del os.environ["COLUMNS"]


def _end_as_by_ctrl_c() -> list[int]:
    """Who ends us by a signal gets an answer, too; ``nohup`` stays what it is. The signals that came are noted in the list."""
    owner, came = os.getpid(), []

    def end(number: int, frame) -> None:
        if os.getpid() != owner:  # whoever was forked has nothing to say
            os._exit(128 + number)
        came.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
    return came


def _refuse_a_folder_that_is_gone() -> None:
    try:
        os.getcwd()
    except OSError:
        raise ConfigurationError("the current folder is gone; cd into another one") from None


def _answer(words: list[str]) -> CommandResult | None:
    """What the verb answers; None where argparse has said all there is to say (``--help``, ``--version``)."""
    try:
        options = read(words)
    except SystemExit:
        return None
    if options is None:
        return None
    if options.quiet:
        warnings.simplefilter("ignore", ProgressWarning)
    with stdout_kept_for_the_answer(), watching(options.quiet) as watch:
        return VERBS[options.verb].run(options, watch)


def _ending(error: BaseException) -> RankResult:
    """What comes of a verb that raised this."""
    code, line = _verdict(error)
    return RankResult(
        code,
        line,
        is_peer_failure=isinstance(error, (PeerFailure, KeyboardInterrupt)),  # who started a rank may end it
        stopped=isinstance(error, RunInterrupted),
        waited=error.seconds if isinstance(error, CollectiveTimeout) else 0.0,
    )


def _verdict(error: BaseException) -> tuple[int, str]:
    """(exit code, the one line) for whatever a verb raised."""
    if os.environ.get("HASTEN_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, ConfigurationError):
        return 2, str(error)
    if isinstance(error, RunError):
        return 1, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 1, "stopped"
    if isinstance(error, SystemExit):
        return 1, "the task's own code ended the program (sys.exit), so there is no result"
    if not isinstance(error, Exception):
        return 1, f"the task's own code raised {type(error).__name__}, so there is no result"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("hasten"):
        return 1, f"the package {error.name} is not installed; pip install {error.name}"
    return 1, f"internal error: {format_error(error)} (set HASTEN_TRACEBACK=1 for the traceback; please report it)"


def read(words: list[str]) -> argparse.Namespace | None:
    """The options, or None where nothing was asked for and the help was shown instead."""
    parser = _parser()
    options, strangers = parser.parse_known_args(words)
    options.words = words
    if strangers:
        _refuse_strangers(strangers, getattr(options, "verb", None))
    if options.verb is None:
        if getattr(options, "json", False):
            raise ConfigurationError("no command is given; see hasten --help")
        parser.print_help()
        return None
    usual = {"json": False, "device": None, "seed": 0, "quiet": False}
    return argparse.Namespace(**(usual | vars(options)))


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors become one line and offer the nearest name."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1s is a wrong time, not an option that nobody knows

    def error(self, message: str):
        if unknown := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", unknown[2])
            raise ConfigurationError(f"no command is called {unknown[1]!r}{suggest(unknown[1], known)}")
        message = re.sub(r"^argument (?:-\w, )?(\S+): ", r"\1 ", message)
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    everywhere = argument_types.everywhere()
    parser = _Parser(
        prog="hasten",
        description="Makes the training of neural networks faster, and proves it.",
        parents=[everywhere],
        allow_abbrev=False,
        epilog=f"{TASK_HELP}. Exit code: 0 done, 1 a result that is a no, 2 a wrong request.",
    )
    parser.add_argument("--version", action="version", version=f"hasten {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", title="commands")
    for name, verb in VERBS.items():
        one = verbs.add_parser(
            name, help=verb.HELP, description=verb.__doc__, parents=[everywhere], allow_abbrev=False, epilog=TASK_HELP
        )
        verb.arguments(one)
    return parser


def _refuse_strangers(strangers: list[str], verb: str | None) -> None:
    """One clear line about words that nobody asked for."""
    options = [word.partition("=")[0] for word in strangers if word.startswith("-")]
    if not options:
        raise ConfigurationError(
            f"do not know what to do with {strangers[0]!r}; see hasten {verb or ''} --help".replace("  ", " ")
        )
    parser = argument_types.everywhere()
    if verb:
        VERBS[verb].arguments(parser)
    raise ConfigurationError(f"there is no option {options[0]}{suggest(options[0], _options_of(parser))}")


def _options_of(parser: argparse.ArgumentParser) -> set[str]:
    """What a parser knows, those of its actions included."""
    actions = [
        each for action in parser._actions if isinstance(action.choices, dict) for each in action.choices.values()
    ]
    return set(parser._option_string_actions).union(*map(_options_of, actions))


def _quieten_libraries() -> None:
    """Warnings of libraries are for those who write them; here and in the processes we start they would bury the answer."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _show_notices() -> None:
    """What we warn about ourselves is for the user: one line, whatever is done with other warnings."""
    warnings.simplefilter("always", HastenWarning)
    shown = warnings.showwarning

    def show_warning(message, category, *where, **more) -> None:
        _say(str(message)) if issubclass(category, HastenWarning) else shown(message, category, *where, **more)

    warnings.showwarning = show_warning


def _say(text: str) -> None:
    """The program's own words: one line on standard error, in which nothing commands the terminal."""
    line = " ".join(text.split())
    tell(
        f"hasten: {line if line.isprintable() else ''.join(each if each.isprintable() else repr(each)[1:-1] for each in line)}"
    )
