"""Who is waited for, and why: from what each rank told of its blocks. Plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

LEAST_SHARE = 0.05  # of a step, that a rank has to be waited for to be called a straggler
MOST_BLOCKS = 0.75  # in which that has to be so
LEAST_PART = 0.5  # of its lateness, that a cause has to explain
SLOW_LINK = 2.0  # times what the others' links take
CAUSES = {
    "data": ("input", "copy"),
    "compute": ("forward", "backward"),
    "optimizer": ("grad_transform", "optimizer_step"),
}
WHY = {
    "data": "its data come late ({own} a step for its batches, {others} on the other ranks)",
    "compute": "its forward and backward pass take longer ({own}, {others} on the other ranks){processor}",
    "optimizer": "its optimizer takes longer ({own}, {others} on the other ranks)",
    "unknown": "what holds it up lies outside of the phases that are timed",
}
PROCESSOR = {
    True: ", and as much more of the processor: it has more to compute, or a slower one",
    False: ", but not of the processor: the model waits for something, or others use its cores",
}


def rank_phase_times(told: list[dict]) -> list[dict]:
    """Of each rank, in seconds of a step, the middle one of its blocks.

    Returns:
        ``phases`` as they are; and where the ranks could be made to train without averaging gradients: ``own``, the phases then,
        ``own_cpu``, ``waits`` for the latest rank, and ``last``, the share of the steps in which it was that.
    """
    rows = [{"rank": rank, "phases": _phases(blocks["whole"])} for rank, blocks in enumerate(told)]
    if "own" not in told[0]:
        return rows
    for row, waits, last, blocks in zip(rows, _waits(told), _last(told), told, strict=True):
        cpu = median(block["cpu"] for block in blocks["own"])
        row |= {"own": _phases(blocks["own"]), "own_cpu": cpu, "waits": median(waits), "last": last}
    return rows


def own_phases(row: dict) -> dict[str, float]:
    """A rank's phases without averaging gradients, where that could be measured."""
    return row.get("own", row["phases"])


def skew_of(rows: list[dict]) -> dict[str, float]:
    """The difference between the slowest and the fastest rank, by phase; without what they wait for each other."""
    phases = [own_phases(row) for row in rows]
    return {name: max(each[name] for each in phases) - min(each[name] for each in phases) for name in phases[0]}


def phases_of_the_slowest(rows: list[dict], step: float) -> dict[str, float]:
    """Shares of a step by phase, of the rank that takes longest; without what the ranks wait for each other, where that is known."""
    slowest = max((own_phases(row) for row in rows), key=lambda phases: sum(phases.values()))
    return {name: min(1.0, seconds / step) for name, seconds in slowest.items()}


def find_straggler(
    rows: list[dict], told: list[dict], step: float, links: list[float], exposed: float | None
) -> dict | None:
    """The rank that the others wait for: ``{rank, seconds, share, cause, why, sentence}``; None where there is none."""
    late = _late(rows, told, step)
    if late is None:
        return _slow_link(links, step, exposed)
    rank, seconds = late
    cause, why = _cause(rows, rank, seconds)
    return _straggler(rank, seconds, step, cause, why)


def _late(rows: list[dict], told: list[dict], step: float) -> tuple[int, float] | None:
    """(rank, seconds that the others wait for it in a step)."""
    if "waits" not in rows[0]:
        return None
    waits = _waits(told)
    rank = min(range(len(rows)), key=lambda each: rows[each]["waits"])
    blocks = [
        median(others) - own for own, others in zip(waits[rank], zip(*_but(waits, rank), strict=True), strict=True)
    ]
    seconds, least = median(blocks), LEAST_SHARE * step
    return (rank, seconds) if sum(each >= least for each in blocks) >= MOST_BLOCKS * len(blocks) else None


def _cause(rows: list[dict], rank: int, seconds: float) -> tuple[str, str]:
    """What this rank takes longer for than the others, and in words."""
    own = _by_cause(rows[rank]["own"])
    others = {cause: median(_by_cause(row["own"])[cause] for row in _but(rows, rank)) for cause in CAUSES}
    cause = max(CAUSES, key=lambda each: own[each] - others[each])
    lead = own[cause] - others[cause]
    if lead < LEAST_PART * seconds:
        return "unknown", WHY["unknown"]
    computing = rows[rank]["own_cpu"] - median(row["own_cpu"] for row in _but(rows, rank)) >= LEAST_PART * lead
    return cause, WHY[cause].format(
        own=milliseconds(own[cause]), others=milliseconds(others[cause]), processor=PROCESSOR[computing]
    )


def _slow_link(links: list[float], step: float, exposed: float | None) -> dict | None:
    """The rank whose links to both neighbours are slow: it slows down the ring that all are in. Of two ranks nobody can tell."""
    if len(links) < 3 or not exposed:
        return None
    best = [min(links[rank], links[rank - 1]) for rank in range(len(links))]
    rank = max(range(len(links)), key=best.__getitem__)
    others = median(_but(best, rank))
    seconds = exposed * (1 - others / best[rank])
    if best[rank] < SLOW_LINK * others or seconds < LEAST_SHARE * step:
        return None
    why = f"its link is slow (a megabyte takes {milliseconds(best[rank])}, {milliseconds(others)} between others)"
    return _straggler(rank, seconds, step, "link", why)


def _straggler(rank: int, seconds: float, step: float, cause: str, why: str) -> dict:
    share = min(1.0, seconds / step)
    sentence = f"rank {rank} makes the others wait {milliseconds(seconds)} a step ({share:.0%}): {why}"
    return {"rank": rank, "seconds": seconds, "share": share, "cause": cause, "why": why, "sentence": sentence}


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _waits(told: list[dict]) -> list[list[float]]:
    """Of each rank and block, how long it waits in a step beyond what the word to each other takes, which is all that the latest one waits."""
    waits = [[block["waits"] for block in each["own"]] for each in told]
    least = [[min(step) for step in zip(*blocks, strict=True)] for blocks in zip(*waits, strict=True)]
    return [[fmean(block) - fmean(base) for block, base in zip(blocks, least, strict=True)] for blocks in waits]


def _last(told: list[dict]) -> list[float]:
    """Of each rank, the share of the steps in which it came last."""
    steps = list(zip(*([wait for block in each["own"] for wait in block["waits"]] for each in told), strict=True))
    return [sum(step[rank] == min(step) for step in steps) / len(steps) for rank in range(len(told))]


def _phases(blocks: list[dict]) -> dict[str, float]:
    return {name: median(block["phases"][name] for block in blocks) for name in blocks[0]["phases"]}


def _by_cause(phases: Mapping[str, float]) -> dict[str, float]:
    return {cause: sum(phases[name] for name in names) for cause, names in CAUSES.items()}


def _but(values: list, place: int) -> list:
    return [*values[:place], *values[place + 1 :]]
