"""The quality gate: the non-inferiority test that a recipe must pass to be reported as good as the original.

The margin is fixed before a changed training is tried, the seeds are paired and fresh, and the lower end of the
difference must stay inside the margin. An arm that is cheap may be run on further seeds: its own mean is then known
better. The gate fails closed: a missing, constant or non-finite metric has not passed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev, variance

from scipy.special import stdtr, stdtrit

LOOKS = (3, 5, 8, 12)  # seeds after which the gate may be asked
ALPHA = 0.05  # chance that a harm of one margin passes, over all looks of all attempts together
RELATIVE_MARGIN = 0.005  # of the baseline's metric; the default margin
MIN_SEEDS = LOOKS[0]
MOST_PAIRS = 100  # that are considered when the seeds are stated that a proof would take
LAST_EVALUATIONS = 3  # whose mean is the final metric of a run, where the curves of both arms are flat
FLAT = 0.25  # margins by which the last evaluation of a flat curve may differ from that mean, averaged over the runs


@dataclass(frozen=True)
class NonInferiorityResult:
    """What the quality gate found after some seeds: whether the recipe is worse by no more than the margin."""

    baseline: float | None  # mean of the final metrics
    tuned: float | None  # the same, with the recipe
    margin: float  # in the metric's unit
    difference: dict[str, float] | None  # mean, low and high; positive is better, whatever the metric's direction
    seeds: list[int]  # those that both arms were run on
    passed: bool  # the recipe is not worse by more than the margin
    settled: bool  # more seeds would not change the result
    why: str  # the reason, in words

    def to_json(self) -> dict:
        return asdict(self)


def not_passed(why: str, margin: float, seeds: Sequence[int] = (), settled: bool = False) -> NonInferiorityResult:
    """A result that has not passed, for the reason ``why``, without metrics to compare."""
    return NonInferiorityResult(None, None, margin, None, list(seeds), False, settled, why)


def resolve_margin(metrics: Sequence[float], margin: float | None, resolution: float = 0.0) -> tuple[float, str]:
    """(margin in the metric's unit, the reason for it in words).

    The user's margin, else the larger of RELATIVE_MARGIN of the baseline's metric and its spread between seeds; but
    at least the ``resolution`` of the metric, the smallest step that its values can show.
    """
    relative, spread = RELATIVE_MARGIN * abs(fmean(metrics)), stdev(metrics) if len(metrics) > 1 else 0.0
    if margin is not None:
        size, why = margin, "as given by --margin"
    elif spread > relative:
        size, why = spread, "one standard deviation between seeds: no worse than another seed would be"
    else:
        size, why = relative, f"{RELATIVE_MARGIN:.1%} of the metric"
    return (size, why) if size >= resolution else (resolution, "the last digit of the metric as it is printed")


def final_metrics(
    baseline: Mapping[int, Mapping], tuned: Mapping[int, Mapping], margin: float, higher_is_better: bool
) -> list[dict[int, float]]:
    """The final metric of each run by seed: [of the baseline, of the recipe].

    It is the mean of the last evaluations, which varies less from seed to seed than the last one; unless the original
    still improves at its end, or the curve of the recipe is not flat there. Then it is the last one of both arms. Runs
    hold ``metric`` and ``evaluations``.
    """
    arms, sign = (baseline, tuned), 1 if higher_is_better else -1
    last = [{seed: run["metric"] for seed, run in arm.items()} for arm in arms]
    ends = [{seed: _mean_at_end(run) for seed, run in arm.items()} for arm in arms]
    of_baseline, of_tuned = (
        sign * fmean([arm[seed] - end[seed] for seed in arm] or [0.0]) for arm, end in zip(last, ends, strict=True)
    )
    # where an original gets worse at its end, the mean favors it and is the stricter measure
    is_flat = of_baseline <= FLAT * margin and abs(of_tuned) <= FLAT * margin  # false if one is not finite
    return ends if is_flat else last


def _mean_at_end(run: Mapping) -> float:
    """Mean of the last evaluations of a run; NaN if it has too few that are finite to be called flat."""
    metrics = [evaluation["metric"] for evaluation in run.get("evaluations", ())][-LAST_EVALUATIONS:]
    is_known = len(metrics) == LAST_EVALUATIONS and None not in metrics
    return fmean(metrics) if is_known else math.nan


def confidence_of(attempt: int = 0, looks: int = len(LOOKS), earlier: int = 0) -> float:
    """One-sided confidence of each of ``looks`` looks at a recipe.

    The first recipe gets 3/4 of the error, the next 3/16, and so on. Of its own error a recipe spends 3/4 when it is
    confirmed for the first time, 3/16 where a search that continues confirms it again (``earlier`` is 1), and so on.
    """
    error = ALPHA * 0.75 / 4**attempt * 0.75 / 4**earlier
    return 1 - error / looks


def quality_gate(
    baseline: Mapping[int, float],
    tuned: Mapping[int, float],
    *,
    margin: float,
    higher_is_better: bool,
    more_baseline: Sequence[float] = (),
    confidence: float | None = None,
) -> NonInferiorityResult:
    """Tests that the tuned metric is not worse than the baseline's by more than the margin.

    Args:
        baseline: final metric of the original by fresh seed.
        tuned: final metric of the recipe; MIN_SEEDS seeds must be in both, further ones inform about their own arm.
        margin: how much worse counts as no worse, in the metric's unit.
        higher_is_better: the direction of the metric.
        more_baseline: final metrics of the baseline at other seeds; they inform about its spread, not its mean.
        confidence: one-sided, of this look; see ``confidence_of``.
    """
    confidence = confidence or confidence_of()
    seeds = sorted(baseline.keys() & tuned.keys())
    enough = len(seeds) >= MIN_SEEDS
    if not seeds:
        return not_passed("no seed was run to its end by both arms", margin)
    before, after = list(baseline.values()), list(tuned.values())
    bad = [value for value in before + after if value is None or not math.isfinite(value)]
    if bad:
        return not_passed(f"a metric is {bad[0]}", margin, seeds, settled=True)
    if enough and len({*before, *after, *more_baseline}) == 1:
        why = f"the metric is {before[0]:g} whatever the seed and the arm: it measures nothing"
        return not_passed(why, margin, seeds, settled=True)

    means = fmean(before), fmean(after)
    known = [*before, *more_baseline]
    if len(after) < 2 or len(known) < 2:
        why = "one seed is too few to estimate the spread"
        return NonInferiorityResult(*means, margin, None, seeds, False, False, why)
    error, freedom = _standard_error(known, after, len(before))
    if not error:
        why = "no seed changes the metric of either arm: it measures nothing"
        return not_passed(why, margin, seeds, settled=enough)
    mean = (means[1] - means[0]) * (1 if higher_is_better else -1)
    half_width = float(stdtrit(freedom, confidence)) * error
    low, high = mean - half_width, mean + half_width
    passed = enough and low > -margin
    further = f" and {len(after) - len(seeds)} more of the recipe alone" if len(after) > len(seeds) else ""
    why = (
        f"over {len(seeds)} paired seeds{further} the metric changes by {mean:+.4g} ({low:+.4g} at worst) "
        f"against a margin of {margin:.4g}"
    )
    if not passed and enough:
        chance = float(stdtr(freedom, (mean + margin) / error))
        why += f"; the chance that it stays inside is {chance:.1%}, and {confidence:.2%} is required"
    difference = {"mean": mean, "low": low, "high": high}
    return NonInferiorityResult(*means, margin, difference, seeds, passed, passed or high < -margin, why)


def pairs_needed(result: NonInferiorityResult, confidence: float, later: float) -> float:
    """Number of paired seeds with which a result would pass if mean and spread stay as they are; infinite if it ends
    worse by the margin, or if MOST_PAIRS are not enough.

    Args:
        result: of at least two paired seeds, with a difference.
        confidence: one-sided, at which its difference is stated.
        later: the same, of the look that is to pass.
    """
    assert result.difference is not None
    mean, low, pairs = result.difference["mean"], result.difference["low"], len(result.seeds)
    error = (mean - low) / float(stdtrit(2 * pairs - 2, confidence))
    for more in range(pairs + 1, MOST_PAIRS + 1):
        if mean - float(stdtrit(2 * more - 2, later)) * error * math.sqrt(pairs / more) > -result.margin:
            return more
    return math.inf


def _standard_error(baseline: list[float], tuned: list[float], fresh: int) -> tuple[float, float]:
    """(standard error of the difference of means, degrees of freedom) after Welch and Satterthwaite.

    ``baseline`` holds more metrics than the ``fresh`` ones whose mean is compared: they inform about its spread. The
    tuned arm is never assumed to vary less than the baseline. The correlation of paired seeds is not used.
    """
    of_baseline = variance(baseline)
    of_means = of_baseline / fresh, max(variance(tuned), of_baseline) / len(tuned)
    denominator = of_means[0] ** 2 / (len(baseline) - 1) + of_means[1] ** 2 / (len(tuned) - 1)
    return math.sqrt(sum(of_means)), sum(of_means) ** 2 / denominator if denominator else 1.0
