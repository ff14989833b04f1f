"""The test that a recipe must pass before it may be called as good as the original.

It is a test of non-inferiority: the margin is stated before anything is tried, the seeds are paired and
fresh, and the lower end of the difference must stay inside the margin. An arm that is cheap may be run on
further seeds: its own mean is then known better. It fails closed: whatever is missing, constant or not a
number has not passed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import fmean, variance

from scipy.special import stdtr, stdtrit

LOOKS = (3, 5, 8)  # seeds after which the gate may be asked
ERROR = 0.05  # chance that harm of a whole margin passes, over all looks of all attempts together
RELATIVE_MARGIN = 0.005  # of the baseline's metric, where the user states none
FEWEST_SEEDS = LOOKS[0]


@dataclass(frozen=True)
class NonInferiorityResult:
    """What the seeds say so far. ``settled``: more seeds would not change it."""

    baseline: float | None
    tuned: float | None
    margin: float
    difference: dict | None  # mean, low, high; positive is better, whatever the metric's direction
    seeds: list[int]
    passed: bool
    settled: bool
    why: str

    def to_json(self) -> dict:
        return asdict(self)


def resolve_margin(metric: float, margin: float | None) -> float:
    """The margin in the metric's own unit: the user's, or a share of what the baseline reaches."""
    return margin if margin is not None else RELATIVE_MARGIN * abs(metric)


def confidence_of(attempt: int = 0) -> float:
    """One-sided confidence asked at each look: the first recipe that is confirmed gets 3/4 of the error, the next 3/16, ..."""
    return 1 - 0.75 * ERROR / 4**attempt / len(LOOKS)


def quality_gate(
    baseline: dict[int, float],
    tuned: dict[int, float],
    *,
    margin: float,
    higher_is_better: bool,
    more_baseline: list[float] = (),
    confidence: float | None = None,
) -> NonInferiorityResult:
    """Is the tuned metric not worse than the baseline's by more than the margin?

    Args:
        baseline, tuned: final metric by fresh seed; so many must be in both, further ones tell more of their own arm.
        margin: how much worse counts as no worse, in the metric's unit.
        more_baseline: final metrics of the baseline at other seeds; they tell of its spread, not of its level.
        confidence: one-sided, of this look; see ``confidence_of``.
    """
    confidence = confidence or confidence_of()
    seeds = sorted(baseline.keys() & tuned.keys())
    if not seeds:
        return _not_passed("no seed was run to its end by both arms", margin)
    before, after = list(baseline.values()), list(tuned.values())
    if bad := [value for value in before + after if value is None or not math.isfinite(value)]:
        return _not_passed(f"a metric is {bad[0]}", margin, seeds, settled=True)
    if len(seeds) >= FEWEST_SEEDS and len(set(before + after + list(more_baseline))) == 1:
        return _not_passed(
            f"the metric is {before[0]:g} whatever the seed and the arm: it measures nothing",
            margin,
            seeds,
            settled=True,
        )

    sign = 1 if higher_is_better else -1
    mean = sign * (fmean(after) - fmean(before))
    known = before + list(more_baseline)
    if len(after) < 2 or len(known) < 2:
        return NonInferiorityResult(
            fmean(before), fmean(after), margin, None, seeds, False, False, "one seed tells nothing about the spread"
        )
    error, freedom = _standard_error(known, after, len(before))
    if not error:
        return _not_passed(
            "no seed changes the metric of either arm: it measures nothing",
            margin,
            seeds,
            settled=len(seeds) >= FEWEST_SEEDS,
        )
    reach = float(stdtrit(freedom, confidence)) * error
    low, high = mean - reach, mean + reach
    passed = len(seeds) >= FEWEST_SEEDS and low > -margin
    hopeless = high < -margin
    further = f" and {len(after) - len(seeds)} more of the recipe alone" if len(after) > len(seeds) else ""
    words = f"over {len(seeds)} paired seeds{further} the metric changes by {mean:+.4g} ({low:+.4g} at worst) against a margin of {margin:.4g}"
    if not passed and len(seeds) >= FEWEST_SEEDS:
        chance = float(stdtr(freedom, (mean + margin) / error))
        words += f"; the chance that it stays inside is {chance:.0%}, and {confidence:.1%} is asked"
    difference = {"mean": mean, "low": low, "high": high}
    return NonInferiorityResult(
        fmean(before), fmean(after), margin, difference, seeds, passed, passed or hopeless, words
    )


def _standard_error(baseline: list[float], tuned: list[float], fresh: int) -> tuple[float, float]:
    """(standard error of the difference of means, degrees of freedom) after Welch and Satterthwaite.

    ``baseline`` holds more metrics than the ``fresh`` ones whose mean is compared: they tell of its spread. The tuned
    arm never counts as calmer than the baseline. That paired seeds go up and down together is not made use of.
    """
    of_baseline = variance(baseline)
    of_means = of_baseline / fresh, max(variance(tuned), of_baseline) / len(tuned)
    doubt = of_means[0] ** 2 / (len(baseline) - 1) + of_means[1] ** 2 / (len(tuned) - 1)
    return math.sqrt(sum(of_means)), sum(of_means) ** 2 / doubt if doubt else 1.0


def equal_by_construction(gate: NonInferiorityResult, proof: dict, fewest: int = FEWEST_SEEDS) -> NonInferiorityResult:
    """The gate of a recipe whose composition was proven exact on this very task: the seeds, so many at least, need only not contradict.

    Rounding alone lets long runs end apart, as other seeds would; only a metric that is surely worse contradicts the proof.
    """
    if gate.difference is None or gate.passed or len(gate.seeds) < fewest or gate.difference["high"] < 0:
        return gate
    why = f"proven exact ({proof['why']}); over {len(gate.seeds)} paired seeds the metric changes by {gate.difference['mean']:+.4g}"
    return replace(gate, passed=True, settled=True, why=why)


def _not_passed(why: str, margin: float, seeds: list[int] = (), settled: bool = False) -> NonInferiorityResult:
    return NonInferiorityResult(None, None, margin, None, list(seeds), False, settled, why)
