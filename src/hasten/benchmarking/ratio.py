"""Ratio of paired block times with a confidence interval, and a verdict that accounts for repeated looks.

Two processes of the same recipe differ: each keeps a speed of its own (memory placement, threads). So the interval has
two parts, the variance between the blocks of one pair of processes and the variance between pairs. A round is one fresh
pair of processes with its blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev, variance

from scipy.special import stdtrit  # the t quantile; to import scipy.stats takes a second

from hasten.reporting.result_schema import Interval

LOOKS = (6, 9, 14, 21, 32, 48)  # numbers of pairs of blocks after which a comparison of one round may stop
ROUND_LOOKS = (1, 3, 4, 6, 8, 12, 16)  # numbers of rounds after which a comparison of several may stop
ALPHA = 0.05  # probability of a wrong verdict over all looks
TRIMMED = 0.1  # fraction of the pairs dropped at each end, against bursts of other processes
TRIMMED_OF_ROUND = 0.2  # the same within a round, which has few pairs

# Standard deviation of the log ratio of two processes of the same recipe, and the degrees of freedom that this prior
# knowledge counts for beside the rounds of a comparison. It differs from task to task: seen in 16 self-comparisons each
# of steps of 0.5, 2 and 18 ms on two cores, 0.015, 0.045 and 0.037. Checked with the 337 rounds of 68 self-comparisons
# by benchmarks/a_against_a.py on two busy cores, where the rounds differed by up to 0.08: as comparisons of their own,
# 8 of the single rounds gave a verdict (2 %), and so did 1 of the 68 comparisons of up to five rounds.
# Several rounds show their own spread, so that the prior counts less there. On another machine the rounds of the task
# of 2 ms differed by 0.14: each process spends long times in a state in which its allocator gives memory back to the
# kernel and gets it again in every step. There a prior of 6 degrees was wrong in 5 % of the comparisons, one of 3 in
# 2.5 %; the intervals of the other tasks are hardly wider with it.
PROCESS_SPREAD = 0.03
DEGREES_OF_A_SINGLE_ROUND = 6
DEGREES_BESIDE_ROUNDS = 3

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


def ratio_of(a: list[float], b: list[float], alpha: float = ALPHA / len(LOOKS)) -> Ratio:
    """The ratio a / b of paired block times: trimmed mean of the logarithms with a t interval (Yuen 1974).

    Args:
        a: seconds of the blocks of the first arm, for equal work.
        b: seconds of the paired blocks of the second arm.
        alpha: probability that the interval misses the ratio. The default is that of one look, so that a comparison
            which stops at the first sure look errs in at most one case of twenty (Bonferroni over the looks).
    """
    center, standard_error, degrees = _trimmed_mean(_log_ratios(a, b), TRIMMED)
    return _interval(center, float(stdtrit(degrees, 1 - alpha / 2)) * standard_error)


def ratio_of_rounds(rounds: Sequence[tuple[list[float], list[float]]], alpha: float) -> Ratio:
    """The ratio a / b from several rounds, each given as the arguments of ``ratio_of``.

    The mean over the rounds of their trimmed mean log ratios, with a t interval. The variance of a round's mean is
    pooled from the spread of the rounds and from PROCESS_SPREAD, which counts as a few further rounds: so there is an
    interval for one round as well, and one for three is not as wide as t with two degrees.
    """
    means, errors, _ = zip(*(_trimmed_mean(_log_ratios(*times), TRIMMED_OF_ROUND) for times in rounds), strict=True)
    center, degrees = fmean(means), degrees_of_rounds(len(rounds))
    prior = PROCESS_SPREAD**2 + fmean(error**2 for error in errors)
    between = math.fsum((mean - center) ** 2 for mean in means)
    variance_of_round = ((degrees - len(rounds) + 1) * prior + between) / degrees
    return _interval(center, float(stdtrit(degrees, 1 - alpha / 2)) * math.sqrt(variance_of_round / len(rounds)))


def degrees_of_rounds(rounds: int) -> int:
    """Degrees of freedom of the interval of ``ratio_of_rounds``."""
    return (DEGREES_OF_A_SINGLE_ROUND if rounds == 1 else DEGREES_BESIDE_ROUNDS) + rounds - 1


def _log_ratios(a: list[float], b: list[float]) -> list[float]:
    return [math.log(x / y) for x, y in zip(a, b, strict=True)]


def _trimmed_mean(values: list[float], share: float) -> tuple[float, float, int]:
    """(mean without ``share`` of the values at each end, its standard error, its degrees of freedom) by Yuen (1974).

    Nothing is dropped where that would be less than one value at each end.
    """
    ordered, count = sorted(values), len(values)
    cut = int(share * count)
    trimmed = ordered[cut : count - cut]
    winsorized = [trimmed[0]] * cut + trimmed + [trimmed[-1]] * cut
    degrees = len(trimmed) - 1
    return fmean(trimmed), math.sqrt(variance(winsorized) * (count - 1) / (len(trimmed) * degrees)), degrees


def with_evaluations(
    steps: Ratio, shares: tuple[float, float], errors: list[float], degrees: int, alpha: float
) -> Ratio:
    """The ratio of runs with evaluations, from the ratio of the training steps (with ``degrees`` of freedom).

    ``shares`` are the seconds of evaluation per second of training steps of (a, b), ``errors`` the standard errors of
    their logarithms. Three independent errors add up (delta method), each weighted by its part of the run: that of the
    ratio of the steps, and those of the evaluations of both arms.
    """
    parts = [share / (1 + share) for share in shares]
    center = math.log(steps.median) + math.log1p(shares[0]) - math.log1p(shares[1])
    quantile = float(stdtrit(degrees, 1 - alpha / 2))
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
