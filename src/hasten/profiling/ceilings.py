"""Ceilings by ablation: time with a phase / time without it, the most that any acceleration of that phase could give.

Input, logging and optimizer step are switched off and on within one process, block by block, and a run with larger
batches takes turns with them in that process: one process per ceiling would cost more than the measurement.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hasten.benchmarking.arm import warm_up_steps
from hasten.benchmarking.blocks import BLOCK_SECONDS
from hasten.benchmarking.fork_server import Worker
from hasten.benchmarking.ratio import UNSURE, Ratio, ratio_of, verdict_of
from hasten.benchmarking.worker_group import WorkerGroup
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.profiling.ablations import BATCH_FACTOR, LARGER_BATCH

MIN_SHARE = 0.02  # the ceiling of a phase with a smaller share is not measured: the phase can never pay
LOOKS = (6, 9, 14)  # pairs of blocks; a ceiling needs less precision than a verdict
MIN_PAIRS = 3
LARGER_BATCH_STEPS = 10  # to build and measure a larger batch, whose samples cost less
CHEAP_S = 2 * MIN_PAIRS * BLOCK_SECONDS  # a measurement that takes no longer is always done


@dataclass
class Ceilings:
    """Measured ceilings by name (a phase, or what a card calls its ceiling), and the reason why others have none."""

    ratios: dict[str, Ratio] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)


def measure_ceilings(
    probe: Worker | WorkerGroup,
    shares: Mapping[str, float],
    *,
    count: int,
    step: float,
    extra: float,
    budget: float,
    on_progress: ProgressCallback = no_progress,
) -> Ceilings:
    """Measures the ceilings of phases that can be switched off in a running ``Probe``, within ``budget`` seconds.

    ``shares`` of the time, from 0 to 1, are those of "input", "larger_batch", on a GPU "copy", "logging" and, last
    because a run may fail without it, "optimizer_step". A block has ``count`` steps of ``step`` seconds; ``extra`` are
    the seconds of evaluation for each training sample, which are not switched off.
    """
    began, names = time.monotonic(), [name for name, share in shares.items() if share >= MIN_SHARE]
    found = Ceilings(not_measured={n: f"it takes {shares[n]:.1%} of the time" for n in shares if n not in names})
    for index, name in enumerate(names):
        left = began + budget - time.monotonic()
        on_progress(f"the ceiling of {name}", index / len(names), left)
        least = _least_seconds(name, count, step)
        if max(left, CHEAP_S) < least:
            what = f"{BATCH_FACTOR} times the batch" if name == LARGER_BATCH else "it"
            found.not_measured[name] = f"{what} would take {least:.0f} s to try"
            continue
        try:
            found.ratios[name] = _measure_ceiling(probe, name, count, extra, left / (len(names) - index))
        except (RunError, ConfigurationError) as error:  # no other batch size, or a step that needs its update
            found.not_measured[name] = str(error)
    return found


def _least_seconds(name: str, count: int, step: float) -> float:
    """Seconds that measuring a ceiling takes at least, with blocks of ``count`` steps of ``step`` seconds."""
    if name != LARGER_BATCH:
        return (1 + 2 * MIN_PAIRS * count) * step
    larger = BATCH_FACTOR * step  # at most
    return min(LARGER_BATCH_STEPS, warm_up_steps(larger) + 1 + MIN_PAIRS) * larger


def _measure_ceiling(probe: Worker | WorkerGroup, name: str, count: int, extra: float, budget: float) -> Ratio:
    """Time per sample with / without a phase, from blocks in turns until that is known or the budget is spent."""
    steps = max(1, count // BATCH_FACTOR) if name == LARGER_BATCH else count
    probe.call("block", count=1, disabled=name)
    began, with_phase, without = time.monotonic(), [], []
    while True:
        pair = [(with_phase, count, None), (without, steps, name)]
        for times, length, disabled in pair if len(without) % 2 == 0 else reversed(pair):
            block = probe.call("block", count=length, disabled=disabled)
            times.append(block["seconds"] / block["samples"] + extra)
        pairs = len(without)
        spent = time.monotonic() - began > budget and pairs >= MIN_PAIRS
        if pairs in LOOKS or spent:
            ratio = ratio_of(with_phase, without, 0.05 / len(LOOKS))
            if verdict_of(ratio) != UNSURE or spent or pairs >= LOOKS[-1]:
                return ratio
