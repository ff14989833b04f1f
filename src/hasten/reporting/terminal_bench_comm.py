"""Output of `hasten bench-comm`: the time of each collective by message size, with its latency and bandwidth."""

from rich.console import Group, RenderableType
from rich.text import Text

from hasten.reporting import formatting
from hasten.reporting.formatting import file_size
from hasten.reporting.rich_layout import grid, headline, indented
from hasten.reporting.view_model import Json

EXAMPLE_BYTES = 100e6  # gradients of 25 million float32 parameters


def bench_comm_answer(result: Json) -> RenderableType:
    """The table of all collectives, under a headline: the faster all-reduce, which every DDP step waits for."""
    collectives = result["collectives"]
    table = grid("", *(f">{name.replace('all-reduce by', 'by')}" for name in collectives))
    times = {
        name: {row["bytes"]: row["seconds"]["median"] for row in measured["sizes"]}
        for name, measured in collectives.items()
    }
    for size in sorted(set().union(*times.values())):
        table.add_row(file_size(size), *(formatting.seconds(by_size.get(size)) for by_size in times.values()))
    table.add_row("latency", *(formatting.seconds(measured["latency"]) for measured in collectives.values()))
    table.add_row("bandwidth", *(f"{file_size(measured['bandwidth'])}/s" for measured in collectives.values()))
    all_reduces = [measured for name, measured in collectives.items() if name.startswith("all-reduce")]
    fastest = min(measured["latency"] + EXAMPLE_BYTES / measured["bandwidth"] for measured in all_reduces)
    text = f"An all-reduce of the gradients of 25 million parameters takes about {formatting.seconds(fastest)}"
    nodes = formatting.count(result["nodes"], "node", "nodes")
    where = f"{result['processes']} processes on {nodes}, {result['backend']}"
    return Group(headline(text, where, False), Text(), indented(table))
