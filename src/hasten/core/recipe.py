"""A recipe: a set of methods with their settings. On disk it is TOML; the empty one is the user's own training.

::

    [methods.bfloat16]

    [methods.batch_size]
    factor = 4

    [methods."./mine.py:Faster"]      # a method from outside, by file and class
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hasten.core.errors import ConfigurationError

_WITH = re.compile(r"^(?P<name>(?:.+\.py:\w+)|(?:[\w.]+:[A-Z]\w*)|[\w-]+)(?::(?P<settings>.*))?$", re.DOTALL)
_JOINT, _JOINT_OF_FILES = r"\s\+\s|\+(?=[a-z])", r"\s\+\s"
MAX_FILE_BYTES = 1 << 20  # bytes; a recipe is a page, not a library


@dataclass(frozen=True)
class Recipe:
    """Methods by name, each with its settings. Order carries no meaning."""

    methods: dict[str, dict] = field(default_factory=dict)

    def with_method(self, name: str, **settings) -> Recipe:
        """This recipe with one method more, or with other settings for one it has."""
        return Recipe({**self.methods, name: settings})

    def drop(self, *names: str) -> Recipe:
        return Recipe({name: settings for name, settings in self.methods.items() if name not in names})

    def __or__(self, other: Recipe) -> Recipe:
        return Recipe({**self.methods, **other.methods})

    def __bool__(self) -> bool:
        return bool(self.methods)

    def __str__(self) -> str:
        """As one types it after ``--with``; "baseline" for the empty recipe."""
        return " + ".join(sorted(_as_text(name, settings) for name, settings in self.methods.items())) or "baseline"

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps({"methods": {name: self.methods[name] for name in sorted(self.methods)}})

    @staticmethod
    def from_toml(text: str, where: str = "the recipe") -> Recipe:
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
            raise ConfigurationError(f"{where} is not valid TOML: {error or 'nested too deeply'}") from None
        methods = content.get("methods", {})
        if strangers := content.keys() - {"methods"}:
            raise ConfigurationError(
                f"{where} has an unknown table {sorted(strangers)[0]!r}; a recipe holds [methods.NAME] tables only"
            )
        if not isinstance(methods, dict) or not all(isinstance(settings, dict) for settings in methods.values()):
            raise ConfigurationError(f"{where}: every method is a table, as in [methods.bfloat16]")
        for name, settings in methods.items():
            for key, value in settings.items():
                if not isinstance(value, (bool, int, float, str)):
                    raise ConfigurationError(
                        f"{where}: {name}.{key} must be a number, a text or true/false, not a {type(value).__name__}"
                    )
        return Recipe(methods)

    @staticmethod
    def load(path: str | Path) -> Recipe:
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
        """A recipe from ``--with`` texts: ``METHOD[:key=value,...]``, several joined by ``+``.

        A ``+`` without spaces around it may be part of a file's path, so beside ``./file.py:Class`` it does not join.
        """
        if isinstance(texts, str):
            texts = [texts]
        recipe = Recipe()
        for text in (
            part.strip() for whole in texts for part in re.split(_JOINT_OF_FILES if ".py:" in whole else _JOINT, whole)
        ):
            match = _WITH.match(text)
            if not match:
                raise ConfigurationError(
                    f"cannot read {text!r}; write METHOD, METHOD:key=value,key=value or ./file.py:Class"
                )
            if match["name"] in recipe.methods:
                raise ConfigurationError(
                    f"{match['name']} is named twice; give its settings once, as in {match['name']}:key=value,key=value"
                )
            recipe = recipe.with_method(match["name"], **_settings(text, match["settings"]))
        return recipe

    @staticmethod
    def coerce(what: Recipe | str | Path | Iterable[str] | None) -> Recipe:
        """A recipe from anything that names one: a Recipe, "baseline", a ``.toml`` file, or ``--with`` text.

        Raises:
            Refusal: it cannot be read, or is a file that names code of its own: nobody runs that by the way.
        """
        if what is None or what == "baseline" or what == "":
            return Recipe()
        if isinstance(what, Recipe):
            return what
        if isinstance(what, Path) or (isinstance(what, str) and what.endswith(".toml")):
            recipe = Recipe.load(what)
            if outside := [name for name in recipe.methods if ":" in name]:
                raise ConfigurationError(
                    f"{what} names code from outside, {outside[0]}; if you trust it, give Recipe.load of the file instead"
                )
            return recipe
        return Recipe.parse(what)


def _settings(text: str, pairs: str | None) -> dict:
    settings = {}
    for pair in (pairs or "").split(",") if pairs else []:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigurationError(f"cannot read {pair!r} in {text!r}; settings are key=value, separated by commas")
        if key.strip() in settings:
            raise ConfigurationError(f"{key.strip()} is given twice in {text!r}; say it once")
        settings[key.strip()] = _value(value.strip())
    return settings


def _value(text: str):
    """``true``, ``3``, ``0.5`` or a text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _as_text(name: str, settings: dict) -> str:
    pairs = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in sorted(settings.items())
    )
    return f"{name}:{pairs}" if pairs else name
