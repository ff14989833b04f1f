"""What `hasten diagnose` prints of several processes: a step of each rank by phase, what talking costs, and what could pay."""

from rich.console import Group, RenderableType
from rich.text import Text

from hasten.core.card import PHASES
from hasten.reporting import formatting
from hasten.reporting.rich_layout import QUIET, grid, headline, indented, pairs
from hasten.reporting.terminal import advised
from hasten.reporting.terminal_data import size

LEAST_SHARE = 0.01  # of a step; a phase that takes less on every rank is not shown
CEILINGS = {"exchange": ("no averaging", "of gradients"), "input": ("no input", "but one cached batch on every rank")}


def ranks_answer(result: dict) -> RenderableType:
    """The verdict, and the straggler where that is another matter; then every rank's step."""
    straggler = result["straggler"]
    told = [result["verdict"]]
    if straggler and straggler["sentence"][1:] not in result["verdict"]:
        told.append(straggler["sentence"].capitalize() + ".")
    parts = [
        headline(f"Where a step of {result['processes']} processes goes", result["task"], False),
        *map(Text, told),
        Text(),
    ]
    parts += [indented(_ranks(result)), Text(), pairs(_facts(result))]
    parts.append(
        Text(
            "  waits: for the latest rank, before gradients are averaged; that and the averaging are part of backward",
            QUIET,
        )
    )
    return Group(*parts, *advised(result["advice"]))


def _ranks(result: dict) -> RenderableType:
    ranks, step = result["ranks"], result["seconds_per_step"]
    shown = [name for name in PHASES if any(row["phases"].get(name, 0.0) >= LEAST_SHARE * step for row in ranks)]
    waits = "wait_seconds" in ranks[0]
    table = grid("rank", *(f">{name}" for name in shown), *([">waits", ">is last"] if waits else []))
    for row in ranks:
        last = [formatting.seconds(row["wait_seconds"]), formatting.percent(row["last_fraction"])] if waits else []
        table.add_row(str(row["rank"]), *(formatting.seconds(row["phases"][name]) for name in shown), *last)
    table.add_row(Text("skew", QUIET), *(Text(formatting.seconds(result["skew"][name]), QUIET) for name in shown))
    return table


def _facts(result: dict) -> list[tuple[str, str]]:
    talk = result["communication"]
    rows = [("a step", f"{formatting.seconds(result['seconds_per_step'])}, {result['batch_size']} samples")]
    if talk["exposed"] is not None:
        rows.append(
            (
                "averaging",
                f"of gradients makes it {formatting.seconds(talk['exposed'])} longer ({formatting.percent(talk['share'])})",
            )
        )
    if talk["seconds"] is not None:
        buckets = formatting.count(talk["buckets"], "bucket", "buckets")
        rows.append(
            (
                "by itself",
                f"{formatting.seconds(talk['seconds'])} for {size(talk['bytes'])} in {buckets}, {formatting.seconds(talk['hidden'])} hidden",
            )
        )
    for name, ratio in result["ceilings"].items():
        what, more = CEILINGS[name]
        rows.append((what, f"{more}: {formatting.with_interval(ratio)} as fast"))
    if result["speedup"]:
        gain = formatting.with_interval(result["speedup"])
        rows.append(
            (
                f"{result['processes']} processes",
                f"train {gain} as fast as one with {formatting.count(result['threads']['single_process'], 'thread', 'threads')}: efficiency {result['efficiency']:.2f}",
            )
        )
    slowest = max(result["links"], key=lambda link: link["seconds"])
    rows.append(
        ("slowest link", f"rank {slowest['from']} to {slowest['to']}: {size(slowest['bytes'] / slowest['seconds'])}/s")
    )
    return rows + [(name, f"not measured: {why}") for name, why in result["not_measured"].items()]
