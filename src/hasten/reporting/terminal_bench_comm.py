"""What `hasten network` prints: how long each collective takes by size, and the two numbers that describe it."""

from rich.console import Group, RenderableType
from rich.text import Text

from hasten.reporting import formatting
from hasten.reporting.rich_layout import grid, headline, indented
from hasten.reporting.terminal_data import size

GRADIENTS = 100e6  # bytes: those of 25 million weights in float32


def network_answer(result: dict) -> RenderableType:
    """The faster way of an all-reduce first: it is what data parallel training waits for."""
    collectives = result["collectives"]
    table = grid("", *(f">{name.replace('all-reduce by', 'by')}" for name in collectives))
    taken = {
        name: {row["bytes"]: row["seconds"]["median"] for row in found["sizes"]} for name, found in collectives.items()
    }
    for each in sorted(set().union(*taken.values())):
        table.add_row(size(each), *(formatting.seconds(of_one.get(each)) for of_one in taken.values()))
    table.add_row("latency", *(formatting.seconds(found["latency"]) for found in collectives.values()))
    table.add_row("bandwidth", *(f"{size(found['bandwidth'])}/s" for found in collectives.values()))
    reduces = {
        name: found["latency"] + GRADIENTS / found["bandwidth"]
        for name, found in collectives.items()
        if name.startswith("all-reduce")
    }
    best = min(reduces, key=reduces.get)
    told = f"averaging the gradients of 25 million weights takes about {formatting.seconds(reduces[best])}"
    where = f"{result['processes']} processes on {formatting.count(result['nodes'], 'machine', 'machines')}, {result['backend']}"
    return Group(headline(told, where, False), Text(), indented(table))
