"""When a run has reached its target; imports no torch, because the report needs it, too."""

from collections.abc import Sequence


def first_sustained_target(metrics: Sequence[float | None], target: float | None, higher: bool) -> int | None:
    """Index of the first evaluation at the target whose next one, if any, is too; None if there is none."""
    if target is None:
        return None
    reached = [metric is not None and (metric >= target if higher else metric <= target) for metric in metrics]
    return next((i for i, yes in enumerate(reached) if yes and all(reached[i + 1 : i + 2])), None)
