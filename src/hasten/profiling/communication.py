"""What talking costs the ranks of a job, and the job's diagnosis in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

from hasten.benchmarking.ratio import Ratio
from hasten.profiling.advise import amdahl
from hasten.profiling.stragglers import CAUSES, milliseconds, own_phases
from hasten.profiling.verdict import LEAST_GAIN

NAMED_FIRST = 0.5  # of the time that the largest cause takes: a straggler that takes as much is told instead, for it can be found and mended
EXCHANGE = (
    "averaging the gradients makes a step {exposed} longer, {share:.0%} of it{hidden}; "
    "if the ranks need not talk, training would be {gain:.2f}x as fast"
)
HIDDEN = ", and {hidden} more hide behind the backward pass"
INPUT = "waiting for the next batch holds all ranks up; if batches came for free, training would be {gain:.2f}x as fast"
TURNS = "the ranks wait for each other, now for one and now for another, {waits} a step ({share:.0%}): the time that each takes varies"
ARITHMETIC = "each rank's own arithmetic, forward and backward, takes {compute:.0%} of a step, and talking {talk}; only faster arithmetic can help"


def communication_cost(step: float, ceiling: Ratio | None, buckets: list[int] | None, exchanges: list[float]) -> dict:
    """Seconds of a step: ``seconds`` by itself, ``exposed`` (a step is so much longer), ``hidden`` (behind the backward pass); None: unknown."""
    exposed = ceiling and step * max(0.0, 1.0 - 1.0 / ceiling.median)
    alone = median(exchanges) if exchanges else None
    return {
        "seconds": alone,
        "exposed": exposed,
        "hidden": None if alone is None or exposed is None else max(0.0, alone - exposed),
        "share": exposed and exposed / step,
        "bytes": buckets and sum(buckets),
        "buckets": buckets and len(buckets),
    }


def verdict_of(straggler: dict | None, ceilings: Mapping[str, Ratio], talk: dict, rows: list[dict], step: float) -> str:
    """One sentence that names the largest cause; a ceiling counts that is surely above 1."""
    possible = {name: ratio.median if ratio.low > 1 else 1.0 for name, ratio in ceilings.items()}
    waits = 0.0 if straggler else fmean(row.get("waits", 0.0) for row in rows)
    possible["turns"] = amdahl(waits / step)
    largest = max(possible, key=possible.get)
    gain = possible[largest]
    late = straggler["share"] if straggler else 0.0
    if amdahl(late) >= LEAST_GAIN and late >= NAMED_FIRST * (1 - 1 / gain):
        sentence = straggler["sentence"]
    elif gain < LEAST_GAIN:
        compute = max(sum(own_phases(row)[name] for name in CAUSES["compute"]) for row in rows) / step
        sentence = ARITHMETIC.format(
            compute=min(1.0, compute), talk="an unknown part" if talk["share"] is None else f"{talk['share']:.0%}"
        )
    elif largest == "exchange":
        hidden = HIDDEN.format(hidden=milliseconds(talk["hidden"])) if talk["hidden"] else ""
        sentence = EXCHANGE.format(exposed=milliseconds(talk["exposed"]), share=talk["share"], hidden=hidden, gain=gain)
    else:
        sentence = {"input": INPUT, "turns": TURNS}[largest].format(
            gain=gain, waits=milliseconds(waits), share=waits / step
        )
    return sentence[0].upper() + sentence[1:] + "."
