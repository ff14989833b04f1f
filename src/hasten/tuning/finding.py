"""What a search has found: recipes, each with its speed-up and the evidence for it, and which of them to recommend."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.benchmarking.ratio import Ratio
from hasten.core.recipe import Recipe
from hasten.reporting.result_schema import EVIDENCE_LEVELS, FrontierRecipe
from hasten.utils.durations import duration_option, format_duration

EXACT, PRECISION, PROVEN, ESTIMATED = EVIDENCE_LEVELS  # strongest first
LEVELS = {"exact": EXACT, "precision": PRECISION, "proven": PROVEN, "estimated": ESTIMATED}  # as --evidence names them
DEFAULT_LEVEL = PROVEN  # weaker evidence is shown, and recommended only with ``--evidence estimated``
SURELY_FASTER = 1.01
SPARE, MOST_LONGER = 1.2, 10.0  # of the time that would make a comparison sure; the longest one, in times of the first
CONTINUED_SHARE = 0.5  # of the budget of a continued search, for the comparisons that an earlier one has left open


@dataclass
class Finding:
    """A recipe that is faster than the task's own training, and how sure that is.

    ``speedup`` is that of the whole training at the exact and precision levels, else that of the time to the target.
    """

    recipe: Recipe
    evidence: str  # one of EVIDENCE_LEVELS
    speedup: Ratio
    why: str
    training_speedup: Ratio | None = None  # of the whole training, where ``speedup`` is that of the time to the target
    quality: dict[str, float] | None = None  # difference of the metric: mean, low, high; positive is better
    to_prove: str = ""  # what the next level of evidence would take
    comparison: dict[str, Any] = field(default_factory=dict)  # of speed with the baseline, see ``Study.compare_speed``

    @property
    def gain(self) -> Ratio:
        return gain_of(self.speedup, self.training_speedup)

    @property
    def is_surely_faster(self) -> bool:
        return self.gain.low > SURELY_FASTER

    def dominates(self, other: "Finding") -> bool:
        """Whether this recipe is at least as fast and as good as the other, on evidence that is as strong."""
        as_sure = _rank(self.evidence) <= _rank(other.evidence)
        as_good = _mean(self.quality) >= _mean(other.quality)
        return as_sure and as_good and self.gain.median >= other.gain.median


def gain_of(to_target: Ratio, whole: Ratio | None) -> Ratio:
    """The speed-up that counts: ``surest``, but that of the whole training where it surely takes longer.

    A recipe that reaches the target sooner in slower steps, and then trains on as long as before, saves no time.
    """
    return whole if whole is not None and whole.high < 1 else surest(to_target, whole)


def surest(to_target: Ratio, whole: Ratio | None) -> Ratio:
    """Of the speed-ups in the time to the target and of the whole training, the one whose interval begins higher.

    A recipe may save time in either: it trains for a shorter time, or reaches the target sooner in the same time.
    """
    return to_target if whole is None or to_target.low >= whole.low else whole


def to_be_sure(speedup: Ratio, seconds: float) -> str:
    """What it would take to know that a recipe is faster, which a comparison of ``seconds`` left open; or ""."""
    needed = seconds_to_be_sure(speedup, seconds)
    budget = duration_option(needed / CONTINUED_SHARE)
    return f"a longer comparison, about {format_duration(needed)}: --budget +{budget}" if needed else ""


def seconds_to_be_sure(speedup: Ratio, seconds: float) -> float:
    """Seconds of a comparison that would show a recipe to be faster, where one of ``seconds`` has left it open; or 0.

    The interval of a comparison gets narrower with the square root of its time. 0 if that would hardly decide it.
    """
    if speedup.low > SURELY_FASTER or speedup.median <= SURELY_FASTER or speedup.high <= speedup.median:
        return 0.0
    width, distance = math.log(speedup.high / speedup.median), math.log(speedup.median / SURELY_FASTER)
    longer = (width / distance) ** 2
    return SPARE * longer * seconds if longer <= MOST_LONGER else 0.0


def frontier(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that may be faster than the task as it is and that no other dominates, the fastest first.

    Of the same recipe only the finding with the strongest evidence.
    """
    best: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda finding: _rank(finding.evidence)):
        best.setdefault(str(finding.recipe), finding)
    rest = [finding for finding in best.values() if finding.gain.high > 1]
    best_of_all = [one for one in rest if not any(other is not one and other.dominates(one) for other in rest)]
    return sorted(best_of_all, key=lambda finding: -finding.gain.median)


def recommended(findings: Sequence[Finding], level: str = DEFAULT_LEVEL) -> Finding | None:
    """The fastest finding with evidence at ``level`` or stronger that is surely faster; None if there is none."""
    enough = [one for one in findings if one.is_surely_faster and _rank(one.evidence) <= _rank(level)]
    return max(enough, key=lambda finding: finding.gain.median, default=None)


def frontier_rows(findings: Sequence[Finding], chosen: Finding | None, strong: Finding | None) -> list[FrontierRecipe]:
    """The frontier for result.json, with the baseline and the strong baseline among its recipes."""
    if strong is not None:
        findings = [finding for finding in findings if finding is chosen or finding.recipe != strong.recipe]
    rows = [_row(finding, "recommended" if finding is chosen else "") for finding in findings]
    rows += [_row(strong, "strong baseline")] if strong is not None else []
    return [*rows, _row(Finding(Recipe(), "", Ratio(1.0, 1.0, 1.0), ""), "baseline")]


def _row(finding: Finding, role: str) -> FrontierRecipe:
    return FrontierRecipe(
        recipe=finding.recipe.methods,
        text=str(finding.recipe),
        role=role,
        evidence=finding.evidence,
        speedup=finding.speedup.to_json(),
        training_speedup=finding.training_speedup and finding.training_speedup.to_json(),
        quality=finding.quality,  # pyright: ignore[reportArgumentType]
        why=finding.why,
        to_prove=finding.to_prove,
    )


def _rank(evidence: str) -> int:
    return list(EVIDENCE_LEVELS).index(evidence)


def _mean(quality: dict[str, float] | None) -> float:
    """Mean change of the metric; 0 where the training is the same, so that none was measured."""
    return quality["mean"] if quality else 0.0
