"""How long a block of steps is, so that it can be timed and represents a whole run."""

import math
from collections.abc import Sequence
from typing import Any

from hasten.core.errors import RunError
from hasten.core.recipe import Recipe

BLOCK_SECONDS = 0.3  # at which timer resolution and process switches are negligible
MIN_BLOCK_SECONDS = 0.15  # of the faster arm, if both train on the same number of samples
BLOCK_STEPS = 5
LONG_BLOCK_SECONDS = 3.0  # if five steps take longer, a block has fewer steps
MIN_PAIRS = 3  # of blocks
SYNC_PERIOD_BUDGETS = 4  # budgets that MIN_PAIRS blocks of whole synchronization periods may take


def block_steps(plan: dict[str, Any]) -> int:
    """Number of steps of a block: long enough to be timed, and a multiple of the synchronization period."""
    step = max(plan["step"], 1e-6)
    enough = math.ceil(BLOCK_SECONDS / step)
    at_most = max(1, int(LONG_BLOCK_SECONDS / step))
    period = plan["sync_period"]
    return period * math.ceil(max(enough, min(BLOCK_STEPS, at_most)) / period)


def block_samples(plans: Sequence[dict[str, Any]]) -> float:
    """Number of training samples of a block, the same for two arms with these plans.

    The slower arm takes BLOCK_SECONDS, or longer so that the faster one takes MIN_BLOCK_SECONDS and both take
    BLOCK_STEPS, but at most LONG_BLOCK_SECONDS. It is at least a whole synchronization period of either arm.
    """
    fast, slow = sorted(max(plan["step"], 1e-6) / plan["samples_per_step"] for plan in plans)
    steps = BLOCK_STEPS * max(plan["samples_per_step"] for plan in plans)
    enough = max(BLOCK_SECONDS / slow, MIN_BLOCK_SECONDS / fast, steps)
    period = max(plan["samples_per_step"] * plan["sync_period"] for plan in plans)
    return period * max(1, math.ceil(min(enough, LONG_BLOCK_SECONDS / slow) / period - 1e-9))


def check_blocks_are_fair(
    recipe: Recipe, plan: dict[str, Any], steps: int, longest: float, min_blocks: int = MIN_PAIRS
) -> None:
    """Checks that blocks represent a whole run: each must contain whole synchronization periods.

    Raises:
        RunError: ``min_blocks`` blocks of ``steps`` steps take longer than ``longest`` seconds, or the first steps of
            the recipe differ from the others.
    """
    seconds = min_blocks * steps * plan["step"]
    if plan["warmup_steps"]:
        raise RunError(
            f"the first {plan['warmup_steps']} steps of {recipe} differ from the others, so blocks cannot "
            "represent a run; compare without warmup steps"
        )
    if plan["sync_period"] > 1 and seconds > longest:
        raise RunError(
            f"{recipe} synchronizes every {plan['sync_period']} steps, so that {min_blocks} fair blocks take "
            f"{seconds:.0f} s, and the budget allows {longest:.0f} s; give a larger budget"
        )


def evaluation_seconds_per_sample(plan: dict[str, Any], evaluation: float | None) -> float:
    """Seconds of evaluation per training sample, if one evaluation takes ``evaluation`` seconds."""
    interval = plan["evaluate_every"] or plan["samples_per_epoch"]
    return evaluation / interval if evaluation and interval else 0.0
