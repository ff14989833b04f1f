"""Ceilings by replacement: time with a part / time without it, the most that any acceleration of that part could give.

Input, logging and update are switched off and on within one process, block by block, and a run with larger batches
takes its turns there too: building a process for each costs more than the measurement. Another allocator
cannot be taken back, so it gets a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hasten.benchmarking.arm import WARM_UP_STEPS
from hasten.benchmarking.compare import BLOCK_SECONDS, BLOCK_STEPS, run_interleaved
from hasten.benchmarking.fork_server import Worker
from hasten.benchmarking.ratio import UNSURE, Ratio, ratio_of, verdict_of
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.registry import cards_that_state
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import BATCH_FACTOR, LARGER_BATCH

SYSTEM_TIME = "system_time"  # the ceiling (of the cards) that the processors' time in the operating system gives
LEAST_SHARE = 0.02  # a phase below it can never pay, so its ceiling is not measured
LOOKS = (6, 9, 14)  # pairs of blocks: a ceiling need not be known as well as a verdict
LEAST_PAIRS = 3
CHEAP = 2 * LEAST_PAIRS * BLOCK_SECONDS  # seconds; what takes no longer is always measured
STEPS_OF_A_LARGER_BATCH = 2 * WARM_UP_STEPS + 1 + LEAST_PAIRS  # what it takes at least to build and to try


@dataclass
class Ceilings:
    """Ceilings by name (a phase, or the method that was tried), and why others have none."""

    ceilings: dict[str, Ratio] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)

    def worth(self, shares: Mapping[str, float]) -> list[str]:
        """The names whose share could pay; the others are noted."""
        self.not_measured |= {
            name: f"it takes {share:.1%} of the time" for name, share in shares.items() if share < LEAST_SHARE
        }
        return [name for name, share in shares.items() if share >= LEAST_SHARE]


def measure_ceilings(
    probe: Worker,
    shares: Mapping[str, float],
    *,
    count: int,
    step: float,
    extra: float,
    budget: float,
    watch: ProgressCallback = no_progress,
) -> Ceilings:
    """The ceilings of what can be taken away while the run goes on.

    Args:
        shares: of the time that each takes, by the timeline: "input", "larger_batch", "logging" and, last because it may break the run, "optimizer_step".
        count: steps of a block.
        step: seconds that one takes.
        extra: seconds of evaluation for a sample, which stay.
    """
    found, began = Ceilings(), time.monotonic()
    worth = found.worth(shares)
    for number, name in enumerate(worth):
        left = began + budget - time.monotonic()
        watch(f"what {name} could give", number / len(worth), left)
        if name == LARGER_BATCH and max(left, CHEAP) < (least := STEPS_OF_A_LARGER_BATCH * BATCH_FACTOR * step):
            found.not_measured[name] = f"{BATCH_FACTOR} times the batch would take {least:.0f} s to try"
            continue
        try:
            found.ceilings[name] = _switched(probe, name, count, extra, left / (len(worth) - number))
        except RunError as error:  # a batch too large for the memory, a step that cannot do without its update
            found.not_measured[name] = str(error)
    return found


def measure_allocator_ceiling(
    task: TaskRef,
    recipe: Recipe,
    share: float,
    *,
    device: str,
    seed: int,
    budget: float,
    plan: dict,
    processes: int = 1,
    watch: ProgressCallback = no_progress,
) -> Ceilings:
    """What the method that saves system time gives, as far as ``budget`` seconds allow.

    Args:
        share: of the processors' time that the operating system takes.
        plan: of the plain run, with ``build_seconds``.
    """
    found = Ceilings()
    name = next((name for name, card in cards_that_state("ceiling").items() if card.ceiling == SYSTEM_TIME), None)
    if name is None or name in recipe.methods or not found.worth({SYSTEM_TIME: share}):
        return found
    building = 2 * plan["build_seconds"]
    least = building + LEAST_PAIRS * 2 * max(BLOCK_SECONDS, BLOCK_STEPS * plan["step"])
    if budget < least:
        found.not_measured[SYSTEM_TIME] = f"the budget is spent; it would have taken {least:.0f} s"
        return found
    watch("what another allocator could give", 0.0, budget)
    try:
        arms, among = (recipe, recipe.with_method(name)), (processes, processes)
        done = run_interleaved(
            task, *arms, budget=budget - building, device=device, processes=among, seed=seed, looks=LOOKS
        )
        found.ceilings[SYSTEM_TIME] = done.ratio
    except (RunError, ConfigurationError) as error:  # it found nothing to act on
        found.not_measured[SYSTEM_TIME] = str(error)
    return found


def _switched(probe: Worker, name: str, count: int, extra: float, budget: float) -> Ratio:
    """Blocks with and without a phase, in turn, until the ratio is known or the budget is spent."""
    steps = max(1, count // BATCH_FACTOR) if name == LARGER_BATCH else count
    probe.call("block", count=1, away=name)
    began, with_it, without = time.monotonic(), [], []
    while True:
        pair = [(with_it, count, None), (without, steps, name)]
        for paces, length, away in pair if len(without) % 2 == 0 else reversed(pair):
            block = probe.call("block", count=length, away=away)
            paces.append(block["seconds"] / block["samples"] + extra)
        pairs = len(without)
        spent = time.monotonic() - began > budget and pairs >= LEAST_PAIRS
        if pairs in LOOKS or spent:
            ratio = ratio_of(with_it, without, 0.05 / len(LOOKS))
            if verdict_of(ratio) != UNSURE or spent or pairs >= LOOKS[-1]:
                return ratio
