"""A race against a recorded learning curve: when is a training so far behind that it can no longer win?

The curve is that of the best recipe so far. A training is behind if the best recipe had reached its best metric in less
than half the time. It may catch up as long as little time has passed: a warm-up is slow.
"""

from collections.abc import Sequence

LEAD = 2.0  # times as fast
FIRST_SHARE = 1 / 3  # of the limit, before which nothing is behind

Curve = Sequence[tuple[float, float]]  # (seconds since the start, metric), by seconds


def is_behind(curve: Curve, seconds: float, metrics: Sequence[float | None], limit: float, sign: int) -> bool:
    """Whether a training with these ``metrics`` after ``seconds`` is behind the curve; never behind an empty one.

    After ``limit`` seconds it has lost in any case. ``sign`` is 1 if a higher metric is better, -1 if a lower one.
    """
    finite = [sign * metric for metric in metrics if metric is not None]
    if seconds < FIRST_SHARE * limit or not finite:
        return False
    reference = [sign * metric for at, metric in curve if at <= seconds / LEAD]
    return bool(reference) and max(finite) < max(reference)


def to_text(curve: Curve) -> str:
    """A curve as the option of a method, which is plain data."""
    return " ".join(f"{seconds:.4g}:{metric:.6g}" for seconds, metric in curve)


def from_text(text: str) -> list[tuple[float, float]]:
    """The curve that ``to_text`` wrote."""
    pairs = (pair.split(":") for pair in text.split())
    return [(float(seconds), float(metric)) for seconds, metric in pairs]
