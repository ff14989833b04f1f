"""What is known of a recipe that is being confirmed: its runs, and the speed-up that follows from them."""

from dataclasses import dataclass, field, replace

from hasten.benchmarking.ratio import Ratio
from hasten.core.recipe import Recipe
from hasten.tuning.finding import SURELY_FASTER, surest
from hasten.tuning.gate import LOOKS, NonInferiorityResult
from hasten.tuning.study import EXACT
from hasten.tuning.systems import is_disturbed, loosest_exactness
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
    speedup: Ratio | None = None  # in the time to the target; one of the next two
    block_speedup: Ratio | None = None  # seconds per sample from the blocks, samples from the runs
    measured_speedup: Ratio | None = None  # seconds of the runs
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
        """The speed-up that counts: to the target or of the whole training, whichever is surer."""
        return self.speedup and surest(self.speedup, self.training_speedup)

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


def compute_speedup(attempt: Confirmation, same_steps: bool) -> tuple[Ratio, Ratio, Ratio]:
    """Sets the samples, seconds and speed-ups of an attempt; (gain, block_speedup, measured_speedup).

    If the measured seconds of the runs show clearly less than the model of ``time_to_target.py``, a run pays for
    something that no block shows (a first epoch that fills a cache, a late compilation, a run that ends before it is
    warm): then these count. Runs of a substitute say nothing about the seconds of the original, and are left out.

    With ``same_steps`` the exactness check has passed, and both arms train the same steps. Rounding may still carry a
    seed across the target one evaluation earlier or later; both are then read at the original's evaluation.
    """
    paired = loosest_exactness(attempt.recipe) in EXACT  # they train the same samples, checked or not
    arms = list(attempt.baseline_runs.values()), list(attempt.tuned_runs.values())
    ends = _pairs_at_target(attempt, same_steps) if paired else _at_target(*arms)
    counts = attempt.counts = _counts_of(ends, paired)
    blocks, attempt.seconds["baseline"], attempt.seconds["tuned"] = time_to_target(attempt.comparison, counts)
    measured = _measured(ends, paired)
    # both are rounded to the same evaluations, which says nothing about their difference
    surely = _measured(ends, paired, has_rounding=False).high < blocks.median
    share = measured.median / blocks.median
    attempt.uses_measured = share < (AGREEMENT if surely else FAR_APART)
    if attempt.uses_measured:
        attempt.seconds["tuned"] = attempt.seconds["baseline"] / measured.median
    attempt.block_speedup, attempt.measured_speedup = blocks, measured
    attempt.speedup = measured if attempt.uses_measured else blocks
    attempt.training_speedup = _whole_training_speedup(attempt, ends, paired)
    if any(map(misses_target, attempt.tuned_runs.values())):  # the time to the target is unknown
        attempt.speedup = attempt.training_speedup
    return surest(attempt.speedup, attempt.training_speedup), blocks, measured


def _pairs_at_target(attempt: Confirmation, same_steps: bool) -> Ends:
    """(run, its evaluation that counts) of the paired seeds, by arm: that at which the run had reached the target.

    With ``same_steps`` both arms are read at the samples at which the original had reached it.
    """
    ends: Ends = [], []
    for seed in attempt.paired:
        original, tuned = attempt.baseline_runs[seed], attempt.tuned_runs[seed]
        (before,), (after,) = _at_target([original], [tuned])
        if same_steps:
            after = tuned, _evaluation_at(tuned, before[1]["samples"]) or after[1]
        ends[0].append(before)
        ends[1].append(after)
    return ends


def _at_target(original: list[dict], tuned: list[dict]) -> Ends:
    """The evaluations at which runs had reached the target; of a run that never did, its last.

    A tuned run that crosses the target at its last evaluation cannot show that it stays there: then the first crossing
    of the originals counts, too.
    """
    after = [(run, _evaluation_at(run, run["samples_to_target"]) or run["evaluations"][-1]) for run in tuned]
    is_last = any(evaluation is run["evaluations"][-1] for run, evaluation in after)
    crossing = "first_samples" if is_last else "samples_to_target"
    return [(run, _evaluation_at(run, run[crossing]) or run["evaluations"][-1]) for run in original], after


def _counts(ends: list[tuple[dict, dict]], paired: bool) -> list[tuple[int, int]]:
    return [(at["samples"], 0 if paired else samples_since_last_evaluation(run, at["samples"])) for run, at in ends]


def _counts_of(ends: Ends, paired: bool) -> Counts:
    return Counts(_counts(ends[0], paired), _counts(ends[1], paired), paired)


def _measured(ends: Ends, paired: bool, has_rounding: bool = True) -> Ratio:
    """The ratio of the seconds of the runs, without those of a substitute; of paired runs, without their pairs."""
    before, after = ends
    if paired:
        pairs = [pair for pair in zip(before, after, strict=True) if SUBSTITUTED not in pair[0][0]]
        before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    before = [end for end in before if SUBSTITUTED not in end[0]]
    a, b = ([evaluation["seconds"] for _, evaluation in arm] for arm in (before, after))
    return mean_ratio(a, b, replace(_counts_of((before, after), paired), has_rounding=has_rounding))


def _whole_training_speedup(attempt: Confirmation, ends: Ends, paired: bool) -> Ratio:
    """The ratio of the seconds of whole trainings, by the clock that counts for the time to the target as well."""
    before, after = ([(run, run["evaluations"][-1]) for run, _ in arm] for arm in ends)
    if attempt.uses_measured:
        return _measured((before, after), paired, has_rounding=False)
    samples = [[(evaluation["samples"], 0) for _, evaluation in arm] for arm in (before, after)]
    return time_to_target(attempt.comparison, Counts(samples[0], samples[1], paired))[0]


def _evaluation_at(run: dict, samples: int | None) -> dict | None:
    return next((evaluation for evaluation in run["evaluations"] if evaluation["samples"] == samples), None)
