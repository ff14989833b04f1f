"""Terminal output of the view of operations, a part of that of ``hasten diagnose``."""

from rich.console import RenderableType
from rich.text import Text

from hasten.reporting import formatting, view_model
from hasten.reporting.rich_layout import BOLD, DIM, bar, grid, indented, pairs
from hasten.reporting.view_model import Json

BAR_WIDTH, NAME_WIDTH = 12, 38  # characters


def operations_table(operations: Json) -> list[RenderableType]:
    """The operations of a step grouped by precision, and the loss scale; nothing if they were not observed."""
    parts: list[RenderableType] = []
    groups = view_model.operation_groups(operations["rows"])
    if groups:
        table = grid("operations of a step", ">calls", ">flops", ">time", "")
        for group in groups:
            length = bar(group["time_share"], BAR_WIDTH)
            table.add_row(Text(group["name"], BOLD), *_numbers(group), length)
            for row in group["rows"]:
                table.add_row(f"  {formatting.shorten(row['op'], NAME_WIDTH)}", *_numbers(row), "")
        parts += [Text(), indented(table), Text(f"  {view_model.operations_note(operations)}", style=DIM)]
    if scale := view_model.loss_scale_sentence(operations["loss_scale"]):
        parts += [Text(), pairs([("loss scale", scale)])]
    if operations["note"]:
        parts += [Text(), pairs([("operations", operations["note"])])]
    return parts


def _numbers(row: Json) -> tuple[str, str, str]:
    flops = formatting.percent(row["flops_share"]) if row["flops_share"] else ""
    return formatting.plain(row["calls_per_step"]), flops, formatting.percent(row["time_share"])
