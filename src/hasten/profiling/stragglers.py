"""Finds the straggler of a job, the rank that the others wait for, and its cause, from the timed blocks of all ranks.

Works on plain data: ``rank_blocks[rank][kind]`` is the list of that rank's blocks of a kind. In "plain" blocks the
ranks train as they are. In "barrier" blocks (missing where they cannot be measured) the ranks do not exchange gradients
but meet in a barrier after every backward pass; ``wait_seconds`` of a block lists the seconds in each step's barrier.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

MIN_SHARE = 0.05  # of a step, for which the others must wait for a rank that is called a straggler
MIN_BLOCKS = 0.75  # share of the blocks in which they must
MIN_EXPLAINED = 0.5  # share of the lateness that a cause has to explain
SLOW_LINK = 2.0  # times the seconds of the other links
CAUSES = {
    "data": ("input", "copy"),
    "compute": ("forward", "backward"),
    "optimizer": ("grad_transform", "optimizer_step"),
}
WHY = {
    "data": "its data come late ({own} a step for its batches, {others} on the other ranks)",
    "compute": "its forward and backward pass take longer ({own}, {others} on the other ranks){cpu}",
    "optimizer": "its optimizer takes longer ({own}, {others} on the other ranks)",
    "unknown": "the cause lies outside of the timed phases",
}
CPU = {
    True: ", with as much more CPU time: it has more to compute, or a slower processor",
    False: ", without more CPU time: the model waits for something, or other programs use its cores",
}


def rank_phase_times(rank_blocks: Sequence[Mapping[str, list[dict]]]) -> list[dict]:
    """One row per rank: seconds per step, each value the median over the rank's blocks.

    Returns:
        ``rank`` and ``phases``; if barrier blocks exist also ``phases_without_exchange``, ``cpu_seconds``,
        ``wait_seconds`` for the latest rank, and ``last_fraction``: the share of the steps in which this rank was the
        latest.
    """
    rows: list[dict] = [{"rank": i, "phases": _phases(blocks["plain"])} for i, blocks in enumerate(rank_blocks)]
    if "barrier" not in rank_blocks[0]:
        return rows
    all_waits, last_fractions = _waits(rank_blocks), _last_fractions(rank_blocks)
    for row, waits, last_fraction, blocks in zip(rows, all_waits, last_fractions, rank_blocks, strict=True):
        row |= {
            "phases_without_exchange": _phases(blocks["barrier"]),
            "cpu_seconds": median(block["cpu"] for block in blocks["barrier"]),
            "wait_seconds": median(waits),
            "last_fraction": last_fraction,
        }
    return rows


def local_phases(row: Mapping) -> dict[str, float]:
    """A rank's phases without the exchange of gradients, if those could be measured; else all of them."""
    return row.get("phases_without_exchange", row["phases"])


def skew_of(rows: list[dict]) -> dict[str, float]:
    """Phase -> seconds per step between the slowest and the fastest rank, waits for each other excluded."""
    phases = [local_phases(row) for row in rows]
    return {name: max(row[name] for row in phases) - min(row[name] for row in phases) for name in phases[0]}


def slowest_rank_shares(rows: list[dict], step: float) -> dict[str, float]:
    """Phase -> fraction of ``step`` (seconds), on the rank whose phases take longest in all; waits excluded."""
    slowest = max((local_phases(row) for row in rows), key=lambda phases: sum(phases.values()))
    return {name: min(1.0, seconds / step) for name, seconds in slowest.items()}


def find_straggler(
    rows: list[dict],
    rank_blocks: Sequence[Mapping[str, list[dict]]],
    step: float,
    links: list[float],
    exposed: float | None,
) -> dict | None:
    """The rank that the others wait for: ``{rank, seconds, share, cause, why, sentence}``; None if there is none.

    Args:
        rows: result of ``rank_phase_times``.
        rank_blocks: timed blocks by rank and kind, see the module.
        step: seconds per step.
        links: seconds that a message takes from each rank to the next one.
        exposed: seconds by which the exchange of gradients makes a step longer; None: unknown.
    """
    late = _late_rank(rows, rank_blocks, step)
    if late is None:
        return _slow_link(links, step, exposed)
    rank, seconds = late
    cause, why = _cause(rows, rank, seconds)
    return _straggler(rank, seconds, step, cause, why)


def _late_rank(
    rows: list[dict], rank_blocks: Sequence[Mapping[str, list[dict]]], step: float
) -> tuple[int, float] | None:
    """(rank that waits least, seconds per step that others wait for it); None if short, or without barrier blocks."""
    if "wait_seconds" not in rows[0]:
        return None
    waits = _waits(rank_blocks)
    rank = min(range(len(rows)), key=lambda i: rows[i]["wait_seconds"])
    others = zip(*_without(waits, rank), strict=True)
    blocks = [median(other) - own for own, other in zip(waits[rank], others, strict=True)]
    seconds, least = median(blocks), MIN_SHARE * step
    return (rank, seconds) if sum(block >= least for block in blocks) >= MIN_BLOCKS * len(blocks) else None


def _cause(rows: list[dict], rank: int, seconds: float) -> tuple[str, str]:
    """(group of phases in which ``rank`` loses most of the ``seconds``, the reason as text)."""
    own = _by_cause(rows[rank]["phases_without_exchange"])
    other_rows = _without(rows, rank)
    others = {cause: median(_by_cause(row["phases_without_exchange"])[cause] for row in other_rows) for cause in CAUSES}
    cause = max(CAUSES, key=lambda name: own[name] - others[name])
    excess = own[cause] - others[cause]
    if excess < MIN_EXPLAINED * seconds:
        return "unknown", WHY["unknown"]
    cpu_excess = rows[rank]["cpu_seconds"] - median(row["cpu_seconds"] for row in other_rows)
    cpu = CPU[cpu_excess >= MIN_EXPLAINED * excess]
    return cause, WHY[cause].format(own=format_ms(own[cause]), others=format_ms(others[cause]), cpu=cpu)


def _slow_link(links: list[float], step: float, exposed: float | None) -> dict | None:
    """The straggler whose links to both neighbors are slow; None without one, or with two ranks (undecidable)."""
    if len(links) < 3 or not exposed:
        return None
    best = [min(links[rank], links[rank - 1]) for rank in range(len(links))]
    rank = max(range(len(links)), key=best.__getitem__)
    others = median(_without(best, rank))
    seconds = exposed * (1 - others / best[rank])
    if best[rank] < SLOW_LINK * others or seconds < MIN_SHARE * step:
        return None
    why = f"its link is slow (a megabyte takes {format_ms(best[rank])}, {format_ms(others)} between others)"
    return _straggler(rank, seconds, step, "link", why)


def _straggler(rank: int, seconds: float, step: float, cause: str, why: str) -> dict:
    share = min(1.0, seconds / step)
    sentence = f"rank {rank} makes the others wait {format_ms(seconds)} a step ({share:.0%}): {why}"
    return {"rank": rank, "seconds": seconds, "share": share, "cause": cause, "why": why, "sentence": sentence}


def format_ms(seconds: float) -> str:
    """Seconds as a text in milliseconds."""
    return f"{1000 * seconds:,.1f} ms"


def _waits(rank_blocks: Sequence[Mapping[str, list[dict]]]) -> list[list[float]]:
    """Mean wait per step by rank and block, in seconds, minus the shortest of all ranks (the barrier itself)."""
    waits = [[block["wait_seconds"] for block in blocks["barrier"]] for blocks in rank_blocks]
    least = [[min(step) for step in zip(*blocks, strict=True)] for blocks in zip(*waits, strict=True)]
    return [[fmean(block) - fmean(base) for block, base in zip(blocks, least, strict=True)] for blocks in waits]


def _last_fractions(rank_blocks: Sequence[Mapping[str, list[dict]]]) -> list[float]:
    """For each rank, the fraction (0 to 1) of the steps in which it reached the barrier last."""
    waits = [[wait for block in blocks["barrier"] for wait in block["wait_seconds"]] for blocks in rank_blocks]
    steps = list(zip(*waits, strict=True))
    return [sum(step[rank] == min(step) for step in steps) / len(steps) for rank in range(len(waits))]


def _phases(blocks: list[dict]) -> dict[str, float]:
    return {name: median(block["phases"][name] for block in blocks) for name in blocks[0]["phases"]}


def _by_cause(phases: Mapping[str, float]) -> dict[str, float]:
    return {cause: sum(phases[name] for name in names) for cause, names in CAUSES.items()}


def _without(values: list[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]
