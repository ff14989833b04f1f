"""A recipe: a set of methods with their options. On disk it is TOML; the empty recipe is the user's own training.

::

    [methods.bfloat16]

    [methods.batch_size]
    factor = 4

    [methods."./mine.py:Faster"]      # a method outside the package, by file and class
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hasten.core.errors import ConfigurationError

_METHOD = re.compile(r"^(?P<name>(?:.+\.py:\w+)|(?:[\w.]+:[A-Z]\w*)|[\w-]+)(?::(?P<options>.*))?$", re.DOTALL)
_JOIN, _JOIN_OF_FILES = r"\s\+\s|\+(?=[a-z])", r"\s\+\s"  # a + without spaces may be part of a file's path
MAX_FILE_BYTES = 1 << 20  # a recipe is one page


@dataclass(frozen=True)
class Recipe:
    """Methods by name, each with its options. Their order has no meaning."""

    methods: dict[str, dict[str, Any]] = field(default_factory=dict)

    def with_method(self, name: str, **options: Any) -> Recipe:
        """A copy with one more method; ``options`` replace all options of a method that the recipe has already."""
        return Recipe({**self.methods, name: options})

    def drop(self, *names: str) -> Recipe:
        """A copy of this recipe without the named methods."""
        return Recipe({name: options for name, options in self.methods.items() if name not in names})

    def __or__(self, other: Recipe) -> Recipe:
        return Recipe({**self.methods, **other.methods})

    def __bool__(self) -> bool:
        return bool(self.methods)

    def __str__(self) -> str:
        """The recipe as typed after ``--with``; "baseline" if it is empty."""
        return " + ".join(sorted(_as_text(name, options) for name, options in self.methods.items())) or "baseline"

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps({"methods": {name: self.methods[name] for name in sorted(self.methods)}})

    @staticmethod
    def from_toml(text: str, where: str = "the recipe") -> Recipe:
        """The recipe in a TOML document; ``where`` names the document in errors (``ConfigurationError``)."""
        try:
            content: Any = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for an integer of thousands of digits
            raise ConfigurationError(f"{where} is not valid TOML: {error or 'nested too deeply'}") from None
        if unknown := sorted(content.keys() - {"methods"}):
            raise ConfigurationError(f"{where} has an unknown table {unknown[0]!r}; it holds [methods.NAME] tables")
        return Recipe.from_tables(content.get("methods", {}), where)

    @staticmethod
    def from_tables(methods: Any, where: str) -> Recipe:
        """The recipe of ``methods`` (method -> options); ConfigurationError, which names ``where``, if it is none."""
        if not isinstance(methods, dict) or any(type(one) is not dict for one in cast(Any, methods).values()):
            raise ConfigurationError(f"{where}: every method is a table, as in [methods.bfloat16]")
        recipe = Recipe(cast(Any, methods))
        for name, options in recipe.methods.items():
            for key, value in options.items():
                if not isinstance(value, (bool, int, float, str)):
                    kind = type(value).__name__
                    raise ConfigurationError(f"{where}: {name}.{key} must be a number, text or boolean, not a {kind}")
        return recipe

    @staticmethod
    def load(path: str | Path) -> Recipe:
        """The recipe in a TOML file (UTF-8). Raises ``ConfigurationError`` if it cannot be read or is no recipe."""
        path = Path(path)
        try:
            if path.exists() and not path.is_file():
                raise ConfigurationError(f"{path} is no regular file; a recipe is a TOML file")
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ConfigurationError(f"{path} is larger than {MAX_FILE_BYTES} bytes; that is no recipe")
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot read the recipe {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigurationError(f"{path} is not UTF-8 text; a recipe is a TOML file") from None
        return Recipe.from_toml(text, str(path))

    @staticmethod
    def parse(texts: str | Iterable[str]) -> Recipe:
        """A recipe from ``--with`` texts: ``METHOD[:key=value,...]``, several joined by ``+``. In a text with a
        ``./file.py:Class``, only a ``+`` between spaces joins: paths may contain it. ConfigurationError if a text
        cannot be read, or a method or option is given twice.
        """
        recipe = Recipe()
        for text in [texts] if isinstance(texts, str) else texts:
            for part in map(str.strip, re.split(_JOIN_OF_FILES if ".py:" in text else _JOIN, text)):
                name, options = _parse_method(part)
                if name in recipe.methods:
                    remedy = f"give its options once, as in {name}:key=value,key=value"
                    raise ConfigurationError(f"{name} is named twice; {remedy}")
                recipe = recipe.with_method(name, **options)
        return recipe

    @staticmethod
    def coerce(value: Recipe | str | Path | Iterable[str] | None) -> Recipe:
        """A recipe from anything that names one: a Recipe, "baseline", a ``.toml`` file, ``--with`` text, or a dict
        (method -> options). ConfigurationError if it cannot be read, or is a file that names code outside hasten.
        """
        if value is None or value == "baseline" or value == "":
            return Recipe()
        if isinstance(value, (Recipe, Mapping)):
            return value if isinstance(value, Recipe) else Recipe.from_tables({**cast(Any, value)}, "the recipe")
        if not (isinstance(value, Path) or (isinstance(value, str) and value.endswith(".toml"))):
            return Recipe.parse(value)
        recipe = Recipe.load(value)
        if outside := [name for name in recipe.methods if ":" in name]:
            remedy = "if you trust it, pass Recipe.load of the file instead"
            raise ConfigurationError(f"the recipe {value} names code outside hasten, {outside[0]}; {remedy}")
        return recipe


def _parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Parses ``METHOD[:key=value,...]`` to (method, {key: bool, int, float or str}), or raises ConfigurationError."""
    match = _METHOD.match(text)
    if not match:
        raise ConfigurationError(f"cannot read {text!r}; write METHOD:key=value,... or ./file.py:Class; ' + ' joins")
    options: dict[str, Any] = {}
    for pair in match["options"].split(",") if match["options"] else []:
        key, equals, value = map(str.strip, pair.partition("="))
        if not equals or not key:
            raise ConfigurationError(f"cannot read {pair!r} in {text!r}; options are key=value, separated by commas")
        if key in options:
            raise ConfigurationError(f"{key} is given twice in {text!r}; give it once")
        options[key] = _value(value)
    return match["name"], options


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _as_text(name: str, options: dict[str, Any]) -> str:
    texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in options.items()}
    pairs = ",".join(f"{key}={texts[key]}" for key in sorted(texts))
    return f"{name}:{pairs}" if pairs else name
