"""Output of `hasten diagnose` with several processes and of `hasten bench-comm`: the ranks, and what they exchange."""

from rich.console import Group, RenderableType
from rich.text import Text

from hasten.core.card import PHASES
from hasten.reporting import formatting
from hasten.reporting.formatting import file_size, sentence_case
from hasten.reporting.rich_layout import DIM, grid, headline, indented, pairs
from hasten.reporting.terminal import advice_table
from hasten.reporting.view_model import Json

MIN_SHARE = 0.01  # of a step; a phase that takes less on every rank is not shown
CEILINGS = {
    "exchange": ("no exchange", "if gradients were not averaged"),
    "input": ("no input", "with one cached batch on every rank"),
}
EXAMPLE_BYTES = 100e6  # gradients of 25 million float32 parameters


def ranks_answer(result: Json) -> RenderableType:
    """The verdict, the straggler if the verdict does not name it, and the step of each rank."""
    straggler, verdict = result["straggler"], result["verdict"]
    parts = [headline(f"Where a step of {result['processes']} processes goes", result["task"], False), Text(verdict)]
    if straggler and straggler["sentence"][1:] not in verdict:
        parts.append(Text(f"{sentence_case(straggler['sentence'])}."))
    note = "  waits: for the slowest rank, before gradients are averaged; waiting and averaging are part of backward"
    parts += [Text(), indented(_ranks(result)), Text(), pairs(_facts(result)), Text(note, DIM)]
    return Group(*parts, *advice_table(result["advice"]))


def _ranks(result: Json) -> RenderableType:
    ranks, step = result["ranks"], result["seconds_per_step"]
    shown = [name for name in PHASES if any(row["phases"].get(name, 0.0) >= MIN_SHARE * step for row in ranks)]
    has_waits = "wait_seconds" in ranks[0]
    table = grid("rank", *(f">{name}" for name in shown), *([">waits", ">is last"] if has_waits else []))
    for row in ranks:
        last = [formatting.seconds(row["wait_seconds"]), formatting.percent(row["last_fraction"])] if has_waits else []
        table.add_row(str(row["rank"]), *(formatting.seconds(row["phases"][name]) for name in shown), *last)
    table.add_row(Text("skew", DIM), *(Text(formatting.seconds(result["skew"][name]), DIM) for name in shown))
    return table


def _facts(result: Json) -> list[tuple[str, str]]:
    cost, seconds = result["communication"], formatting.seconds
    rows = [("step", f"{seconds(result['seconds_per_step'])}, {result['batch_size']} samples")]
    rows += [("device", result["device"]), ("peak memory", formatting.peak_memory(result["peak_memory_bytes"]))]
    if cost["exposed"] is not None:
        share = formatting.percent(cost["share"])
        rows.append(("exposed", f"averaging gradients makes the step {seconds(cost['exposed'])} longer ({share})"))
    if cost["seconds"] is not None:
        amount = f"{file_size(cost['bytes'])} in {formatting.count(cost['buckets'], 'bucket', 'buckets')}"
        rows.append(("averaging", f"{seconds(cost['seconds'])} for {amount}, {seconds(cost['hidden'])} of it hidden"))
    for name, ratio in result["ceilings"].items():
        label, condition = CEILINGS[name]
        rows.append((label, f"{formatting.with_interval(ratio)} as fast {condition}"))
    if result["speedup"]:
        threads = formatting.count(result["threads"]["single_process"], "thread", "threads")
        gain = f"{formatting.with_interval(result['speedup'])} as fast as one process with {threads}"
        rows.append((f"{result['processes']} processes", f"{gain}: efficiency {result['efficiency']:.2f}"))
    link = max(result["links"], key=lambda link: link["seconds"])
    bandwidth = file_size(link["bytes"] / link["seconds"])
    rows.append(("slowest link", f"rank {link['from']} to {link['to']}: {bandwidth}/s"))
    return rows + [(name, f"not measured: {reason}") for name, reason in result["not_measured"].items()]


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
