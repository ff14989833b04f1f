"""Lists the acceleration methods, or describes one: its card, options, position in the order, conflicts and records."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

import hasten
from hasten.cli.output import CommandResult, page
from hasten.core.errors import ConfigurationError
from hasten.core.progress import ProgressCallback

if TYPE_CHECKING:
    from hasten.core.card import Card
    from hasten.core.method import Method

RECORDS = Path(hasten.__file__).with_name("records.jsonl")  # written by benchmarks/make_index.py
HELP = "list the methods, or show one method's card, options and records"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten methods`` to its parser."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a method, installed or ./file.py:Class")


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """List all methods, or describe the one that is named."""
    from hasten.engine.devices import pick_device

    device = pick_device(options.device).partition(":")[0]  # once: it may warn
    if options.name is None:
        table = page("terminal_methods", "methods_table")
        return CommandResult({"methods": _catalogue(device)}, lambda result: table(result["methods"]))
    return CommandResult(_description(options.name, device), page("terminal_methods", "method_page"))


def _catalogue(device: str) -> list[dict]:
    """One row per method. ``not_here`` is the reason why it cannot work on this machine, or None."""
    from hasten.engine.registry import method_class, method_names

    cards = {name: method_class(name).card for name in method_names()}
    return [
        {
            "name": name,
            "summary": card.summary,
            "exactness": card.exactness.value,
            "gain": card.gain,
            "not_here": _not_here(card, device),
        }
        for name, card in cards.items()
    ]


def _description(name: str, device: str) -> dict:
    """Card, options, order, conflicts and records of one method, as plain data for ``method_page``."""
    from hasten.core.method import hooks_of
    from hasten.engine.registry import method_class

    cls = method_class(name)
    card = {field.name: getattr(cls.card, field.name) for field in dataclasses.fields(cls.card)}
    return {
        "name": name,
        **card,
        "exactness": cls.card.exactness.value,
        "order": cls.card.order.name.lower(),
        "text": inspect.getdoc(cls) or "",
        "hooks": hooks_of(cls),
        "options": _options(cls),
        "not_here": _not_here(cls.card, device),
        **_position(cls),
        "conflicts": _conflicts(cls),
        "records": _records(name),
    }


def _options(cls: type[Method]) -> list[dict]:
    if not dataclasses.is_dataclass(cls):
        return []
    types = typing.get_type_hints(cls)
    return [
        {
            "name": field.name,
            "type": _type_name(types[field.name]),
            "default": None if field.default is dataclasses.MISSING else field.default,
            "range": field.metadata.get("range", ""),
        }
        for field in dataclasses.fields(cls)
    ]


def _type_name(annotation: Any) -> str:
    """``int`` or ``str or float``; without None, which cannot be written in a recipe."""
    is_union = typing.get_origin(annotation) in (typing.Union, UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return " or ".join(getattr(member, "__name__", str(member)) for member in members if member is not type(None))


def _other_methods(cls: type[Method]) -> list[type[Method]]:
    from hasten.engine.registry import method_class, method_names

    return [method_class(name) for name in method_names() if name != cls.name]


def _position(cls: type[Method]) -> dict:
    """``wraps`` and ``wrapped_by``: names of the methods inside and outside of this one in one of its hooks."""
    from hasten.core.method import hooks_of
    from hasten.engine.composition import sort_methods

    others = _other_methods(cls)
    names = [method.name for method in sort_methods([cls, *others])]  # pyright: ignore[reportArgumentType]  # reads cards
    related = {other.name for other in others if set(hooks_of(cls)) & set(hooks_of(other))}
    index = names.index(cls.name)
    return {
        "wraps": [name for name in names[:index] if name in related],
        "wrapped_by": [name for name in names[index + 1 :] if name in related],
    }


def _conflicts(cls: type[Method]) -> list[dict]:
    """``[{"method", "why"}]`` of methods that cannot be combined with this one: from the cards, as in a run."""
    from hasten.engine.composition import check_conflicts

    conflicts = []
    for other in _other_methods(cls):
        try:
            check_conflicts([cls, other])  # pyright: ignore[reportArgumentType]  # reads cards
        except ConfigurationError as error:
            conflicts.append({"method": other.name, "why": str(error)})
    return conflicts


def _records(name: str) -> list[dict]:
    """The ``task`` and the fields of every published trial whose recipe contains the method, successful or not."""
    searches = map(json.loads, RECORDS.read_text(encoding="utf-8").splitlines())
    return [
        {"task": search["workload"], **trial}
        for search in searches
        for trial in search["trials"]
        if name in [member.partition(":")[0] for member in trial["what"].split(" + ")]  # "num_threads:count=2 + ema"
    ]


def _not_here(card: Card, device: str) -> str | None:
    """Why the method cannot work on this machine, or None. Requirements on the task are checked by `diagnose`."""
    for fact, reason in (("cuda", "for an NVIDIA GPU"), ("cpu", "for the CPU")):
        if fact in card.applies_to and fact != device:
            return reason
    return None
