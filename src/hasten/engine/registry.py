"""Finds methods: the files of ``hasten/methods``, installed entry points, and classes named by file.

There is no registry. A method's name is its file's name; a method from outside is named by where it
is: ``./mine.py:Faster`` or ``package.module:Faster``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import typing
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import hasten.methods
from hasten.core.card import Card
from hasten.core.errors import ConfigurationError, format_error, suggest
from hasten.core.method import HOOKS, Method, validate_options
from hasten.core.recipe import Recipe

ENTRY_POINTS = "hasten.methods"
DISTRIBUTED = "distributed"  # the fact that methods rely on which change what these are to each other
DATA = {bool, int, float, str, type(None)}  # what a setting may be


def method_names() -> list[str]:
    """Every installed method: ours, then those that other packages bring."""
    return sorted(_own_modules()) + sorted(_installed())


@cache
def _own_modules() -> dict[str, str]:
    """Method name -> dotted module, of every file in ``hasten/methods`` and its folders."""
    found = pkgutil.walk_packages(hasten.methods.__path__, "hasten.methods.")
    paths = [module.name for module in found if not module.ispkg]
    return {name: path for path in paths if not (name := path.rpartition(".")[2]).startswith("_")}


def method_class(name: str) -> type[Method]:
    """The class behind a name.

    Raises:
        Refusal: nothing of that name, or what is there is no method.
    """
    if ":" in name:
        return _from_outside(name)
    if point := _installed().get(name):
        return _checked(name, _imported(name, point.load))
    if name not in method_names():
        raise ConfigurationError(f"no method is called {name!r}{suggest(name, method_names())}")
    return _only_method_in(importlib.import_module(_own_modules()[name]))


def cards_that_state(field: str) -> dict[str, Card]:
    """The cards of our methods that set a field, by name. Imports only the modules whose source names the field."""
    paths = {path.stem: path for folder in hasten.methods.__path__ for path in sorted(Path(folder).rglob("*.py"))}
    names = [
        name
        for name, path in paths.items()
        if not name.startswith("_") and f"{field}=" in path.read_text(encoding="utf-8")
    ]
    return {name: method_class(name).card for name in names}


def default_methods(fact: str) -> list[str]:
    """The methods that a run gets by itself under a fact (key of FACTS)."""
    return [name for name, card in cards_that_state("default_for").items() if fact in card.default_for]


def remedies(problem: str) -> str:
    """The methods that may help against a problem (key of REMEDIES), as they are typed: "a, b or c"."""
    cards = cards_that_state("remedy_for")
    *others, last = (
        str(Recipe({name: card.remedy_for[problem]})) for name, card in cards.items() if problem in card.remedy_for
    )
    return f"{', '.join(others)} or {last}" if others else last


@cache
def _installed() -> dict:
    """The methods that other packages bring; asked once, since reading every package's metadata takes 40 ms."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def make_method(name: str, settings: dict | None = None) -> Method:
    """A method with its settings checked against its fields: unknown keys and wrong types are refused."""
    cls = method_class(name)
    fields = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    types = _imported(name, lambda: typing.get_type_hints(cls)) if fields else {}
    checked = {}
    for key, value in (settings or {}).items():
        if key not in fields:
            hint = suggest(key, fields) if fields else " (it has no settings)"
            raise ConfigurationError(f"{name} has no setting {key!r}{hint}")
        checked[key] = _fitting(f"{name}:{key}", value, types[key])
    try:
        method = cls(**checked)
        if fields:
            validate_options(method)  # a __post_init__ of its own may have replaced ours
        return method
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from None
    except TypeError as error:  # a setting without a default was not given
        raise ConfigurationError(f"{name} cannot be made: {format_error(error)}") from None


def make_methods(recipe: Recipe) -> list[Method]:
    return [make_method(name, settings) for name, settings in recipe.methods.items()]


def drop_distributed(recipe: Recipe) -> Recipe:
    """What one process can take of a recipe for several."""
    return recipe.drop(*(name for name in recipe.methods if DISTRIBUTED in method_class(name).card.applies_to))


def options_of(cls: type[Method]) -> dict[str, object]:
    """A method's settings with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def import_file(path: Path):
    """A user's Python file as a module; its own error, shortened, if it does not import."""
    path = path.resolve()
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    name = f"hasten_file_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    module = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location(name, path))
    sys.modules[name] = module  # so that its classes can be found again by loader workers
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigurationError(f"{path.name} does not import: {format_error(error)}{line_in(error, path)}") from None
    finally:
        sys.path.remove(str(path.parent))
    return module


def _from_outside(name: str) -> type[Method]:
    where, _, class_name = name.rpartition(":")
    if where.endswith(".py"):
        module = import_file(Path(where))
    else:
        module = _imported(name, lambda: importlib.import_module(where))
    found = getattr(module, class_name, None)
    if found is None:
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Method) and value is not Method
        ]
        raise ConfigurationError(
            f"{where} has no class {class_name!r}{suggest(class_name, classes) if classes else ' and no method at all'}"
        )
    return _checked(name, found)


def _imported(name: str, load: Callable):
    """What ``load`` finds; somebody else's code may raise anything while it is imported."""
    try:
        return load()
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"the method {name} cannot be imported: {format_error(error)}") from None


def _checked(name: str, cls) -> type[Method]:
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise ConfigurationError(f"{name} is not a method: it must be a class that derives from hasten.Method")
    if not isinstance(getattr(cls, "card", None), Card):
        raise ConfigurationError(f"{name} has no card; give it `card = Card(summary=..., exactness=Exactness....)`")
    own = {key for klass in cls.__mro__[:-1] if klass is not Method for key in vars(klass)}
    for word in sorted(own - set(HOOKS)):
        if not word.startswith("_") and callable(getattr(cls, word)) and get_close_matches(word, HOOKS, cutoff=0.85):
            raise ConfigurationError(
                f"{name}.{word} is no hook{suggest(word, HOOKS)}; a helper of a like name begins with _"
            )
    cls.name = name
    return cls


def _only_method_in(module) -> type[Method]:
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
    )


def _fitting(what: str, value, kind):
    """``value`` as a setting of type ``kind``; an int passes for a float, nothing else changes type."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is typing.Literal:
        if not any(type(value) is type(known) and value == known for known in kinds):
            raise ConfigurationError(f"{what} must be one of {', '.join(map(str, kinds))}, not {value!r}")
        return value
    if not DATA.issuperset(kinds):
        raise ConfigurationError(f"{what} is a {kind}; settings are numbers, texts, true or false")
    if isinstance(value, bool) and bool not in kinds:
        raise ConfigurationError(f"{what} must be {_names(kinds)}, not {value!r}")
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    if not isinstance(value, tuple(kinds)):
        raise ConfigurationError(f"{what} must be {_names(kinds)}, not {value!r}")
    return value


def _names(kinds) -> str:
    return " or ".join(
        {
            "int": "a whole number",
            "float": "a number",
            "str": "a text",
            "bool": "true or false",
            "NoneType": "absent",
        }.get(kind.__name__, kind.__name__)
        for kind in kinds
    )


def line_in(error: BaseException, path: Path) -> str:
    """`` (line 12)``: where in the user's file it happened."""
    line, traceback = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None, error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f" (line {line})" if line else ""
