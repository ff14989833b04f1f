"""The test that a recipe must pass before it may be called as good as the original.

It is a test of non-inferiority: the margin is stated before anything is tried, the seeds are paired and
fresh, and the lower end of the difference must stay inside the margin. It fails closed: whatever is
missing, constant or not a number has not passed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import fmean, variance

from scipy.special import stdtr, stdtrit

LOOKS = (3, 5, 8)  # seeds after which the gate may be asked
CONFIDENCE = 1 - 0.05 / len(LOOKS)  # one-sided, at each look: all looks together err in at most one case of twenty
RELATIVE_MARGIN = 0.005  # of the baseline's metric, where the user states none
FEWEST_SEEDS = LOOKS[0]


@dataclass(frozen=True)
class Gate:
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


def stated_margin(metric: float, margin: float | None) -> float:
    """The margin in the metric's own unit: the user's, or a share of what the baseline reaches."""
    return margin if margin is not None else RELATIVE_MARGIN * abs(metric)


def quality_gate(
    baseline: dict[int, float], tuned: dict[int, float], *, margin: float, higher_is_better: bool, more_baseline: list[float] = ()
) -> Gate:
    """Is the tuned metric not worse than the baseline's by more than the margin?

    Args:
        baseline, tuned: final metric by seed; only seeds that both have are compared.
        margin: how much worse counts as no worse, in the metric's unit.
        more_baseline: final metrics of the baseline at other seeds; they tell of its spread, not of its level.

    The standard error pools the seed-to-seed variance of both arms (few seeds need a borrowed variance).
    """
    seeds = sorted(baseline.keys() & tuned.keys())
    if not seeds:
        return _not_passed("no seed was run to its end by both arms", margin)
    before, after = [baseline[seed] for seed in seeds], [tuned[seed] for seed in seeds]
    if bad := [value for value in before + after if value is None or not math.isfinite(value)]:
        return _not_passed(f"a metric is {bad[0]}", margin, seeds, settled=True)
    if len(seeds) >= FEWEST_SEEDS and len(set(before + after + list(more_baseline))) == 1:
        return _not_passed(f"the metric is {before[0]:g} whatever the seed and the arm: it measures nothing", margin, seeds, settled=True)

    sign = 1 if higher_is_better else -1
    mean = sign * (fmean(after) - fmean(before))
    groups = [group for group in (before + list(more_baseline), after) if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return Gate(fmean(before), fmean(after), margin, None, seeds, False, False, "one seed tells nothing about the spread")
    pooled = sum((len(group) - 1) * variance(group) for group in groups) / freedom
    error = math.sqrt(pooled * 2 / len(seeds))
    reach = float(stdtrit(freedom, CONFIDENCE)) * error
    low, high = mean - reach, mean + reach
    difference = {"mean": mean, "low": low, "high": high}
    passed = len(seeds) >= FEWEST_SEEDS and low > -margin
    hopeless = high < -margin
    chance = float(stdtr(freedom, (mean + margin) / error)) if error else float(mean > -margin)
    words = f"over {len(seeds)} paired seeds the metric changes by {mean:+.4g} ({low:+.4g} at worst) against a margin of {margin:.4g}"
    if not passed and len(seeds) >= FEWEST_SEEDS:
        words += f"; the chance that it stays inside is {chance:.0%}, and {CONFIDENCE:.1%} is asked"
    return Gate(fmean(before), fmean(after), margin, difference, seeds, passed, passed or hopeless, words)


def proven(gate: Gate, proof: dict) -> Gate:
    """The gate of a recipe whose composition was proven exact on this very task: the seeds need only not contradict.

    Seeds that end alike are what such a proof promises, so their spread says nothing against it; means that
    lie further apart than the margin would.
    """
    if gate.difference is None or gate.passed or len(gate.seeds) < FEWEST_SEEDS or abs(gate.difference["mean"]) > gate.margin:
        return gate
    why = f"proven exact ({proof['why']}); over {len(gate.seeds)} paired seeds the metric changes by {gate.difference['mean']:+.4g}"
    return replace(gate, passed=True, settled=True, why=why)


def _not_passed(why: str, margin: float, seeds: list[int] = (), settled: bool = False) -> Gate:
    return Gate(None, None, margin, None, list(seeds), False, settled, why)
