"""Lists the acceleration methods, or tells all about one: its card, settings, place in the order, conflicts and records."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from pathlib import Path
from types import UnionType

import hasten
from hasten.cli.output import CommandResult
from hasten.core.errors import ConfigurationError

RECORDS = Path(hasten.__file__).with_name("records.jsonl")  # written by benchmarks/make_index.py
HELP = "the catalogue of methods, or one method's card, settings and records"


def arguments(parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="one method, installed or ./file.py:Class")


def run(options, watch) -> CommandResult:
    if options.name is not None:
        method = _described(options.name, options.device)
        return CommandResult(method, lambda: _terminal().method_page(method))
    catalogue = {"methods": _catalogue(options.device)}
    return CommandResult(catalogue, lambda: _terminal().methods_table(catalogue["methods"]))


def _terminal():
    from hasten.reporting import terminal

    return terminal


def _catalogue(device: str | None) -> list[dict]:
    """One row a method: name, summary, exactness, gain, and why it would be no use here (None where it may be)."""
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


def _described(name: str, device: str | None) -> dict:
    """Everything about one method, as plain data."""
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
        "settings": _settings(cls),
        "not_here": _not_here(cls.card, device),
        **_place(cls),
        "conflicts": _conflicts(cls),
        "records": _records(name),
    }


def _settings(cls) -> list[dict]:
    types = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return [
        {
            "name": f.name,
            "type": _typed(types[f.name]),
            "default": _default(f),
            "range": f.metadata.get("range", ""),
        }
        for f in fields
    ]


def _typed(kind) -> str:
    """``int``, ``str or float``: what can be typed, which None cannot."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else (kind,)
    return " or ".join(getattr(each, "__name__", str(each)) for each in kinds if each is not type(None))


def _default(field):
    return None if field.default is dataclasses.MISSING else field.default


def _others(cls) -> list:
    from hasten.engine.registry import method_class, method_names

    return [method_class(name) for name in method_names() if name != cls.name]


def _place(cls) -> dict:
    """Which methods this one wraps, and which wrap it, among those that share a hook with it."""
    from hasten.core.method import hooks_of
    from hasten.engine.composition import sort_methods

    hooks = set(hooks_of(cls))
    names = [each.name for each in sort_methods([cls, *_others(cls)])]
    shares = {other.name for other in _others(cls) if hooks & set(hooks_of(other))}
    here = names.index(cls.name)
    return {
        "wraps": [n for n in names[:here] if n in shares],
        "wrapped_by": [n for n in names[here + 1 :] if n in shares],
    }


def _conflicts(cls) -> list[dict]:
    """The methods that it cannot go together with, and why: computed from the cards, as in a run."""
    from hasten.engine.composition import check_conflicts

    found = []
    for other in _others(cls):
        try:
            check_conflicts([cls, other])
        except ConfigurationError as why:
            found.append({"method": other.name, "why": str(why)})
    return found


def _records(name: str) -> list[dict]:
    """Every trial of the published searches that the method was part of, winners and losers."""
    entries = map(json.loads, RECORDS.read_text(encoding="utf-8").splitlines())
    return [
        {"task": entry["workload"], **trial}
        for entry in entries
        for trial in entry["trials"]
        if name in _members(trial["what"])
    ]


def _members(recipe: str) -> list[str]:
    """The names in ``num_threads:count=2 + ema``."""
    return [member.partition(":")[0] for member in recipe.split(" + ")]


def _not_here(card, device: str | None) -> str | None:
    """Why the method is no use on this machine, or None; what depends on the task only `diagnose` can tell."""
    from hasten.engine.devices import pick_device

    on = pick_device(device).partition(":")[0]
    wrong = [fact for fact in ("cuda", "cpu") if fact in card.applies_to and fact != on]
    return {"cuda": "for an NVIDIA GPU", "cpu": "for the CPU"}[wrong[0]] if wrong else None
