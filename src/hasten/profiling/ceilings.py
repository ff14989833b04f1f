"""Ceilings by ablation: time with a phase / time without it, the most that any acceleration of that phase could give.

Input, logging and optimizer step are switched off and on within one process, block by block, and a run with larger
batches takes turns with them in that process: one process per ceiling would cost more than the measurement. Another
memory allocator needs a process of its own, because it cannot be undone.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hasten.benchmarking.arm import warm_up_steps
from hasten.benchmarking.blocks import BLOCK_SECONDS, BLOCK_STEPS
from hasten.benchmarking.compare import run_interleaved
from hasten.benchmarking.fork_server import Worker
from hasten.benchmarking.ratio import UNSURE, Ratio, ratio_of, verdict_of
from hasten.benchmarking.worker_group import WorkerGroup
from hasten.core.card import FACTS
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.registry import cards_that_state
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import BATCH_FACTOR, LARGER_BATCH

SYSTEM_TIME = "system_time"  # name, also in the cards, of the ceiling of CPU time spent in the operating system
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

    def worth_measuring(self, shares: Mapping[str, float]) -> list[str]:
        """The names in ``shares`` (name -> fraction of the time) that could pay; notes why the others cannot."""
        small = {name: share for name, share in shares.items() if share < MIN_SHARE}
        self.not_measured |= {name: f"it takes {share:.1%} of the time" for name, share in small.items()}
        return [name for name in shares if name not in small]


def measure_ceilings(
    probe: Worker | WorkerGroup,
    shares: Mapping[str, float],
    *,
    count: int,
    step: float,
    extra: float,
    budget: float,
    watch: ProgressCallback = no_progress,
) -> Ceilings:
    """Measures the ceilings of phases that can be switched off in a running ``Probe``, within ``budget`` seconds.

    ``shares`` holds the share of the time of "input", "larger_batch", "logging" and, last because a run may fail
    without it, "optimizer_step". A block has ``count`` steps of ``step`` seconds each; a training sample costs
    ``extra`` seconds of evaluation, which are not switched off.
    """
    found, began = Ceilings(), time.monotonic()
    names = found.worth_measuring(shares)
    for index, name in enumerate(names):
        left = began + budget - time.monotonic()
        watch(f"the ceiling of {name}", index / len(names), left)
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


def measure_allocator_ceiling(
    task: TaskRef,
    recipe: Recipe,
    share: float,
    *,
    device: str,
    seed: int,
    budget: float,
    plan: dict,
    facts: frozenset[str],
    processes: int = 1,
    deadline: float | None = None,
    watch: ProgressCallback = no_progress,
) -> Ceilings:
    """Compares the recipe with and without the method whose card states the ceiling "system_time".

    ``share`` is that of the CPU time that is spent in the operating system, ``plan`` that of ``Arm.build`` with
    ``build_seconds``, ``facts`` those that hold for the run: on a GPU no such method applies. A budget too small for
    one measurement gives a reason in ``not_measured``.
    """
    found = Ceilings()
    cards = {
        name: card for name, card in cards_that_state("ceiling").items() if not card.applies_to & FACTS.keys() - facts
    }
    name = next((name for name, card in cards.items() if card.ceiling == SYSTEM_TIME), None)
    if name is None or name in recipe.methods or not found.worth_measuring({SYSTEM_TIME: share}):
        return found
    building = 2 * plan["build_seconds"]
    least = building + MIN_PAIRS * 2 * max(BLOCK_SECONDS, BLOCK_STEPS * plan["step"])
    if budget < least:
        found.not_measured[SYSTEM_TIME] = f"the budget is spent; it would have taken {least:.0f} s"
        return found
    watch("the ceiling of the memory allocator", 0.0, budget)
    where = {"device": device, "processes": (processes, processes), "seed": seed, "deadline": deadline}
    try:
        tuned = recipe.with_method(name)
        comparison = run_interleaved(task, recipe, tuned, budget=budget - building, rounds=(1, 1), looks=LOOKS, **where)
        found.ratios[SYSTEM_TIME] = comparison.ratio
    except (RunError, ConfigurationError) as error:  # for example, the method has no effect here
        found.not_measured[SYSTEM_TIME] = str(error)
    return found


def _least_seconds(name: str, count: int, step: float) -> float:
    """Seconds that measuring a ceiling takes at least, with blocks of ``count`` steps of ``step`` seconds."""
    if name != LARGER_BATCH:
        return (1 + 2 * MIN_PAIRS * count) * step
    larger = BATCH_FACTOR * step  # at most
    return min(LARGER_BATCH_STEPS, warm_up_steps(larger) + 1 + MIN_PAIRS) * larger


def _measure_ceiling(probe: Worker | WorkerGroup, name: str, count: int, extra: float, budget: float) -> Ratio:
    """Runs blocks with and without a phase in turn, until the ratio is known or the budget is spent."""
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
