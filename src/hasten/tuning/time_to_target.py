"""The speed-up in the time to the target: samples of whole runs times the seconds per sample of a comparison.

A run takes start + samples x seconds per sample, its evaluations included. The samples are a property of recipe and
seed; the seconds per sample come from the interleaved comparison, which knows them far better than the clock of a run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, stdev
from typing import Any

from scipy.special import stdtrit

from hasten.benchmarking.ratio import Ratio

ERROR = 0.05  # probability that the interval misses the true value


@dataclass(frozen=True)
class Counts:
    """Samples that the runs of two arms trained.

    A seed says nothing about the other arm's samples (other batches, another schedule): the arms are independent draws,
    of different numbers of seeds perhaps.

    Attributes:
        baseline: (samples until the evaluation that counts, samples since the evaluation before it), a row a run.
        tuned: The same of the other arm.
    """

    baseline: list[tuple[int, int]]
    tuned: list[tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        return {"baseline": self.baseline, "tuned": self.tuned}

    def rounding(self) -> tuple[float, float]:
        """Of both arms, see ``_rounding``."""
        return _rounding(self.baseline), _rounding(self.tuned)


def time_to_target(comparison: dict, counts: Counts) -> tuple[Ratio, float, float]:
    """(speed-up in the time to the target, geometric mean seconds of a, of b) of two recipes.

    The interval of the speed-up adds the spread over the seeds and the interval of the comparison, as independent
    errors of a logarithm.

    Args:
        comparison: result of ``Study.compare_speed`` of a and b.
        counts: samples of the runs of a (``baseline``) and b (``tuned``).
    """
    ratio, start = comparison["ratio"], comparison["start_seconds"]
    a = comparison["seconds_per_1000_samples"]["a"] / 1000
    b = a / ratio["median"]
    times_a = [start["a"] + samples * a for samples, _ in counts.baseline]
    times_b = [start["b"] + samples * b for samples, _ in counts.tuned]
    half_width = (math.log(ratio["high"]) - math.log(ratio["low"])) / 2
    ratio = mean_ratio(times_a, times_b, counts.rounding(), half_width)
    return ratio, geometric_mean(times_a), geometric_mean(times_b)


def mean_ratio(
    a: Sequence[float], b: Sequence[float], rounding: tuple[float, float] = (0.0, 0.0), half_width: float = 0.0
) -> Ratio:
    """The ratio of the geometric mean times of two arms, one time a run, with its 95 % interval.

    Welch's t of the logs. The metric is evaluated now and then, so that each count is rounded up to the next
    evaluation: three equal counts leave 0.7 of the distance of two evaluations in doubt, more counts less.
    ``rounding``: see ``Counts.rounding``. ``half_width`` is that of the interval of an independent error of the
    logarithm, which is added.
    """
    logs_a, logs_b = ([math.log(seconds) for seconds in arm] for arm in (a, b))
    center, of_seeds = fmean(logs_a) - fmean(logs_b), 0.0
    if min(len(logs_a), len(logs_b)) > 1:
        arms = zip((logs_a, logs_b), rounding, strict=True)
        variances = [max(stdev(logs), least) ** 2 / len(logs) for logs, least in arms]
        variance = sum(variances)
        shares = [part**2 / (len(logs) - 1) for part, logs in zip(variances, (logs_a, logs_b), strict=True)]
        degrees = variance**2 / sum(shares) if variance else 1.0
        of_seeds = float(stdtrit(degrees, 1 - ERROR / 2)) * math.sqrt(variance)
    width = math.hypot(of_seeds, half_width)
    return Ratio(math.exp(center), math.exp(center - width), math.exp(center + width))


def samples_since_last_evaluation(run: dict, samples: int) -> int:
    """Training samples between the evaluation at ``samples`` and the one before it."""
    earlier = (evaluation["samples"] for evaluation in run["evaluations"] if evaluation["samples"] < samples)
    return samples - max(earlier, default=0)


def _rounding(rows: list[tuple[int, int]]) -> float:
    """The least standard deviation of the logarithm of an arm's counts, however alike its seeds are.

    The error of a count is uniform over the distance of two evaluations; its standard deviation is that / sqrt(12).
    """
    return fmean(since / max(1, samples) for samples, since in rows) / math.sqrt(12)
