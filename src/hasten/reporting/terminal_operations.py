"""Terminal output of the view of operations, a part of that of ``hasten diagnose``."""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.text import Text

from hasten.reporting import formatting
from hasten.reporting.rich_layout import BOLD, DIM, bar, grid, indented, pairs
from hasten.reporting.view_model import Json

BAR_WIDTH, NAME_WIDTH = 12, 38  # characters
MAX_OPERATIONS = 15  # rows of the table of operations, without the sums
MAX_SCALES = 6  # values of the loss scale in its sentence
CONVERSION, CONVERSIONS, NOT_FLOATING = "_to_copy to ", "conversions", "no floating-point input"


def operations_table(operations: Json) -> list[RenderableType]:
    """The operations of a step grouped by precision, and the loss scale; nothing if they were not observed."""
    parts: list[RenderableType] = []
    groups = operation_groups(operations["rows"])
    if groups:
        table = grid("operations of a step", ">calls", ">flops", ">time", "")
        for group in groups:
            length = bar(group["time_share"], BAR_WIDTH)
            table.add_row(Text(group["name"], BOLD), *_numbers(group), length)
            for row in group["rows"]:
                table.add_row(f"  {formatting.shorten(row['op'], NAME_WIDTH)}", *_numbers(row), "")
        parts += [Text(), indented(table), Text(f"  {operations_note(operations)}", style=DIM)]
    if scale := loss_scale_sentence(operations["loss_scale"]):
        parts += [Text(), pairs([("loss scale", scale)])]
    if operations["note"]:
        parts += [Text(), pairs([("operations", operations["note"])])]
    return parts


def _numbers(row: Json) -> tuple[str, str, str]:
    flops = formatting.percent(row["flops_share"]) if row["flops_share"] else ""
    return formatting.plain(row["calls_per_step"]), flops, formatting.percent(row["time_share"])


def operation_groups(rows: Sequence[Json]) -> list[Json]:
    """The operations of a step by precision, conversions in a group of their own; what takes longest comes first.

    Args:
        rows: as ``measure_operations`` returns them.

    Returns:
        ``{"name", "calls_per_step", "flops_share", "time_share", "rows"}`` per group, with sums over its rows. The
        MAX_OPERATIONS that take longest have a row each; the last row of a group that has one sums up its others.
    """
    ordered = sorted(rows, key=lambda row: -(row["time_share"] or 0.0))
    groups: dict[str, list[Json]] = {}
    for row in ordered:
        groups.setdefault(_operation_group(row), []).append(row)
    shown = [id(row) for row in ordered[:MAX_OPERATIONS]]
    result = []
    for name, members in groups.items():
        listed = [row | {"op": _operation_name(row)} for row in members if id(row) in shown]
        others = [row for row in members if id(row) not in shown]
        if listed and others:
            listed.append(_summed_up(formatting.count(len(others), "other", "others"), others))
        result.append(_summed_up(name, members) | {"name": name, "rows": listed})
    return sorted(result, key=lambda group: -group["time_share"])


def operations_note(operations: Json) -> str:
    """What the columns of the table of operations mean."""
    steps = formatting.count(operations["steps"], "step", "steps")
    return (
        f"calls: in a step, the average of {steps}; flops: share of those of matrix products and convolutions, and of "
        "attention on a GPU; time: share of that of all operations"
    )


def loss_scale_sentence(steps: Sequence[Json]) -> str:
    """How the loss scale changed: ``65536, after step 1 32768, ...; 1 step of 20 overflowed``."""
    values = [step["value"] for step in steps]
    if not values:
        return ""
    changes = [f"{formatting.plain(values[0], digits=6)} after step 1"]
    changes += [
        f"{formatting.plain(value, digits=6)} after step {step}"
        for step, (before, value) in enumerate(pairwise(values), 2)
        if value != before
    ]
    overflows = formatting.count(sum(bool(step["overflow"]) for step in steps), "step", "steps")
    if len(changes) > MAX_SCALES:
        changes = [*changes[: MAX_SCALES - 1], "\u2026", changes[-1]]
    return f"{', '.join(changes)}; {overflows} of {len(values)} overflowed"


def _operation_group(row: Json) -> str:
    return CONVERSIONS if row["op"].startswith(CONVERSION) else row["dtype"] or NOT_FLOATING


def _operation_name(row: Json) -> str:
    """As PyTorch names it; a conversion as ``float32 to bfloat16``."""
    if not row["op"].startswith(CONVERSION):
        return row["op"]
    return f"{row['dtype'] or 'integer'} to {row['op'].removeprefix(CONVERSION)}"


def _summed_up(name: str, rows: Sequence[Json]) -> Json:
    sums = {key: sum(row[key] or 0.0 for row in rows) for key in ("calls_per_step", "flops_share", "time_share")}
    return {"op": name} | sums
