"""The cost of communication between ranks, whether shorter gradients pay, and the diagnosis of a job in a sentence."""

from collections.abc import Mapping
from statistics import fmean, median

import torch

from hasten.benchmarking.ratio import Ratio
from hasten.profiling.advise import amdahl
from hasten.profiling.flops import fastest_call
from hasten.profiling.stragglers import CAUSES, format_ms, local_phases
from hasten.profiling.verdict import MIN_GAIN

HALF_PRECISION_SAVING = 0.5  # share of float32's bytes that 16-bit gradients save
STRAGGLER_FIRST = 0.5  # a straggler is named first if it costs this fraction of the largest cause: it can be repaired
EXCHANGE = (
    "averaging the gradients makes a step {exposed} longer, {share:.0%} of it{hidden}; "
    "without communication between the ranks, training would be {gain:.2f}x as fast"
)
HIDDEN = ", and {hidden} more hide behind the backward pass"
INPUT = "all ranks wait for their next batch; if batches came for free, training would be {gain:.2f}x as fast"
TURNS = (
    "the ranks wait for each other, {waits} a step ({share:.0%}), each time for another rank: "
    "the time of a step varies on every rank"
)
ARITHMETIC = (
    "each rank's own arithmetic, forward and backward, takes {compute:.0%} of a step, and communication {share}; "
    "only faster arithmetic can help"
)


def communication_cost(step: float, ceiling: Ratio | None, buckets: list[int] | None, exchanges: list[float]) -> dict:
    """The exchange of gradients in a step; None stands for what is unknown.

    Args:
        step: seconds of a step.
        ceiling: time with the exchange / time without.
        buckets: bytes of each gradient bucket.
        exchanges: seconds of the all-reduces of a step with nothing beside them, one value a measurement.

    Returns:
        ``seconds``: of the exchange by itself; ``exposed``: seconds by which a step is longer; ``hidden``: seconds
        behind the backward pass; ``share``: exposed / step; ``bytes``; ``buckets``: their count.
    """
    exposed = step * max(0.0, 1.0 - 1.0 / ceiling.median) if ceiling else None
    seconds = median(exchanges) if exchanges else None
    return {
        "seconds": seconds,
        "exposed": exposed,
        "hidden": None if seconds is None or exposed is None else max(0.0, seconds - exposed),
        "share": exposed and exposed / step,
        "bytes": buckets and sum(buckets),
        "buckets": buckets and len(buckets),
    }


def measure_cast_seconds(size: int, device: torch.device) -> float:
    """Seconds of casting ``size`` bytes of float32 to bfloat16 and back."""
    gradients = torch.zeros(size // 4, device=device)
    return fastest_call(lambda: gradients.copy_(gradients.to(torch.bfloat16)), device)


def cast_speedup(cost: Mapping, codec_seconds: float, step: float) -> tuple[float, str]:
    """(speed-up of a step of ``step`` seconds if gradients were exchanged in 16 bits, the reason).

    No more can be saved than is exposed: what is hidden behind the backward pass stays hidden.

    Args:
        cost: result of ``communication_cost``, with every value known.
        codec_seconds: result of ``measure_cast_seconds``.
        step: seconds per step.
    """
    seconds, sent = cost["seconds"], (1 - HALF_PRECISION_SAVING) * cost["seconds"]
    hidden = max(seconds - cost["exposed"], 0.0)
    saved = min(cost["exposed"], seconds) - max(sent - hidden, 0.0) - codec_seconds
    speedup = step / max(step - saved, 1e-3 * step)
    why = (
        f"rounding {cost['bytes'] / 1e6:.3g} MB takes {1e3 * codec_seconds:.3g} ms, and half of them take "
        f"{1e3 * sent:.3g} ms to send: {'at most' if saved > 0 else 'no gain,'} {speedup:.2f}x"
    )
    return speedup, why


def describe_job_diagnosis(
    straggler: Mapping | None, ceilings: Mapping[str, Ratio], cost: Mapping, rows: list[dict], step: float
) -> str:
    """One sentence that names the largest cause: the straggler, the exchange, the input, waits or arithmetic.

    The arguments are the results of ``find_straggler``, ``communication_cost`` and ``rank_phase_times``, the measured
    ceilings of "exchange" and "input" (each counts only if its interval lies above 1), and the seconds of a step.
    """
    gains = {name: ratio.median if ratio.low > 1 else 1.0 for name, ratio in ceilings.items()}
    waits = 0.0 if straggler else fmean(row.get("wait_seconds", 0.0) for row in rows)
    gains["turns"] = amdahl(waits / step)
    largest = max(gains, key=gains.__getitem__)
    gain = gains[largest]
    straggler_share = straggler["share"] if straggler else 0.0
    if straggler and amdahl(straggler_share) >= MIN_GAIN and straggler_share >= STRAGGLER_FIRST * (1 - 1 / gain):
        sentence = straggler["sentence"]
    elif gain < MIN_GAIN:
        compute = max(sum(local_phases(row)[name] for name in CAUSES["compute"]) for row in rows) / step
        share = "an unknown part" if cost["share"] is None else f"{cost['share']:.0%}"
        sentence = ARITHMETIC.format(compute=min(1.0, compute), share=share)
    elif largest == "exchange":
        hidden = HIDDEN.format(hidden=format_ms(cost["hidden"])) if cost["hidden"] else ""
        sentence = EXCHANGE.format(exposed=format_ms(cost["exposed"]), share=cost["share"], hidden=hidden, gain=gain)
    elif largest == "input":
        sentence = INPUT.format(gain=gain)
    else:
        sentence = TURNS.format(waits=format_ms(waits), share=waits / step)
    return sentence[0].upper() + sentence[1:] + "."
