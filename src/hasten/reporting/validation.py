"""Reads results and validates them against ``result_schema``.

A file is not trusted: ``validate`` fills in missing keys (None, "", [], {}), drops unknown keys and refuses values of
the wrong type, so that code which shows a result need not check again. Control characters are removed from texts,
because a method's name must not move the cursor of a terminal. Texts are also shortened, commands and paths are not.
"""

import json
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from hasten.core.errors import ConfigurationError
from hasten.reporting import result_schema as schemas
from hasten.reporting.result_schema import Amount, Boolean, Command, Fact, Interval, Number, Option, Text

SCHEMAS = {
    "tune": schemas.TuneResult,
    "compare": schemas.CompareResult,
    "diagnose": schemas.DiagnoseResult,
    "train": schemas.TrainResult,
    "quantize": schemas.QuantizeResult,
}
MAX_FILE_BYTES = 32 << 20
MAX_NUMBER = 1e18  # measured values are smaller than this and larger than its inverse
MAX_TEXT = 400  # characters


def read_result(directory: str | Path) -> dict[str, Any]:
    """Read and validate ``result.json`` of a run directory. ConfigurationError if there is no such directory, no result
    in it, an incomplete or foreign file, or a value of the wrong type.
    """
    directory = Path(directory)
    if not directory.is_dir():
        advice = "give the run directory of `hasten tune` or `hasten train`"
        raise ConfigurationError(f"there is no directory {directory}; {advice}")
    path = directory / "result.json"
    if not path.is_file():
        raise ConfigurationError(
            f"{directory} contains no result.json: the run has not finished, or it is no run directory"
        )
    return validate(read_json(path), str(path))


def validate(result: Any, where: str = "the result") -> dict[str, Any]:
    """The result of any command, with every key of its schema and no other key. ConfigurationError if it is no result
    or a value has the wrong type; the message begins with ``where`` and names the key.
    """
    if not isinstance(result, dict):
        raise ConfigurationError(f"{where} is no result of hasten: it must be an object with a verdict or evaluations")
    kind = result.get("kind") or _guess_kind(result)
    if not isinstance(kind, str) or kind not in SCHEMAS:
        raise ConfigurationError(
            f"{where} is of an unknown kind; it must come from tune, train, compare, diagnose or quantize"
        )
    return coerce(result, SCHEMAS[kind], where) | {"kind": kind}


def read_json(path: Path) -> Any:
    """The content of a JSON file; ConfigurationError if it cannot be read, exceeds MAX_FILE_BYTES, or is incomplete."""
    try:
        size = path.stat().st_size
        value = json.loads(path.read_text(encoding="utf-8")) if size <= MAX_FILE_BYTES else None
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigurationError(f"{path} is not complete JSON; run the command that wrote it again") from None
    if size > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path} is larger than {MAX_FILE_BYTES} bytes, so it is no result of hasten")
    return value


def coerce(value: Any, schema: Any, where: str) -> Any:
    """Convert ``value`` to a schema: a TypedDict, ``Sequence[...]``, ``Mapping[str, ...]`` or one of the scalar types
    above. ConfigurationError for a value of the wrong type; the message begins with ``where`` and names the key.
    """
    if get_origin(schema) in (Union, UnionType):
        schema = get_args(schema)[0]
    if get_origin(schema) is Annotated:
        return _coerce_scalar(value, schema, where)
    expected: Any = list if get_origin(schema) is Sequence else dict
    if value is None:
        value = expected()
    if schema is Interval and isinstance(value, (int, float)):
        value = {"median": value}
    if isinstance(value, tuple):  # of a result that was not read from a file
        value = list(value)
    if not isinstance(value, expected):
        raise ConfigurationError(f"{where} must be {_type_name(expected())}, not {_type_name(value)}")
    if is_typeddict(schema):
        return {key: coerce(value.get(key), inner, f"{where}: {key}") for key, inner in _keys(schema).items()}
    inner = get_args(schema)[-1]
    if expected is list:
        return [coerce(item, inner, f"{where}[{index}]") for index, item in enumerate(value)]
    return {_clean(key): coerce(item, inner, f"{where}: {_clean(key)}") for key, item in value.items()}


@cache
def _keys(schema: type) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _coerce_scalar(value: Any, schema: Any, where: str) -> float | bool | str | None:
    if value is None:
        return "" if schema in (Text, Command) else None
    if isinstance(value, str) and schema in (Text, Option, Fact):
        return _clean(value)
    if isinstance(value, str) and schema == Command:
        return "".join(letter if _is_shown(letter) else " " for letter in value)
    if isinstance(value, bool) and schema in (Boolean, Option, Fact):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and schema in (Number, Amount, Option, Fact):
        if schema == Amount and value < 0:
            raise ConfigurationError(f"{where} must be {schema.__metadata__[0]}, not a negative number")
        return _limit(value)
    if schema == Fact:
        return None
    raise ConfigurationError(f"{where} must be {schema.__metadata__[0]}, not {_type_name(value)}")


def _limit(value: float) -> float | None:
    """The value; None for NaN and magnitudes above MAX_NUMBER; 0 for magnitudes below 1 / MAX_NUMBER."""
    if not abs(value) <= MAX_NUMBER:
        return None
    return value if abs(value) >= 1 / MAX_NUMBER else 0


def _clean(text: str) -> str:
    """The text as one line of printable characters, cut to MAX_TEXT."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _is_shown(letter: str) -> bool:
    """Whether a character of a command stays: it is printable, or white space that an argument may hold."""
    return letter.isprintable() or letter in "\t\n" or unicodedata.category(letter) == "Zs"


def _guess_kind(result: dict[str, Any]) -> str | None:
    if "trials" in result:
        return "tune"
    return "train" if "evaluations" in result and "verdict" not in result else None


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
