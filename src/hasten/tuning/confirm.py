"""The confirmation measures the winner again: fresh seeds, fresh comparison, both baselines. Only this is reported.

The search picked its winner partly by luck, so none of the winner's measurements is used here; the original's runs that
set the margin are. The fastest recipes are looked at in turns, with more seeds at each look; the original is run once
per seed for all of them, so that a slower recipe that is easier to prove costs little more. On seeds beyond those of
the baseline, an exact recipe that was found on this task trains in place of the original (``Baseline.substitute``): it
trains the same steps in less time. The fastest recipe goes first. If one look neither settles its quality nor suggests
that the next one would, an exact recipe follows: a few seeds prove it, so there is an answer in any case. The fastest
that passes wins.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from hasten.benchmarking.ratio import LOOKS as SPEED_LOOKS
from hasten.benchmarking.ratio import Ratio
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.engine.registry import comes_with_hasten
from hasten.tuning import gate
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.finding import SURELY_FASTER, surest
from hasten.tuning.gate import LOOKS, MIN_SEEDS, NonInferiorityResult
from hasten.tuning.study import EXACT, Study, exactness_of
from hasten.tuning.systems import ROUNDS, loosest_exactness
from hasten.tuning.time_to_target import Counts, mean_ratio, samples_since_last_evaluation, time_to_target
from hasten.tuning.training import SEED_STEP, Baseline

FIRST_FRESH_SEED, FIRST_FURTHER_SEED = 100_000, 500_000
MAX_FINALISTS = 3  # each further one has to pass a stricter gate
MAX_FURTHER, FURTHER_SHARE = 3, 0.4  # runs of the recipe alone per pair, and their cost relative to an original run
EXACT_PAIRS = 2  # after a passed exactness check the seeds need only not contradict; what is broken shows in any
WORTH_PROVING = 1.15  # times the speed-up of a slower recipe that has passed
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
        """Whether the recipe passed the quality gate and is surely faster."""
        return not self.missed and self.gate.passed and self.gain is not None and self.gain.low > SURELY_FASTER

    def beats(self, other: "Confirmation") -> bool:
        """Whether this recipe passed and is faster than the other, which passed."""
        gains = self.gain, other.gain
        return self.passed and gains[0] is not None and gains[1] is not None and gains[0].median > gains[1].median

    def finish(self, why: str) -> None:
        self.over, self.why = True, why


def confirm(
    study: Study,
    recipes: list[Recipe],
    baseline: Baseline,
    seconds: float,
    tested: Sequence[Recipe] = (),
    after_look: Callable[[list[Confirmation]], None] = lambda attempts: None,
) -> list[Confirmation]:
    """Trains ``recipes``, each faster than the one before it, on fresh seeds and judges them; notes every attempt.

    Returns the attempts, the winner first if any recipe passes. ``seconds`` is the budget of each comparison of speed.
    ``tested`` are the recipes that the search has tried to confirm before, as often as it has: they make the gate
    stricter. ``after_look`` is called with all attempts after each look.
    """
    no_seed, looks = gate.not_passed("no seed was run", baseline.margin), _affordable_looks(study, baseline, seconds)
    attempts, known = [], list(dict.fromkeys(map(str, tested)))
    for recipe in _finalists(recipes):
        known += [str(recipe)] if str(recipe) not in known else []
        earlier = [str(one) for one in tested].count(str(recipe))
        confidence = gate.confidence_of(known.index(str(recipe)), looks, earlier)
        attempts.append(Confirmation(recipe, no_seed, confidence=confidence, most_looks=looks))
    try:
        while (index := _next(attempts)) is not None:
            _look(study, attempts[index], baseline, seconds)
            after_look(attempts)
        ended = "the last look leaves it in doubt"
    except OutOfBudgetError:
        ended = "the budget ended before it was proven"
    for index, attempt in enumerate(attempts):
        if attempt.comparison and not attempt.over:
            why = ended if _worth_proving(index, attempts) else "another recipe that passed is as fast, or nearly"
            attempt.why = f"{why}: {attempt.why or attempt.gate.why}"
    speedups = {i: attempt.gain.median for i, attempt in enumerate(attempts) if attempt.passed and attempt.gain}
    winner = attempts[max(speedups, key=speedups.__getitem__)] if speedups else None
    for attempt in attempts:
        lost = "slower" if attempt.passed else "refused" if attempt.why else "not tried"
        why = attempt.why or ("a faster one passed" if winner else "the budget ended before it was tried")
        ratio = attempt.gain and attempt.gain.to_json()
        study.note(str(attempt.recipe), "confirmation", "won" if attempt is winner else lost, why, ratio=ratio)
    return sorted(attempts, key=lambda attempt: attempt is not winner)


def _affordable_looks(study: Study, baseline: Baseline, seconds: float) -> int:
    """Number of looks, at least 1, that the budget allows at a recipe that halves the time of a run.

    The error is divided among these looks, so that no part of it is reserved for looks that cannot come.
    """
    original = fmean([run["trial_seconds"] for run in baseline.runs] or [0.0])
    left, known = study.budget.left() - seconds, len(baseline.runs)
    speedup = baseline.substitute.speedup if baseline.substitute else 1.0
    affordable = [pairs for pairs in LOOKS if (max(0, pairs - known) / speedup + pairs / 2) * original <= left]
    return max(1, len(affordable))


def _finalists(recipes: list[Recipe]) -> list[Recipe]:
    """The recipes to confirm, fastest first: at most MAX_FINALISTS, the fastest exact one always among them.

    Of recipes with the same quality risks only the fastest is among them: they pass or fail together.
    """
    fastest: dict[str, Recipe] = {}
    for recipe in reversed(recipes):
        if recipe:
            fastest.setdefault(str(quality_risks(recipe) or recipe), recipe)
    finalists = list(fastest.values())
    first, exact = finalists[:MAX_FINALISTS], next((r for r in finalists if not quality_risks(r)), None)
    return first if exact is None or exact in first else [*first[:-1], exact]


def quality_risks(recipe: Recipe) -> Recipe:
    """The recipe without hasten's own exact methods: what may cost quality. The card of any other is not trusted."""
    return recipe.drop(*(name for name in recipe.methods if comes_with_hasten(name) and exactness_of(name) in EXACT))


def _next(attempts: list[Confirmation]) -> int | None:
    """Index of the attempt to run more seeds of; None if all are decided. Prefers those close to passing."""

    def order(index: int) -> tuple:
        attempt = attempts[index]
        first = index == 0 and not attempt.looks
        return not first, not _promising(attempt), attempt.looks, bool(quality_risks(attempt.recipe)), index

    open_attempts = [
        index
        for index, attempt in enumerate(attempts)
        if not attempt.over and attempt.looks < attempt.most_looks and _worth_proving(index, attempts)
    ]
    return min(open_attempts, key=order, default=None)


def _promising(attempt: Confirmation) -> bool:
    """Whether more seeds with the same mean difference in quality would let the attempt pass."""
    result, difference = attempt.gate, attempt.gate.difference
    if result.passed or not difference or not 0 < attempt.looks < attempt.most_looks:
        return result.passed
    shrink = math.sqrt(LOOKS[attempt.looks - 1] / LOOKS[attempt.looks])
    return difference["mean"] - (difference["mean"] - difference["low"]) * shrink > -result.margin


def _worth_proving(index: int, attempts: list[Confirmation]) -> bool:
    """Whether attempt ``index`` could still win: none that is faster, or nearly as fast, has passed."""
    gain = attempts[index].gain
    passed = max((other.gain.median for other in attempts if other.passed and other.gain), default=0.0)
    faster_passed = any(faster.passed for faster in attempts[:index])
    return not faster_passed and (gain is None or gain.median > WORTH_PROVING * passed)


def _look(study: Study, attempt: Confirmation, baseline: Baseline, seconds: float) -> None:
    """Compares the speed of an attempt, runs more paired seeds and judges them, also where the budget ends in between.

    Stores all of it in the attempt.
    """
    pairs = LOOKS[attempt.looks]
    attempt.comparison = _compare(study, Recipe(), attempt.recipe, seconds)
    if "failed" in attempt.comparison:
        return attempt.finish(attempt.comparison["failed"])
    check = {}  # of the whole recipe; impossible if a member may cost quality
    if not quality_risks(attempt.recipe):
        check = study.check_exactness(Recipe(), attempt.recipe, loosest_exactness(attempt.recipe))
    attempt.looks += 1
    for enough in sorted({EXACT_PAIRS if _shows_exactness(check) else MIN_SEEDS, pairs}):
        try:
            why = _run_pairs(study, attempt, enough, baseline, check)
        except OutOfBudgetError:
            _judge(attempt, baseline, check)
            raise
        if why:
            if attempt.missed:  # what is known of its speed and final metric is still an estimate
                _judge(attempt, baseline, check)
            return attempt.finish(why)
        _judge(attempt, baseline, check)
        if attempt.over:
            break
    return None


def _compare(study: Study, a: Recipe, b: Recipe, seconds: float) -> dict:
    return study.compare_speed(a, b, looks=SPEED_LOOKS, rounds=ROUNDS, seconds=seconds, salt="confirmation")


def _run_pairs(study: Study, attempt: Confirmation, pairs: int, baseline: Baseline, check: dict) -> str | None:
    """Runs both arms on ``pairs`` seeds, and a cheap recipe on further ones. Returns why the recipe lost, or None."""
    for seed in fresh_seeds(study.seed, pairs):
        if seed not in attempt.paired and (why := _run_pair(study, attempt, seed, baseline, check)):
            return why
    if _ends_worse(attempt, baseline):
        return None  # further runs of the recipe alone would only say so more surely
    for seed in further_seeds(study.seed, pairs * _further_per_pair(attempt)):
        attempt.tuned_runs[seed] = run = study.run(attempt.recipe, seed)
        if "failed" in run:
            return f"seed {seed}: {run['failed']}"
        attempt.missed = _missed(run) and not any(map(_missed, attempt.baseline_runs.values()))
        if attempt.missed:
            return _never_reached(seed, run, baseline)
    return None


def _missed(run: dict) -> bool:
    """Whether a run never reached the target, or did not hold it."""
    return run["seconds_to_target"] is None


def _metrics(run: dict) -> list[float]:
    return [evaluation["metric"] for evaluation in run["evaluations"]]


def _never_reached(seed: int, run: dict, baseline: Baseline) -> str:
    return f"seed {seed} never reached the target {baseline.target:g}: it ended at {run['metric']:.4g}"


def _ends_worse(attempt: Confirmation, baseline: Baseline) -> bool:
    """Whether the recipe ends worse by more than the margin, on average over the paired seeds."""
    pairs = [(attempt.baseline_runs[seed]["metric"], attempt.tuned_runs[seed]["metric"]) for seed in attempt.paired]
    worse = fmean(before - after for before, after in pairs) * (1 if baseline.higher_is_better else -1)
    return worse > baseline.margin


def fresh_seeds(seed: int, count: int) -> list[int]:
    """Seeds that the search has not seen, far enough apart that their shuffles (seed + epoch) never coincide."""
    return [seed + FIRST_FRESH_SEED + SEED_STEP * index for index in range(count)]


def further_seeds(seed: int, count: int) -> list[int]:
    """Seeds on which only the recipe is run; the search and ``fresh_seeds`` have not used them."""
    return [seed + FIRST_FURTHER_SEED + SEED_STEP * index for index in range(count)]


def _further_per_pair(attempt: Confirmation) -> int:
    """Runs of the recipe alone per pair of runs; more if it is faster. 0 for an exact one, compared seed by seed."""
    if loosest_exactness(attempt.recipe) in EXACT:
        return 0
    arms = attempt.baseline_runs, attempt.tuned_runs
    original, tuned = (fmean(run["trial_seconds"] for run in runs.values()) for runs in arms)
    return min(MAX_FURTHER, int(FURTHER_SHARE * original / tuned))


def _run_pair(study: Study, attempt: Confirmation, seed: int, baseline: Baseline, check: dict) -> str | None:
    """Runs both arms on one seed, in alternating order; the original's runs on the first seeds may be there already.

    Returns why the recipe lost, or None.
    """
    for is_tuned in (True, False) if len(attempt.paired) % 2 == 0 else (False, True):
        run = study.run(attempt.recipe, seed) if is_tuned else _run_original(study, attempt, seed, baseline)
        (attempt.tuned_runs if is_tuned else attempt.baseline_runs)[seed] = run
        if "failed" in run:
            return f"seed {seed}{'' if is_tuned else ', of the original'}: {run['failed']}"
    attempt.missed = _missed(attempt.tuned_runs[seed]) and not _missed(attempt.baseline_runs[seed])
    if attempt.missed:
        return _never_reached(seed, attempt.tuned_runs[seed], baseline)
    is_bit_exact = not quality_risks(attempt.recipe) and loosest_exactness(attempt.recipe) is Exactness.BIT_EXACT
    is_bit_exact = is_bit_exact and check.get("reproducible", True)
    tuned, original = (_metrics(runs[seed]) for runs in (attempt.tuned_runs, attempt.baseline_runs))
    if is_bit_exact and study.device == "cpu" and tuned != original:  # on a GPU not even two original runs are equal
        return f"seed {seed} is not the original's run, though every member claims the same bits"
    return None


def _run_original(study: Study, attempt: Confirmation, seed: int, baseline: Baseline) -> dict:
    """The original's run on one seed; that of the baseline's substitute, marked as such, where there is none yet.

    An exact recipe is compared with the original itself: the substitute rests on the same check.
    """
    is_known = seed in baseline.run_seeds or study.has_run(Recipe(), seed)
    if is_known or not quality_risks(attempt.recipe) or not _is_sound(study, baseline):
        return study.run(Recipe(), seed)
    assert baseline.substitute is not None, "it is sound"
    run = study.run(baseline.substitute.recipe, seed)
    if "failed" not in run:
        return run | {SUBSTITUTED: str(baseline.substitute.recipe)}
    baseline.substitute = None
    return study.run(Recipe(), seed)


def _shows_exactness(check: dict) -> bool:
    """Whether a check was passed that does not rest on the size of differences between runs."""
    return bool(check.get("passed")) and not check.get("statistics")


def _is_sound(study: Study, baseline: Baseline) -> bool:
    """Whether the baseline's substitute ends as well as the original on the first seed, and holds the target there.

    Within the margin; where it claims the same bits on the CPU, at every evaluation the same. One that is not sound is
    dropped.
    """
    substitute = baseline.substitute
    if substitute is None or not baseline.runs:
        return False
    run, original = study.run(substitute.recipe, baseline.run_seeds[0]), baseline.runs[0]
    if "failed" in run or (_missed(run) and not _missed(original)):
        baseline.substitute = None
        return False
    worse = (original["metric"] - run["metric"]) * (1 if baseline.higher_is_better else -1)
    claims_same_bits = study.device == "cpu" and loosest_exactness(substitute.recipe) is Exactness.BIT_EXACT
    if worse > baseline.margin or (claims_same_bits and _metrics(run) != _metrics(original)):
        baseline.substitute = None
    return baseline.substitute is not None


def _judge(attempt: Confirmation, baseline: Baseline, check: dict) -> None:
    """Sets ``gate``, the speed-ups, ``over`` and ``why`` of an attempt from its runs, if it has paired seeds.

    The attempt is over once quality and speed-up are settled.
    """
    if not attempt.paired:
        return
    exact = _shows_exactness(check)
    known = dict(zip(baseline.run_seeds, baseline.runs, strict=True))
    original = attempt.baseline_runs | {seed: run for seed, run in known.items() if seed not in attempt.baseline_runs}
    before, after = gate.final_metrics([original, attempt.tuned_runs], baseline.margin)
    result = attempt.gate = gate.quality_gate(
        {seed: before[seed] for seed in attempt.baseline_runs},
        after,
        margin=baseline.margin,
        higher_is_better=baseline.higher_is_better,
        more_baseline=[before[seed] for seed in original if seed not in attempt.baseline_runs],
        confidence=gate.confidence_of() if exact else attempt.confidence,  # any exact recipe is contradicted as often
    )
    substitutes = [run[SUBSTITUTED] for seed in attempt.paired if SUBSTITUTED in (run := attempt.baseline_runs[seed])]
    if substitutes:
        how = f"{substitutes[0]}, exact on this task, trained in place of the original"
        result = attempt.gate = replace(result, why=f"{result.why}; on {len(substitutes)} of these seeds {how}")
    attempt.why = result.why
    if len(attempt.paired) < 2:
        return
    gain, block_speedup, measured = _compute_speedup(attempt, same_steps=exact)
    if exact:
        # two pairs suffice if nothing in the runs contradicts the exactness check or the interleaved comparison
        as_good = result.difference is not None and result.difference["mean"] > -result.margin
        agrees = as_good and measured.median >= AGREEMENT * block_speedup.median
        result = attempt.gate = gate.equal_by_construction(result, check, EXACT_PAIRS if agrees else MIN_SEEDS)
    slow = gain.high < SURELY_FASTER
    only_speed_is_open = exact and not attempt.uses_measured  # then no further seed makes the speed surer
    attempt.over = attempt.passed or slow or (result.settled and (only_speed_is_open or not result.passed))
    attempt.why = result.why
    if attempt.uses_measured:
        attempt.why += f"; the blocks promised {block_speedup.median:.2f}x, the measured runs show less and count"
    if result.passed and not attempt.passed:
        attempt.why = f"as good, but {'not' if slow else 'not surely'} faster: {gain}; {attempt.why}"


def _compute_speedup(attempt: Confirmation, same_steps: bool) -> tuple[Ratio, Ratio, Ratio]:
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
    if any(map(_missed, attempt.tuned_runs.values())):  # as the original does: the time to the target is unknown
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


def compare_with_strong_baseline(study: Study, winner: Confirmation, strong: Recipe, seconds: float) -> None:
    """Sets ``over_strong_baseline`` and ``seconds["strong_baseline"]`` of ``winner``, unless they cannot be measured.

    The strong baseline needs the original's samples and is never slower than the task as it is, so the speed-up over it
    is at most that over the task.
    """
    if winner.speedup is None or winner.counts is None:
        return
    if not strong:
        winner.over_strong_baseline, winner.seconds["strong_baseline"] = winner.speedup, winner.seconds["baseline"]
        return
    comparison = _compare(study, strong, winner.recipe, seconds)
    if "failed" in comparison:
        return
    modelled, _, tuned = time_to_target(comparison, winner.counts)
    scale = min(1.0, tuned / winner.seconds["tuned"]) if winner.uses_measured else 1.0
    scaled = Ratio(scale * modelled.median, scale * modelled.low, scale * modelled.high)
    over = winner.over_strong_baseline = min(scaled, winner.speedup, key=lambda ratio: ratio.median)
    winner.seconds["strong_baseline"] = over.median * winner.seconds["tuned"]
