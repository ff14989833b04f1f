"""Output of `hasten methods`: the catalogue, and the page of one method."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hasten.core.card import FACTS, PHASES, TRAITS, Exactness
from hasten.core.recipe import Recipe
from hasten.reporting import formatting
from hasten.reporting.rich_layout import BOLD, DIM, grid, headline, pairs
from hasten.reporting.view_model import Json

EXACTNESS_MEANINGS = {
    Exactness.BIT_EXACT: "all weights are equal to the last bit",
    Exactness.EQUIVALENT_MATH: "the same formula; rounding may differ",
    Exactness.REDUCED_PRECISION: "the same formula with fewer bits; gradients and losses are checked",
    Exactness.CHANGES_TRAINING: "a different training; quality is tested",
}


def methods_table(methods: Sequence[Json]) -> RenderableType:
    """The catalogue, grouped by exactness class. A method is ``{"name", "summary", "exactness": value of the class,
    "gain": (low, high) or None, "not_here": reason or None}``.
    """
    table = grid("", ">claimed", "")
    for exactness, meaning in EXACTNESS_MEANINGS.items():
        members = [method for method in methods if method["exactness"] == exactness.value]
        if not members:
            continue
        table.add_row(Text(exactness.value.capitalize(), BOLD), "", Text(meaning, DIM))
        for method in members:
            not_here = f" ({method['not_here']})" if method.get("not_here") else ""
            summary = Text.assemble(method["summary"], (not_here, DIM))
            table.add_row(Text(f"  {method['name']}"), _claim(method), summary)
        table.add_row()
    note = "Claimed gains are those of the sources; `hasten tune TASK` measures. Details: `hasten methods NAME`."
    return Group(table, Text(note, style=DIM))


def method_page(method: Json) -> RenderableType:
    """One method: its card, options, position among the other methods, conflicts and records.

    ``method`` has the fields of the card by name, and, where known, ``text``, ``hooks``, ``options`` ([{name, type,
    default, range}]), ``wraps``, ``wrapped_by``, ``conflicts`` ([{method, why}]), ``records`` ([{task, what, verdict,
    ratio}]) and ``not_here``.
    """
    meanings = {exactness.value: meaning for exactness, meaning in EXACTNESS_MEANINGS.items()}
    rows = [
        ("exactness", f"{method['exactness']}: {meanings.get(method['exactness'], '')}"),
        ("claimed", "; ".join(filter(None, (_claim(method), method.get("gain_when"))))),
        ("source", method.get("source")),
        ("not here", method.get("not_here")),
        ("accelerates", _meanings(method, "accelerates", PHASES)),
        ("applies if", _meanings(method, "applies_to", FACTS)),
        ("requires", _meanings(method, "requires", TRAITS)),
        ("invalidates", _meanings(method, "invalidates", TRAITS)),
        ("options", "\n".join(map(_option, method.get("options", ())))),
        ("tuner tries", "\n".join(str(Recipe({method["name"]: values})) for values in method.get("presets", ()))),
        *(
            (name.replace("_", " "), ", ".join(sorted(method.get(name, ()))))
            for name in ("hooks", "replaces", "wraps", "wrapped_by")
        ),
        ("conflicts", "\n".join(f"{other['method']}: {other['why']}" for other in method.get("conflicts", ()))),
        ("records", "\n".join(map(_record, method.get("records", ())))),
    ]
    paragraphs = [" ".join(text.replace("``", "").split()) for text in (method.get("text") or "").split("\n\n")]
    return Group(
        headline(method["name"], "", False),
        Text(method["summary"]),
        Text(),
        *([Text("\n".join(paragraphs)), Text()] if any(paragraphs) else []),
        pairs(rows),
    )


def _option(option: Json) -> str:
    """A method's option as text: ``decay = 0.99 (float, above 0)``."""
    name, default, kind = (option[key] for key in ("name", "default", "type"))
    allowed = f", {option['range']}" if option.get("range") else ""
    if default is None:
        return f"{name}: chosen by the method unless given ({kind}{allowed})"
    if isinstance(default, bool):
        default, kind = str(default).lower(), "true or false"
    return f"{name} = {default} ({kind}{allowed})"


def _record(record: Json) -> str:
    """One line about a trial of the method in a published search: task, what was tried, verdict, ratio."""
    ratio = (record.get("ratio") or {}).get("median")
    return f"{record['task']}: {record['what']} {record['verdict']}{f', {ratio:.2f}x' if ratio else ''}"


def _claim(method: Json) -> str:
    gain = method.get("gain")
    if not gain:
        return formatting.UNKNOWN
    low, high = gain
    return f"up to {formatting.ratio(high)}" if low <= 1 else formatting.between({"low": low, "high": high})


def _meanings(method: Json, field: str, known: Mapping[str, str]) -> str:
    return "; ".join(f"{name} ({known[name]})" if name in known else name for name in sorted(method.get(field, ())))
