"""Names a task, finds it, and hands it to another process.

A task is called for by a workload's name (``digits``), by file and function (``mine.py:task``), or is
there already: a Task, or a function that returns one. ``TaskRef`` is all of these as one thing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hasten.core.errors import ConfigurationError, RunError, format_error, suggest
from hasten.core.task import Task
from hasten.engine.registry import import_file, line_in
from hasten.utils.rng import preserve_rng_state, set_seeds

ENTRY_POINTS = "hasten.workloads"
FEW = 8  # functions of a file that a line names
OWN_FILES = "hasten_file_"  # how import_file names a user's file: no other process could import it under that name


def load_task(what) -> Task:
    """The task behind anything that ``TaskRef.of`` takes."""
    return TaskRef.of(what).load()


def workload_names() -> list[str]:
    """Every installed workload: ours, then those that other packages bring."""
    package = importlib.import_module("hasten.workloads")
    ours = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
    return sorted(ours) + sorted(point.name for point in entry_points(group=ENTRY_POINTS))


@dataclass(frozen=True)
class TaskRef:
    """Where a task comes from. ``str(ref)`` is its name for people.

    Attributes:
        name: ``digits``, ``mine.py:task`` or the name of a function or a Task.
        file: the absolute path of the user's file, where the task is named by file and function.
        given: the Task, or the function that returns one, where it was handed over as an object.
    """

    name: str
    file: str | None = None
    given: Any = None

    @staticmethod
    def of(what: TaskRef | Task | Callable[[], Task] | str | Path) -> TaskRef:
        """A reference from anything that names a task. The user's file is not run yet.

        Raises:
            Refusal: no such workload or file, a file without ``:function``, or no task at all.
        """
        if isinstance(what, TaskRef):
            return what
        if isinstance(what, Task):
            return TaskRef(what.name, given=what)
        if isinstance(what, (str, Path)):
            return _ref_of_text(str(what).strip())
        if callable(what):
            return TaskRef(getattr(what, "__name__", type(what).__name__), given=what)
        raise ConfigurationError(
            f"a task is a workload's name, path/to/file.py:function, a hasten.Task or a function that returns one, not {type(what).__name__}"
        )

    def load(self) -> Task:
        """The task itself, under its name.

        Raises:
            Refusal: the file does not import, the function is not there, it raises, or it returns no Task.
        """
        if isinstance(self.given, Task):
            return self.given
        function = self.function()
        with _with_same_rng():
            return _called(function, self.name).named(self.name)

    def function(self) -> Callable[[], Task]:
        """The function that returns the task.

        Raises:
            Refusal: there is none: a Task that was handed over as an object, a file that does not import, ...
        """
        if isinstance(self.given, Task):
            raise ConfigurationError(f"the task {self.name} was given as an object; no function returns it")
        with _with_same_rng():
            return self.given or (self._from_file() if self.file else _workload(self.name))

    def to_json(self) -> str:
        """One line of text for another process of this session; an object travels as a pickle in it.

        Raises:
            Refusal: the object cannot be pickled.
        """
        if self.given is None:
            return json.dumps({"name": self.name, "file": self.file})
        return json.dumps({"name": self.name, "pickle": _pickled(self.given), "path": sys.path})

    @staticmethod
    def from_json(text: str) -> TaskRef:
        """What ``to_json`` told. It may execute code: only for what this session itself has written."""
        told = json.loads(text)
        if "pickle" not in told:
            return TaskRef(told["name"], told["file"])
        import cloudpickle

        sys.path.extend(folder for folder in told["path"] if folder not in sys.path)  # where its modules were found
        return TaskRef(told["name"], given=cloudpickle.loads(base64.b64decode(told["pickle"])))

    def fingerprint(self) -> str:
        """Changes when the task's code does: of its file and what it imports from beside it, its workload's module, or the pickled object."""
        if self.given is not None:
            sources = [_pickled(self.given).encode()]
        else:
            file = Path(self.file or inspect.getsourcefile(_workload(self.name)))
            sources = [path.read_bytes() for path in [file, *(_imported_from(file.parent) if self.file else ())]]
        return f"{self.name}-{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}"

    def __str__(self) -> str:
        return self.name

    def _from_file(self) -> Callable:
        name, module = self.name.rpartition(":")[2], import_file(Path(self.file))
        function = getattr(module, name, None)
        if not callable(function):
            there = _functions_in(module)
            hint = suggest(name, there) if there else ", and no other function without arguments either"
            raise ConfigurationError(f"{Path(self.file).name} has no function {name!r}{hint}")
        return function


def _ref_of_text(text: str) -> TaskRef:
    where, colon, function = text.rpartition(":")
    if colon and where.endswith(".py"):
        path = Path(where).expanduser().resolve()
        if not path.is_file():
            raise ConfigurationError(f"{path} is no regular file" if path.exists() else f"there is no file {path}")
        if not function.isidentifier():
            raise ConfigurationError(f"cannot read {text!r}; write {path.name}:function{_which(path)}")
        return TaskRef(f"{path.name}:{function}", str(path))
    if text.endswith(".py"):
        path = Path(text).expanduser().resolve()
        raise ConfigurationError(f"say which function of {path.name} returns the task{_which(path)}")
    if text not in workload_names():
        raise ConfigurationError(
            f"no workload is called {text!r}{suggest(text, workload_names())}; a task of your own is path/to/file.py:function"
        )
    return TaskRef(text)


@contextmanager
def _with_same_rng():
    """Data that a task's file or function draws are the same for every arm of a comparison and every resumption, whatever the seed."""
    with preserve_rng_state():
        set_seeds(0)
        yield


def _workload(name: str) -> Callable:
    if point := {point.name: point for point in entry_points(group=ENTRY_POINTS)}.get(name):
        try:
            return point.load()
        except Exception as error:
            raise ConfigurationError(f"the workload {name} cannot be imported: {format_error(error)}") from None
    return getattr(importlib.import_module(f"hasten.workloads.{name}"), name)


def _imported_from(folder: Path) -> list[Path]:
    """The modules of a user's own folder that are loaded by now; an environment that stands in it is not theirs."""
    files = {Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    return sorted(
        path
        for path in files
        if path.is_relative_to(folder) and "site-packages" not in path.parts and path.suffix == ".py"
    )


def _called(function: Callable, name: str) -> Task:
    try:
        task = function()
    except (ConfigurationError, RunError):
        raise
    except (Exception, SystemExit) as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        raise ConfigurationError(
            f"{name} raised {format_error(error)}{line_in(error, code.co_filename) if code else ''}"
        ) from None
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"{name} must return a hasten.Task; it returned {'nothing' if task is None else type(task).__name__}"
        )
    return task


def _which(path: Path) -> str:
    """``: mine.py:task or mine.py:other``, the functions of a file that could be meant."""
    there = _functions_in(import_file(path))
    if not there:
        return "; it has no function without arguments"
    more = f" or another of its {len(there)} functions" if len(there) > FEW else ""
    return f": {' or '.join(f'{path.name}:{name}' for name in there[:FEW])}{more}"


def _functions_in(module) -> list[str]:
    """The public functions that a file defines itself and that can be called without arguments."""
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }
    return [name for name, value in own.items() if not name.startswith("_") and not _required(value)]


def _required(function: Callable) -> list:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _pickled(thing) -> str:
    import cloudpickle

    for name in [name for name in sys.modules if name.startswith(OWN_FILES)]:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        return base64.b64encode(cloudpickle.dumps(thing)).decode()
    except Exception as error:
        raise ConfigurationError(
            f"the task cannot be handed to a measuring process: {format_error(error)}; put it into a file and name it path/to/file.py:function"
        ) from None
