"""A task that is given as a command, such as ``python train.py --epochs 90``: the user's own training, untouched."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from hasten.core.errors import ConfigurationError, RunError
from hasten.core.method import Method, hooks_of
from hasten.core.recipe import Recipe
from hasten.engine.registry import method_class, takes_any_option
from hasten.engine.tasks import TaskRef
from hasten.hosts import site_map
from hasten.hosts.host import check_supported
from hasten.hosts.metric import parse_request
from hasten.hosts.script_files import ScriptChangedError, ScriptFiles
from hasten.utils.typed_arguments import name_of_argument, typed_numbers, with_typed

IGNORING = {"I": "isolated mode", "E": "ignores PYTHON variables", "S": "no site"}  # flags that keep hasten out
WITH_VALUE = "mcWX"  # one-letter options of Python that take the next argument
# set by hasten's command line, not by the user
OURS = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "-all"}


@dataclass(frozen=True)
class ScriptRef(TaskRef):
    """A training script and its arguments. ``str(ref)`` is a short name, such as ``train`` for ``train.py``.

    Attributes:
        argv: The command.
        directory: Where it runs; absolute.
        environment: Its environment variables.
        metric: The metric as ``NAME[:min|max]``; None to find it.
        vary: Arguments of the script, as it parses them or as the command gives them, of which a search may try other
            values.
    """

    argv: tuple[str, ...] = ()
    directory: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    metric: str | None = None
    vary: tuple[str, ...] = ()
    can_be_shortened = False

    @staticmethod
    def of_command(
        argv: Sequence[str],
        metric: str | None = None,
        directory: str | None = None,
        vary: Sequence[str] | None = None,
    ) -> ScriptRef:
        """The reference to a command, which is checked as far as that is possible without running it.

        Raises:
            ConfigurationError: There is no such command or script, an option makes Python ignore PYTHONPATH, or
                ``metric`` is no name of a metric.
        """
        if metric:
            parse_request(metric)  # refused before anything runs
        if not argv:
            raise ConfigurationError("no command is given after --; write hasten VERB -- python train.py")
        directory = os.path.abspath(directory or os.getcwd())
        # set by hasten's command line, unless Python already had options about warnings
        ours = {} if sys.warnoptions else OURS
        environment = {name: value for name, value in os.environ.items() if ours.get(name) != value}
        command = shutil.which(argv[0], path=environment.get("PATH")) if os.sep not in argv[0] else argv[0]
        hint = f"; write python {argv[0]}" if argv[0].endswith(".py") else ""
        if re.fullmatch(r"[A-Za-z_]\w*=.*", argv[0], re.DOTALL):
            hint = f"; set variables before hasten, or write env {argv[0]}"
        if command is None or not os.path.exists(os.path.join(directory, command)):
            raise ConfigurationError(f"there is no command {argv[0]}{hint}")
        path = os.path.join(directory, command)
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            raise ConfigurationError(f"{argv[0]} is not executable{hint}")
        script = _script_of(argv, directory) if _is_python(argv[0]) else _script_among(argv[1:], directory)
        name = re.sub(r"\.(py|sh)$", "", os.path.basename(script or argv[0]))
        file = os.path.join(directory, script) if script and script.endswith(".py") else None
        names = tuple(map(name_of_argument, [vary] if isinstance(vary, str) else vary or ()))
        return ScriptRef(name or argv[0], file, None, tuple(argv), directory, environment, metric, names)

    def load(self) -> NoReturn:
        """Raises ConfigurationError: a script is no Task, it runs its own loop."""
        self.function()

    def function(self) -> NoReturn:
        """Raises ConfigurationError: a script is no function that returns a task."""
        raise ConfigurationError(f"{self.command} is a command, and this needs a task: a workload or file.py:function")

    @property
    def command(self) -> str:
        """The command as typed."""
        return shlex.join(self.argv)

    def argv_under(self, methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The command with the values that a recipe gives to arguments which are numbers in it.

        Arguments that the script parses without them being in the command are replaced there; see ``script_arguments``.
        """
        typed = typed_numbers(self.argv).keys()
        values: dict[str, Any] = {}
        for name, options in methods.items():
            if typed & options.keys() and takes_any_option(method_class(name)):  # the others import nothing
                values |= options
        return with_typed(self.argv, values)

    @cached_property
    def files(self) -> ScriptFiles:
        """The files of the script, as they were when they were first asked for."""
        return self._read_files("command")

    def _read_files(self, began: str) -> ScriptFiles:
        below = Path(self.file).parent if self.file else Path(self.directory)
        return ScriptFiles(below, self.argv, self.directory, began)

    def begin(self, command: str) -> None:
        """Reads the files of the script for a "search" or another "command" that begins; a part of a search keeps those
        of the search.
        """
        if command == "search" or self.files.began != "search":
            vars(self)["files"] = self._read_files(command)

    def end(self) -> None:
        self.files.began = "command"

    def check_unchanged(self) -> None:
        """Raises ScriptChangedError if the files of the script are not those with which the command began."""
        if (path := self.files.changed()) is not None:
            name = os.path.relpath(path, self.directory)
            raise ScriptChangedError(f"{name} has changed since the {self.files.began} began; start it again")

    def fingerprint(self) -> str:
        """A hash of the command, of files that it names, and of code and configuration below the script's directory, as
        they were when the search or another command began.
        """
        return f"{self.name}-{self.files.digest[:16]}"

    def check_methods(self, methods: Sequence[Method]) -> None:
        """Raises ConfigurationError for a method with a hook that a script does not call, or one that changes an
        optimizer of torch if the first run had none.
        """
        name = Path(self.file).name if self.file else self.name
        check_supported(methods, name)
        known = site_map.known_sites(self) or {}
        of_torch = [one for one in known.get("optimizers", ()) if one.get("made_by") != "keras"]
        if known.get("watched_steps") and not of_torch:
            for method in methods:
                if "optimizer" in hooks_of(method):
                    raise ConfigurationError(
                        f"{method.name} changes an optimizer of torch, and {name} has none; leave the method out"
                    )

    def start_worker(
        self, service: str, processes: int, timeout: float | None, deadline: float | None, **arguments: Any
    ) -> Any:
        """The object in this process that answers the calls of ``service``, "module:Class", for this script.

        Raises:
            ConfigurationError: More than one process.
            RunError: The service needs the loop of the engine; see ``services.SERVICES`` for those that do not.
        """
        from hasten.hosts import services  # which start processes and import this module

        if processes != 1:
            raise ConfigurationError(f"{self.name} starts its own processes; leave --processes out")
        name = service.rpartition(":")[2]
        if name not in services.SERVICES:
            raise RunError(f"this measurement needs the loop of the engine, and {self.name} has one of its own")
        return services.SERVICES[name](self, timeout=timeout, deadline=deadline, **arguments)

    def sites(self) -> dict[str, Any] | None:
        """The sites that earlier runs have shown, a list for each of ``site_map.KINDS``; None before the first run."""
        known = site_map.known_sites(self)
        return None if known is None else {kind: known[kind] for kind in site_map.KINDS}

    def device(self, asked: str) -> str:
        """The device that the script was seen to train on; ``asked`` before its first run."""
        return site_map.device_of(asked, site_map.known_sites(self))

    def write_sites(self, directory: Path, recipe: Recipe) -> None:
        """Writes the site map beside a recipe, which the search has checked."""
        site_map.write(directory, self, recipe)

    def __str__(self) -> str:
        return self.name


def _is_python(command: str) -> bool:
    return re.fullmatch(r"python[\d.]*", os.path.basename(command)) is not None


def _script_of(argv: Sequence[str], directory: str) -> str:
    """The script or module of a Python command; ConfigurationError if there is none, or for flags in IGNORING."""
    arguments = iter(argv[1:])
    for argument in arguments:
        if not argument.startswith("-"):
            if not os.path.exists(os.path.join(directory, argument)):
                raise ConfigurationError(f"there is no file {argument} in {directory}")
            return argument
        for letter in argument[1:] if not argument.startswith("--") else "":
            if letter in IGNORING:
                raise ConfigurationError(
                    f"{argv[0]} -{letter} ({IGNORING[letter]}) keeps hasten out of the script; leave the flag out"
                )
            if letter in WITH_VALUE:
                value = argument.partition(letter)[2] or next(arguments, "")
                if letter in "mc":
                    return value if letter == "m" else "command"
                break
    raise ConfigurationError("this starts Python without a script; write hasten VERB -- python train.py")


def _script_among(arguments: Sequence[str], directory: str) -> str | None:
    """The script that a starter such as ``bash``, ``torchrun`` or ``accelerate launch`` is given; None without one."""
    scripts = (argument for argument in arguments if argument.endswith((".py", ".sh")))
    return next((script for script in scripts if os.path.isfile(os.path.join(directory, script))), None)
