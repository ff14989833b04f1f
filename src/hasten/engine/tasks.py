"""References to tasks: by name, by file and function, or as an object; passes them to other processes.

A task is given as a workload's name (``digits``), as file and function (``mine.py:task``), as a Task, or as a
function that returns one. ``TaskRef`` represents all of these.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, cast

from hasten.core.errors import ConfigurationError, MemoryExhaustedError, RunError, format_error, suggest
from hasten.core.method import Method
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.registry import FILE_MODULE_PREFIX, import_file, line_in, make_methods

ENTRY_POINTS = "hasten.workloads"
TRAINING = ("fit", "train", "training_step")  # methods of objects that train or are trained
MAX_SUGGESTIONS = 8  # functions of a file that an error message lists

TaskLike: TypeAlias = "TaskRef | Task | Callable[[], Task] | str | Path"  # what ``TaskRef.of`` accepts


@dataclass(frozen=True)
class TaskRef:
    """Where a task comes from. ``str(ref)`` is its name."""

    name: str  # ``digits``, ``mine.py:task``, or the name of a function or a Task
    file: str | None = None  # absolute path of the user's file, if the task is given as file and function
    obj: Any = None  # the Task, or the function that returns one, if the task is given as an object
    can_be_shortened: ClassVar[bool] = True  # whether a run of a part of the training can stand for the whole

    @staticmethod
    def of(task: TaskLike) -> TaskRef:
        """A reference to a task; the user's file is not imported yet. ConfigurationError if there is no such workload
        or file, for a file without ``:function``, and for an object that is no task.
        """
        if isinstance(task, TaskRef):
            return task
        if isinstance(task, Task):
            return TaskRef(task.name, obj=task)
        if isinstance(task, (str, Path)):
            return _parse(str(task).strip())
        if any(hasattr(task, name) for name in TRAINING) and not isinstance(task, type):
            raise ConfigurationError(
                f"a {type(task).__name__} cannot be made anew for every measurement; write a function that makes it "
                "and trains it, at the top of a file, and pass hasten.script(function)"
            )
        if callable(task):
            return TaskRef(getattr(task, "__name__", type(task).__name__), obj=task)
        kinds = "a workload's name, path/to/file.py:function, a hasten.Task or a function that returns one"
        raise ConfigurationError(f"a task is {kinds}, not {type(task).__name__}; for a command, see hasten.script")

    def begin(self, command: str) -> None:
        """Called when a "search" or another "command" with this task begins: a script notes its files then."""

    def end(self) -> None:
        """Called when a search has ended."""

    def load(self) -> Task:
        """The task, under the name of the reference; ConfigurationError if its file or function fails or gives none."""
        if isinstance(self.obj, Task):
            return self.obj
        function = self.function()
        with _with_same_rng():
            return _call(function, self.name).named(self.name)

    def function(self) -> Callable[[], Task]:
        """The function that returns the task; ConfigurationError for a Task object, or if there is no such function."""
        if isinstance(self.obj, Task):
            raise ConfigurationError(f"the task {self.name} was given as an object; give it as file.py:function")
        with _with_same_rng():
            return self.obj or (_function_in_file(self.file, self.name) if self.file else _workload(self.name))

    def to_json(self) -> str:
        """One line for another process of this command; an object is pickled, ConfigurationError if it cannot be."""
        if self.obj is None:
            return json.dumps({"name": self.name, "file": self.file})
        entries: list[Any] = sys.path
        path = [entry for entry in entries if isinstance(entry, str)]  # Python ignores other entries
        return json.dumps({"name": self.name, "pickle": _pickle(self.obj), "path": path})

    @staticmethod
    def from_json(text: str) -> TaskRef:
        """The inverse of ``to_json``. It may unpickle and so execute code: only for text that this command wrote."""
        fields = json.loads(text)
        if "pickle" not in fields:
            return TaskRef(fields["name"], fields["file"])
        cloudpickle: Any = importlib.import_module("cloudpickle")  # it has no types

        sys.path.extend(directory for directory in fields["path"] if directory not in sys.path)  # to find its modules
        return TaskRef(fields["name"], obj=cloudpickle.loads(base64.b64decode(fields["pickle"])))

    @property
    def command(self) -> str:
        """The user's own command, if the task was given as one; else ""."""
        return ""

    def check_methods(self, methods: Sequence[Method]) -> None:
        """Raises ConfigurationError if a method needs a hook that cannot be offered; the engine offers all."""

    def check_recipe(self, recipe: Recipe) -> None:
        """Raises ConfigurationError if a recipe cannot run on this task, or if its methods exclude each other."""
        methods = make_methods(recipe)
        self.check_methods(methods)
        check_conflicts(sort_methods(methods))

    def refusal(self, recipe: Recipe) -> str:
        """The reason of ``check_recipe``; "" if the recipe can run."""
        try:
            self.check_recipe(recipe)
        except ConfigurationError as error:
            return str(error)
        return ""

    def start_worker(
        self, service: str, processes: int, timeout: float | None, deadline: float | None, **arguments: Any
    ) -> Any:
        """An object that answers the calls of a service (``module:Class``); None, as here: the engine answers them."""
        return None

    def sites(self) -> dict[str, Any] | None:
        """Where the loaders, optimizers and models are that the engine does not build; None for a task."""
        return None

    def device(self, asked: str) -> str:
        """The device of a run that was asked to be on ``asked``; a script chooses its own."""
        return asked

    def write_sites(self, directory: Path, recipe: Recipe) -> None:
        """Writes ``sites`` into ``directory``, beside its ``recipe``; nothing for a task, which has none."""

    def fingerprint(self) -> str:
        """Name and hash of the task's code: its file and modules imported from its directory, or the pickled object."""
        if self.obj is not None:
            sources = [_content(self.obj)]
        else:
            file = Path(self.file or inspect.getsourcefile(_workload(self.name)) or "")
            sources = [path.read_bytes() for path in [file, *(_imported_from(file.parent) if self.file else ())]]
        return f"{self.name}-{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}"

    @property
    def argument(self) -> str:
        """The task as the command line takes it in the current directory."""
        if self.file is None or self.command:
            return self.name
        return f"{os.path.relpath(self.file)}:{self.name.rpartition(':')[2]}"

    def __str__(self) -> str:
        return self.name


def load_task(task: TaskLike) -> Task:
    """The Task that a name, ``file.py:function``, function or Task denotes; see ``TaskRef.of`` for errors."""
    return TaskRef.of(task).load()


def workload_names() -> list[str]:
    """The names of all installed workloads: hasten's, then those of entry points."""
    package = importlib.import_module("hasten.workloads")
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
    return sorted(names) + sorted(point.name for point in entry_points(group=ENTRY_POINTS))


def _function_in_file(file: str, name: str) -> Callable[[], Task]:
    path, function_name = Path(file), name.rpartition(":")[2]
    module = import_file(path)
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        others = _functions_in(module)
        hint = suggest(function_name, others) if others else ", and no other function without arguments either"
        raise ConfigurationError(f"{path.name} has no function {function_name!r}{hint}")
    return cast(Callable[[], Task], function)


def _parse(text: str) -> TaskRef:
    location, colon, function = text.rpartition(":")
    if colon and location.endswith(".py"):
        path = Path(location).expanduser().resolve()
        if not path.is_file():
            raise ConfigurationError(f"{path} is no regular file" if path.exists() else f"there is no file {path}")
        if not function.isidentifier():
            raise ConfigurationError(f"cannot read {text!r}; write {path.name}:function{_list_functions(path)}")
        return TaskRef(f"{path.name}:{function}", str(path))
    if text.endswith(".py"):
        path = Path(text).expanduser().resolve()
        raise ConfigurationError(f"name the function of {path.name} that returns the task{_list_functions(path)}")
    if text and text not in workload_names() and Path(location or text).is_dir():
        raise ConfigurationError(f"{location or text} is a directory; name a file and its function: file.py:function")
    if text not in workload_names():
        hint = f"{suggest(text, workload_names())}; a task of your own is path/to/file.py:function"
        raise ConfigurationError(f"no workload is called {text!r}{hint}")
    return TaskRef(text)


@contextmanager
def _with_same_rng() -> Generator[None]:
    """Context manager: seeds all generators alike, so that data drawn by a task's file are the same in all runs."""
    from hasten.utils.rng import preserve_rng_state, set_seeds  # needs torch, which a reference does not

    with preserve_rng_state():
        set_seeds(0)
        yield


def _workload(name: str) -> Callable[[], Task]:
    if point := {point.name: point for point in entry_points(group=ENTRY_POINTS)}.get(name):
        try:
            return point.load()
        except Exception as error:
            raise ConfigurationError(f"the workload {name} cannot be imported: {format_error(error)}") from None
    return getattr(importlib.import_module(f"hasten.workloads.{name}"), name)


def _imported_from(directory: Path) -> list[Path]:
    """Files of the imported modules below a user's directory, except those of a virtual environment in it."""
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    sources = (path for path in files if path.suffix == ".py" and "site-packages" not in path.parts)
    return sorted(path for path in sources if path.is_relative_to(directory))


def hash_of_loaded_code() -> str:
    """A hash of the imported modules that are neither installed, nor Python's, nor hasten's.

    These are the task's, wherever they lie, in a process that has imported nothing else.
    """
    not_the_users = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1])
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    sources = (path for path in files if path.suffix == ".py" and not str(path).startswith(not_the_users))
    own = sorted(path for path in sources if not {"site-packages", "dist-packages"} & {*path.parts} and path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest()[:16]


def _call(function: Callable[[], Any], name: str) -> Task:
    try:
        task = function()
    except (ConfigurationError, RunError):
        raise
    except (Exception, SystemExit) as error:
        from hasten._torch_compat import is_out_of_memory

        code = getattr(inspect.unwrap(function), "__code__", None)
        line = line_in(error, code.co_filename) if code else ""
        kind = MemoryExhaustedError if is_out_of_memory(error) else ConfigurationError
        raise kind(f"{name} raised {format_error(error)}{line}") from None
    if not isinstance(task, Task):
        kind = "nothing" if task is None else type(task).__name__
        raise ConfigurationError(
            f"{name} must return a hasten.Task; it returned {kind}; for a function that trains, see hasten.script"
        )
    return task


def _list_functions(path: Path) -> str:
    """``: mine.py:task or mine.py:other``, the functions of a file that may return the task."""
    names = _functions_in(import_file(path))
    if not names:
        return "; it has no function without arguments"
    more = f" or another of its {len(names)} functions" if len(names) > MAX_SUGGESTIONS else ""
    return f": {' or '.join(f'{path.name}:{name}' for name in names[:MAX_SUGGESTIONS])}{more}"


def _functions_in(module: ModuleType) -> list[str]:
    """The public functions that a module defines itself and that can be called without arguments."""
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    return [
        name
        for name, function in functions.items()
        if function.__module__ == module.__name__ and not name.startswith("_") and not _has_required_arguments(function)
    ]


def _has_required_arguments(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _content(obj: Any) -> bytes:
    """A pickle of an object for its fingerprint, the same in every process, unlike that of ``_pickle``: without the
    addresses of tensors, the random numbers of classes and the order of sets.
    """
    import torch  # a reference does not need it

    cloudpickle: Any = importlib.import_module("cloudpickle")
    drawn = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID  # a number for each class of a main script or notebook

    class ContentPickler(cloudpickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if type(value) is str:
                return "class" if value in drawn else None
            if type(value) in (set, frozenset):
                return ["set", *sorted(map(repr, value))]
            is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
            if not is_plain or value.is_meta or value.is_quantized:
                return None
            numbers = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            kind = (type(value).__name__, value.dtype, value.device, value.requires_grad, value.stride())
            return [repr(kind), *value.shape, hashlib.sha256(numbers.numpy().data).hexdigest()]

    file = io.BytesIO()
    ContentPickler(file).dump(obj)
    return file.getvalue()


def _pickle(obj: Any) -> str:
    cloudpickle: Any = importlib.import_module("cloudpickle")

    for name in [name for name in sys.modules if name.startswith(FILE_MODULE_PREFIX)]:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        return base64.b64encode(cloudpickle.dumps(obj)).decode()
    except Exception as error:
        reason = f"{format_error(error)}; put it into a file and name it path/to/file.py:function"
        raise ConfigurationError(f"the task cannot be passed to another process: {reason}") from None
