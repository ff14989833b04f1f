"""Ratio of paired block times with a confidence interval, and a verdict that accounts for repeated looks."""

import math
from dataclasses import asdict, dataclass
from statistics import fmean, stdev, variance

from scipy.special import stdtrit  # the t quantile; to import scipy.stats takes a second

from hasten.reporting.result_schema import Interval

LOOKS = (6, 9, 14, 21, 32, 48)  # numbers of pairs after which a comparison may stop
ERROR = 0.05  # probability of a wrong verdict over all looks
TRIMMED = 0.1  # fraction of the pairs dropped at each end, against bursts of other processes

FASTER, SLOWER, SAME, UNSURE = "faster", "slower", "no difference", "unsure"


@dataclass(frozen=True)
class Ratio:
    """A ratio of times with its confidence interval; above 1 the second arm is faster."""

    median: float
    low: float
    high: float

    def to_json(self) -> Interval:
        return Interval(**asdict(self))

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def ratio_of(a: list[float], b: list[float], error: float = ERROR / len(LOOKS)) -> Ratio:
    """The ratio a / b of paired block times: trimmed mean of the logarithms with a t interval (Yuen 1974).

    Args:
        a: seconds of the blocks of the first arm, for equal work.
        b: seconds of the paired blocks of the second arm.
        error: probability that the interval misses the ratio. The default is that of one look, so that a comparison
            which stops at the first sure look errs in at most one case of twenty (Bonferroni over the looks).
    """
    logs = sorted(math.log(x / y) for x, y in zip(a, b, strict=True))
    count = len(logs)
    cut = int(TRIMMED * count) if count >= 10 else 0
    trimmed = logs[cut : count - cut]
    center = fmean(trimmed)
    winsorized = [trimmed[0]] * cut + trimmed + [trimmed[-1]] * cut
    degrees = len(trimmed) - 1
    standard_error = math.sqrt(variance(winsorized) * (count - 1) / (len(trimmed) * degrees))
    return _interval(center, float(stdtrit(degrees, 1 - error / 2)) * standard_error)


def with_evaluations(steps: Ratio, shares: tuple[float, float], errors: list[float], pairs: int, error: float) -> Ratio:
    """The ratio of runs with evaluations, from the ratio of the training steps (measured with ``pairs`` blocks).

    ``shares`` are the seconds of evaluation per second of training steps of (a, b), ``errors`` the standard errors of
    their logarithms. Three independent errors add up (delta method), each weighted by its part of the run: that of the
    ratio of the steps, and those of the evaluations of both arms.
    """
    parts = [share / (1 + share) for share in shares]
    center = math.log(steps.median) + math.log1p(shares[0]) - math.log1p(shares[1])
    quantile = float(stdtrit(pairs - 1, 1 - error / 2))
    of_steps = (1 - sum(parts) / 2) * math.log(steps.high / steps.low) / 2
    of_evaluations = [quantile * part * error for part, error in zip(parts, errors, strict=True)]
    return _interval(center, math.hypot(of_steps, *of_evaluations))


def _interval(center: float, half_width: float) -> Ratio:
    """The Ratio exp(center), with the interval exp(center - half_width) to exp(center + half_width)."""
    return Ratio(math.exp(center), math.exp(center - half_width), math.exp(center + half_width))


def verdict_of(ratio: Ratio) -> str:
    """FASTER or SLOWER: the second arm surely is; SAME: equal within 2 %; UNSURE: the interval is too wide."""
    if ratio.low > 1.01:
        return FASTER
    if ratio.high < 0.99:
        return SLOWER
    if ratio.low > 0.98 and ratio.high < 1.02:
        return SAME
    return UNSURE


def spread(seconds: list[float]) -> float:
    """Standard deviation of the logarithms of the times: noise as a fraction (0.05: about 5 %)."""
    return stdev(map(math.log, seconds)) if len(seconds) > 1 else 0.0
