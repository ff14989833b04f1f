"""From pairs of block times to a ratio with an interval, and a verdict that repeated looks do not inflate."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from scipy.special import stdtrit  # the t quantile without the second that scipy.stats takes to import

LOOKS = (6, 9, 14, 21, 32, 48)  # pairs after which one may stop
ERROR = 0.05  # chance of a wrong verdict over all looks together
TRIMMED = 0.1  # share of the pairs dropped at each end: a neighbour's burst is not the method's doing

FASTER, SLOWER, SAME, UNSURE = "faster", "slower", "no difference", "unsure"


@dataclass(frozen=True)
class Ratio:
    """A ratio of times with its interval; above 1 the second arm is faster."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def ratio_of(a: list[float], b: list[float], error: float = ERROR / len(LOOKS)) -> Ratio:
    """The ratio of neighbouring blocks: trimmed mean of log(a/b) with its t interval (Yuen 1974).

    Args:
        a, b: seconds (for equal work) of the first and the second arm, pair by pair.
        error: chance that the interval misses. The default is one look's share, so that a comparison that
            stops at the first sure look still errs in at most one case of twenty (Bonferroni over the looks).
    """
    logs = sorted(math.log(x / y) for x, y in zip(a, b, strict=True))
    count = len(logs)
    cut = int(TRIMMED * count) if count >= 10 else 0
    kept = logs[cut : count - cut]
    centre = sum(kept) / len(kept)
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    mean = sum(winsorised) / count
    variance = sum((x - mean) ** 2 for x in winsorised) / (count - 1)
    error_of_centre = math.sqrt(variance * (count - 1) / (len(kept) * (len(kept) - 1)))
    reach = float(stdtrit(len(kept) - 1, 1 - error / 2)) * error_of_centre
    return Ratio(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach))


def with_evaluations(steps: Ratio, shares: tuple[float, float], errors: list[float], pairs: int, error: float) -> Ratio:
    """The ratio of runs whose steps compare like ``steps`` and that evaluate besides.

    Args:
        shares: seconds that the evaluations of (a, b) take for every second of their steps.
        errors: standard error of the logarithm of these, of (a, b).
        pairs: of blocks, behind ``steps``; error: as for ``ratio_of``.

    Three independent errors add up (the delta method), each weighted by its part of the run: of the steps' ratio, and
    of either arm's evaluations.
    """
    parts = [share / (1 + share) for share in shares]
    centre = math.log(steps.median) + math.log1p(shares[0]) - math.log1p(shares[1])
    quantile = float(stdtrit(pairs - 1, 1 - error / 2))
    of_steps = (1 - sum(parts) / 2) * math.log(steps.high / steps.low) / 2
    reach = math.hypot(of_steps, *(quantile * part * each for part, each in zip(parts, errors, strict=True)))
    return Ratio(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach))


def verdict_of(ratio: Ratio) -> str:
    """What an interval says: the second arm is faster, slower, no different; or nobody can tell yet."""
    if ratio.low > 1.01:
        return FASTER
    if ratio.high < 0.99:
        return SLOWER
    if ratio.low > 0.98 and ratio.high < 1.02:
        return SAME
    return UNSURE


def spread(seconds: list[float]) -> float:
    """Standard deviation of the log times: how noisy the machine was, as a share."""
    logs = [math.log(x) for x in seconds]
    mean = sum(logs) / len(logs)
    return math.sqrt(sum((x - mean) ** 2 for x in logs) / max(1, len(logs) - 1))
