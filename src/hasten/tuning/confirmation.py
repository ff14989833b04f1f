"""What is known of a recipe that is being confirmed: its runs, and the speed-up that follows from them."""

from dataclasses import dataclass, field

from hasten.benchmarking.ratio import Ratio
from hasten.core.recipe import Recipe
from hasten.tuning.finding import SURELY_FASTER, gain_of
from hasten.tuning.gate import LOOKS, NonInferiorityResult
from hasten.tuning.systems import is_disturbed
from hasten.tuning.time_to_target import Counts, mean_ratio, samples_since_last_evaluation, time_to_target

AGREEMENT = 0.9  # of the speed-up by blocks, which the measured runs must show
FAR_APART = 0.75  # of it: below, the measured runs count however much they spread
SUBSTITUTED = "substituted"  # key of a run in place of the original: the recipe, ``Baseline.substitute``, that made it

Ends = tuple[list[tuple[dict, dict]], list[tuple[dict, dict]]]  # of both arms: (run, its evaluation that counts)


@dataclass
class Confirmation:
    """The quality and speed-up of a recipe on seeds that the search has not seen."""

    recipe: Recipe
    gate: NonInferiorityResult
    speedup: Ratio | None = None  # to the target, by blocks (seconds) and runs (samples); or one of the next two
    measured_speedup: Ratio | None = None  # the same by the seconds of the runs
    training_speedup: Ratio | None = None  # of a whole training
    uses_measured: bool = False  # ``measured_speedup`` counts, because it is clearly lower
    over_strong_baseline: Ratio | None = None
    baseline_runs: dict[int, dict] = field(default_factory=dict)  # by seed
    tuned_runs: dict[int, dict] = field(default_factory=dict)  # by seed; there may be further seeds
    comparison: dict = field(default_factory=dict)  # of speed with the original, see ``Study.compare_speed``
    counts: Counts | None = None  # samples to the target
    seconds: dict[str, float] = field(default_factory=dict)  # to the target: baseline, strong_baseline, tuned
    confidence: float = 0.0  # one-sided, that each look of the gate requires
    looks: int = 0  # how many times the seeds were judged
    most_looks: int = len(LOOKS)
    over: bool = False  # more seeds would not change the result
    missed: bool = False  # a run missed the target that the original reaches: it cannot pass, whatever its final metric
    misses_on_average: bool = False  # the mean of its final metrics misses the target: it cannot pass either
    why: str = ""

    @property
    def paired(self) -> list[int]:
        """The seeds that both arms were run on."""
        return [seed for seed in self.baseline_runs if seed in self.tuned_runs]

    @property
    def gain(self) -> Ratio | None:
        """The speed-up that counts: to the target or of the whole training, see ``finding.gain_of``."""
        return self.speedup and gain_of(self.speedup, self.training_speedup)

    @property
    def passed(self) -> bool:
        """Whether the recipe passed the quality gate and is surely faster, also without other programs."""
        is_faster = self.gain is not None and self.gain.low > SURELY_FASTER and not is_disturbed(self.comparison)
        return not self.missed and self.gate.passed and is_faster

    def beats(self, other: "Confirmation") -> bool:
        """Whether this recipe passed and is faster than the other, which passed."""
        gains = self.gain, other.gain
        return self.passed and gains[0] is not None and gains[1] is not None and gains[0].median > gains[1].median

    def finish(self, why: str) -> None:
        self.over, self.why = True, why


def misses_target(run: dict) -> bool:
    """Whether a run never reached the target, or did not hold it."""
    return run["seconds_to_target"] is None


def compute_speedups(attempt: Confirmation) -> tuple[Ratio, Ratio]:
    """Sets the samples, seconds and speed-ups of an attempt; (gain, speed-up by the blocks).

    If the measured seconds of the runs show clearly less than the model of ``time_to_target.py``, a run pays for
    something that no block shows (a first epoch that fills a cache, a late compilation, a run that ends before it is
    warm): then these count. Runs of a substitute say nothing about the seconds of the original, and are left out.
    """
    ends = _at_target(list(attempt.baseline_runs.values()), list(attempt.tuned_runs.values()))
    counts = attempt.counts = Counts(_counts(ends[0]), _counts(ends[1]))
    blocks, attempt.seconds["baseline"], attempt.seconds["tuned"] = time_to_target(attempt.comparison, counts)
    measured = _measured(ends)
    # both are rounded to the same evaluations, which says nothing about their difference
    surely = _measured(ends, has_rounding=False).high < blocks.median
    share = measured.median / blocks.median
    attempt.uses_measured = share < (AGREEMENT if surely else FAR_APART)
    if attempt.uses_measured:
        attempt.seconds["tuned"] = attempt.seconds["baseline"] / measured.median
    attempt.measured_speedup = measured
    attempt.speedup = measured if attempt.uses_measured else blocks
    attempt.training_speedup = _whole_training_speedup(attempt, ends)
    if any(map(misses_target, attempt.tuned_runs.values())):  # the time to the target is unknown
        attempt.speedup = attempt.training_speedup
    return gain_of(attempt.speedup, attempt.training_speedup), blocks


def _at_target(original: list[dict], tuned: list[dict]) -> Ends:
    """The evaluations at which runs had reached the target; of a run that never did, its last.

    A tuned run that crosses the target at its last evaluation cannot show that it stays there: then the first crossing
    of the originals counts, too.
    """
    after = [(run, _evaluation_at(run, run["samples_to_target"]) or run["evaluations"][-1]) for run in tuned]
    is_last = any(evaluation is run["evaluations"][-1] for run, evaluation in after)
    crossing = "first_samples" if is_last else "samples_to_target"
    return [(run, _evaluation_at(run, run[crossing]) or run["evaluations"][-1]) for run in original], after


def _counts(ends: list[tuple[dict, dict]]) -> list[tuple[int, int]]:
    return [(at["samples"], samples_since_last_evaluation(run, at["samples"])) for run, at in ends]


def _measured(ends: Ends, has_rounding: bool = True) -> Ratio:
    """The ratio of the seconds of the runs, without those of a substitute."""
    before, after = [end for end in ends[0] if SUBSTITUTED not in end[0]], ends[1]
    a, b = ([evaluation["seconds"] for _, evaluation in arm] for arm in (before, after))
    return mean_ratio(a, b, Counts(_counts(before), _counts(after)).rounding() if has_rounding else (0.0, 0.0))


def _whole_training_speedup(attempt: Confirmation, ends: Ends) -> Ratio:
    """The ratio of the seconds of whole trainings, by the clock that counts for the time to the target as well."""
    before, after = ([(run, run["evaluations"][-1]) for run, _ in arm] for arm in ends)
    if attempt.uses_measured:
        return _measured((before, after), has_rounding=False)
    samples = [[(evaluation["samples"], 0) for _, evaluation in arm] for arm in (before, after)]
    return time_to_target(attempt.comparison, Counts(samples[0], samples[1]))[0]


def _evaluation_at(run: dict, samples: int | None) -> dict | None:
    return next((evaluation for evaluation in run["evaluations"] if evaluation["samples"] == samples), None)
