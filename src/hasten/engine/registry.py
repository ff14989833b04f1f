"""Finds methods by name and creates them.

A method's name is the name of its file in ``hasten/methods`` or ``hasten/methods/distributed``, or that of an
installed entry point. A class elsewhere is named by its location: ``./mine.py:Faster`` or ``package.module:Faster``.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import re
import sys
import typing
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import hasten.methods
from hasten.core.card import Card
from hasten.core.errors import ConfigurationError, format_error, suggest
from hasten.core.method import HOOKS, Method, validate_options
from hasten.core.recipe import Recipe

ENTRY_POINTS = "hasten.methods"
METHODS_DIRECTORY = Path(hasten.methods.__path__[0])
DISTRIBUTED = "distributed"  # the fact (key of FACTS) under which methods for several processes apply
OPTION_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "absent"}
_imported: dict[str, bytes] = {}  # module -> content of its file: a notebook may edit it and train again
FILE_MODULE_PREFIX = "hasten_file_"  # of modules that import_file creates; other processes cannot import them by name


def method_names() -> list[str]:
    """The names of all installed methods: hasten's, then those of entry points."""
    return sorted(_method_files()) + sorted(_installed())


def comes_with_hasten(name: str) -> bool:
    """Whether a method is one of hasten's own, rather than of the user's file or of another package."""
    return name in _method_files() and name not in _installed()


def method_class(name: str) -> type[Method]:
    """The class of a method; ConfigurationError if there is none of that name, or it cannot be imported."""
    if ":" in name:
        return _class_at(name)
    if point := _installed().get(name):
        return _checked(name, _import(name, point.load))
    if name not in _method_files():
        advice = suggest(name, method_names())
        raise ConfigurationError(f"no method is called {name!r}{advice}; `hasten methods` lists all")
    directories = _method_files()[name].relative_to(METHODS_DIRECTORY).parent.parts
    module = importlib.import_module(".".join(("hasten.methods", *directories, name)))
    return next(cls for cls in _method_classes(module) if cls.__module__ == module.__name__)


@cache
def _method_files() -> dict[str, Path]:
    """Method name -> its file, for every file in ``hasten/methods`` and its directories."""
    return {path.stem: path for path in sorted(METHODS_DIRECTORY.rglob("*.py")) if not path.name.startswith("_")}


@cache
def _installed() -> dict[str, EntryPoint]:
    """Method name -> entry point of another package; cached, since reading all packages' metadata takes 40 ms."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def cards_that_state(field: str) -> dict[str, Card]:
    """Method name -> card, of hasten's methods whose card sets ``field``. Imports only files that contain it."""
    files = _method_files().items()
    return {name: method_class(name).card for name, path in files if f"{field}=" in path.read_text(encoding="utf-8")}


def default_methods(fact: str) -> list[str]:
    """The methods that the engine adds to a run under a fact (key of FACTS)."""
    return [name for name, card in cards_that_state("default_for").items() if fact in card.default_for]


def remedies(problem: str) -> str:
    """Methods against a problem (key of REMEDIES), as typed: "a, b or c"; without an NVIDIA GPU, none for GPUs."""
    import torch  # the command line reads names of methods without it

    cards = {name: card for name, card in cards_that_state("remedy_for").items() if problem in card.remedy_for}
    possible = [name for name, card in cards.items() if torch.cuda.is_available() or "cuda" not in card.applies_to]
    recipes = [str(Recipe({name: cards[name].remedy_for[problem]})) for name in possible]
    return " or ".join([", ".join(recipes[:-1]), recipes[-1]] if recipes[1:] else recipes)


def make_method(name: str, options: dict[str, Any] | None = None) -> Method:
    """Creates a method; ConfigurationError if it is unknown, or an option is unknown or has a wrong type or value."""
    cls = method_class(name)
    if takes_any_option(cls):
        return cls(**(options or {}))
    fields = options_of(cls)
    types: dict[str, Any] = _import(name, lambda: typing.get_type_hints(cls)) if fields else {}
    checked: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key not in fields:
            hint = suggest(key, fields) if fields else " (it has no options)"
            raise ConfigurationError(f"{name} has no option {key!r}{hint}")
        checked[key] = _check_option(f"{name}:{key}", value, types[key])
    try:
        method = cls(**checked)
        if fields:
            validate_options(method)  # a __post_init__ of the class may have replaced that of Method
        return method
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from None
    except TypeError as error:  # an option without a default is missing
        raise ConfigurationError(f"{name} cannot be created: {format_error(error)}") from None


def make_methods(recipe: Recipe) -> list[Method]:
    """Creates the Method objects of a recipe, with checked options; errors as in ``make_method``."""
    return [make_method(name, options) for name, options in recipe.methods.items()]


def drop_distributed(recipe: Recipe) -> Recipe:
    """The recipe without the methods that apply to several processes only."""
    return recipe.drop(*(name for name in recipe.methods if DISTRIBUTED in method_class(name).card.applies_to))


def options_of(cls: type[Method]) -> dict[str, object]:
    """Option name -> default value of a method class."""
    return {field.name: field.default for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def takes_any_option(cls: type[Method]) -> bool:
    """Whether the options of a method are named elsewhere, such as in the user's script; each is set by itself."""
    return getattr(cls, "takes_any_option", False)


def import_file(path: Path) -> ModuleType:
    """Imports a user's Python file as a module, once per process, and again if it has changed.

    ConfigurationError if it is missing or raises.

    Its directory stays on the path, at the end: functions of the file may import other files beside it.
    """
    path = path.resolve()
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    stem, digest = re.sub(r"[^0-9a-zA-Z]", "_", path.stem), hashlib.sha1(str(path).encode()).hexdigest()[:8]
    name = f"{FILE_MODULE_PREFIX}{stem}_{digest}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path.name} does not import: {format_error(error)}") from None
    if name in sys.modules and _imported.get(name, content) == content:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name], _imported[name] = module, content  # loader workers look its classes up here
    directory = str(path.parent)
    sys.path.insert(0, directory)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigurationError(f"{path.name} does not import: {format_error(error)}{line_in(error, path)}") from None
    finally:
        with suppress(ValueError):  # the file may have changed the path
            sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)
    return module


def line_in(error: BaseException, path: str | Path) -> str:
    """`` (line 12)`` of the user's file in which the error was raised; empty elsewhere, or for a SyntaxError."""
    line, traceback = None, error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f" (line {line})" if line else ""


def _class_at(name: str) -> type[Method]:
    """The class at ``path/to/file.py:Class`` or ``package.module:Class``; ConfigurationError if there is none."""
    location, _, class_name = name.rpartition(":")
    is_file = location.endswith(".py")
    module = import_file(Path(location)) if is_file else _import(name, lambda: importlib.import_module(location))
    cls = getattr(module, class_name, None)
    if cls is None:
        classes = [method.__name__ for method in _method_classes(module)]
        hint = suggest(class_name, classes) if classes else " and no method at all"
        raise ConfigurationError(f"{location} has no class {class_name!r}{hint}")
    return _checked(name, cls)


def _import(name: str, load: Callable[[], Any]) -> Any:
    """``load()``, which imports the method ``name``; any exception becomes a ``ConfigurationError``."""
    try:
        return load()
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"the method {name} cannot be imported: {format_error(error)}") from None


def _method_classes(module: ModuleType) -> list[type[Method]]:
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return [cls for cls in classes if issubclass(cls, Method) and cls is not Method]


def _checked(name: str, cls: Any) -> type[Method]:
    """A Method class, whose ``name`` is set; ConfigurationError if it is none, has no card or misspells a hook."""
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise ConfigurationError(f"{name} is not a method: it must be a class that derives from hasten.Method")
    if not isinstance(getattr(cls, "card", None), Card):
        raise ConfigurationError(f"{name} has no card; give it `card = Card(summary=..., exactness=Exactness....)`")
    attributes = {key for base in cls.__mro__[:-1] if base is not Method for key in vars(base)}
    for key in sorted(attributes - set(HOOKS)):
        if not key.startswith("_") and callable(getattr(cls, key)) and get_close_matches(key, HOOKS, cutoff=0.85):
            advice = "the name of a helper that resembles a hook must begin with _"
            raise ConfigurationError(f"{name}.{key} is no hook{suggest(key, HOOKS)}; {advice}")
    cls.name = name
    return cls


def _check_option(option: str, value: Any, kind: Any) -> Any:
    """``value``, which must be of the type ``kind``, else ConfigurationError; an int becomes a float if floats are."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is typing.Literal:
        if not any(type(value) is type(known) and value == known for known in kinds):
            raise ConfigurationError(f"{option} must be one of {', '.join(map(str, kinds))}, not {value!r}")
        return value
    if not OPTION_TYPES.keys() >= set(kinds):
        raise ConfigurationError(f"{option} is a {kind}; options are numbers, texts, true or false")
    if type(value) is int and int not in kinds and float in kinds:
        return float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(OPTION_TYPES[kind] for kind in kinds)
        raise ConfigurationError(f"{option} must be {names}, not {value!r}")
    return value
