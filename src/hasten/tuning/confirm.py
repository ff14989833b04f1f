"""Measures the winner anew: fresh seeds, a fresh comparison, both baselines. Only this is reported.

The search picked its winner partly by luck; whatever it saw is not repeated here. The fastest recipes are looked at in
turns, with more seeds at each look: what the original does on a seed is measured once for all of them, so a slower
recipe that is easier to prove costs little more. The fastest goes first. If one look neither settles it nor suggests that
another would, an exact recipe follows: a few seeds prove it, so there is an answer in any case. The fastest that holds
has won.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

from scipy.special import stdtrit

from hasten.benchmarking.ratio import LOOKS as PACE_LOOKS
from hasten.benchmarking.ratio import Ratio
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.tuning.gate import (
    FEWEST_SEEDS,
    LOOKS,
    NonInferiorityResult,
    confidence_of,
    equal_by_construction,
    quality_gate,
)
from hasten.tuning.search import EXACT, Baseline, Incumbents
from hasten.tuning.study import OutOfBudget, Study, exactness_of

SEED_STEP = 1000
FIRST_FRESH_SEED, FIRST_FURTHER_SEED = 100_000, 500_000
MOST_ATTEMPTS = 3  # recipes that may be confirmed; each further one has to pass a stricter gate
MOST_FURTHER, SHARE_OF_FURTHER = (
    3,
    0.4,
)  # runs of the recipe alone for each pair, and the part of the original's run they may cost
PAIRS_OF_THE_EXACT = 2  # where the proof has passed, the seeds need only not contradict; what is broken shows in any
SURELY_FASTER = 1.01
WORTH_PROVING = 1.15  # times the speed-up of a slower recipe that holds already
AGREEMENT = 0.9  # of the modelled speed-up, which the stopwatch must confirm
FAR_APART = 0.75  # of it: then the stopwatch counts, however much its few runs spread
ERROR = 0.05


@dataclass
class Confirmation:
    """What fresh seeds say about a recipe. ``over``: more of them would not change it."""

    recipe: Recipe
    gate: NonInferiorityResult
    speedup: Ratio | None = None
    blocks: Ratio | None = None  # the same as the interleaved comparison promises it
    stopwatch: Ratio | None = None  # and by the paired runs' own seconds
    by_stopwatch: bool = False  # that one counts, as it saw clearly less
    over_competent: Ratio | None = None
    baseline_runs: dict[int, dict] = field(default_factory=dict)
    tuned_runs: dict[int, dict] = field(default_factory=dict)  # on the same seeds, and on further ones
    pace: dict = field(default_factory=dict)
    samples: list[tuple[int, ...]] = field(default_factory=list)  # to the target, a seed each; see time_to_target
    seconds: dict[str, float] = field(default_factory=dict)  # time to the target: baseline, strong_baseline, tuned
    looks: int = 0  # at what the seeds show, so far
    over: bool = False
    why: str = ""

    @property
    def paired(self) -> list[int]:
        """The seeds that both arms were run on."""
        return [seed for seed in self.baseline_runs if seed in self.tuned_runs]

    @property
    def passed(self) -> bool:
        """As good for certain, and faster for certain."""
        return self.gate.passed and self.speedup is not None and self.speedup.low > SURELY_FASTER


def confirm(study: Study, ladder: Incumbents, baseline: Baseline, pace_seconds: float) -> Confirmation | None:
    """The fastest recipe of the ladder that holds; else the fastest that was attempted, or None. Every attempt is noted."""
    fastest = _finalists(ladder.recipes)
    attempts = [
        Confirmation(
            recipe, NonInferiorityResult(None, None, baseline.margin, None, [], False, False, "no seed was run")
        )
        for recipe in fastest
    ]
    try:
        while (number := _next(attempts)) is not None:
            _look(study, attempts[number], number, baseline, pace_seconds)
        ended = "the last look leaves it in doubt"
    except OutOfBudget:
        ended = "the budget ended before it was proven"
    for number, attempt in enumerate(attempts):
        if attempt.pace and not attempt.over:
            why = ended if _worth_proving(number, attempts) else "another that holds is as fast, or nearly"
            attempt.why = f"{why}: {attempt.why or attempt.gate.why}"
    winner = max(
        (attempt for attempt in attempts if attempt.passed), key=lambda attempt: attempt.speedup.median, default=None
    )
    for attempt in attempts:
        verdict = (
            "won" if attempt is winner else "slower" if attempt.passed else "refused" if attempt.why else "not tried"
        )
        why = attempt.why or ("a faster one holds" if winner else "the budget ended before it was tried")
        study.note(
            str(attempt.recipe), "confirmation", verdict, why, ratio=attempt.speedup and attempt.speedup.to_json()
        )
    return winner or next(iter(attempts), None)


def _finalists(rungs: list[Recipe]) -> list[Recipe]:
    """The fastest recipes, the fastest first, and among them the fastest that is exact, if there is one.

    Of inexact ones with the same suspects there is the fastest alone: their quality stands and falls together.
    """
    fastest: dict[str, Recipe] = {}
    for recipe in reversed(rungs):
        if recipe:
            fastest.setdefault(str(_quality_risks(recipe) or recipe), recipe)
    several = list(fastest.values())
    first, exact = several[:MOST_ATTEMPTS], next((recipe for recipe in several if not _quality_risks(recipe)), None)
    return first if exact is None or exact in first else [*first[:-1], exact]


def _quality_risks(recipe: Recipe) -> Recipe:
    """The members that may cost quality: all but ours that are exact. The card of one from outside is a claim."""
    return recipe.drop(*(name for name in recipe.methods if ":" not in name and exactness_of(name) in EXACT))


def _next(attempts: list[Confirmation]) -> int | None:
    """Who is looked at next: the fastest first; then whoever is close to holding; then what is exact; then the rest, least-looked-at first."""

    def turn(number: int) -> tuple:
        attempt = attempts[number]
        first = number == 0 and not attempt.looks
        return (not first, not _promising(attempt), attempt.looks, bool(_quality_risks(attempt.recipe)), number)

    able = [
        n
        for n, each in enumerate(attempts)
        if not each.over and each.looks < len(LOOKS) and _worth_proving(n, attempts)
    ]
    return min(able, key=turn, default=None)


def _promising(attempt: Confirmation) -> bool:
    """Whether the next look would find it as good, if what was seen so far stays as it is."""
    gate, seen = attempt.gate, attempt.gate.difference
    if gate.passed or not seen or not 0 < attempt.looks < len(LOOKS):
        return gate.passed
    reach = (seen["mean"] - seen["low"]) * math.sqrt(LOOKS[attempt.looks - 1] / LOOKS[attempt.looks])
    return seen["mean"] - reach > -gate.margin


def _worth_proving(number: int, attempts: list[Confirmation]) -> bool:
    """Not any more if a faster one holds already, or a slower one that is nearly as fast."""
    speedup = attempts[number].speedup
    surely = max((other.speedup.median for other in attempts if other.passed), default=0.0)
    return not any(faster.passed for faster in attempts[:number]) and (
        speedup is None or speedup.median > WORTH_PROVING * surely
    )


def _look(study: Study, done: Confirmation, number: int, baseline: Baseline, pace_seconds: float) -> None:
    """Asks the gate after more paired seeds; what they show is judged also where the budget ends among them."""
    pairs = LOOKS[done.looks]
    done.pace = _pace(study, done, pace_seconds)
    if why := done.pace.get("failed"):
        return _ended(done, why)
    proof = _proof(study, done.recipe)
    done.looks += 1
    for enough in sorted({_fewest(proof), pairs}):
        try:
            why = _run(study, done, enough, baseline)
        except OutOfBudget:
            _judge(study, done, number, baseline, proof)
            raise
        if why:
            return _ended(done, why)
        _judge(study, done, number, baseline, proof)
        if done.over:
            return None
    return None


def _fewest(proof: dict) -> int:
    """Pairs after which there may be a verdict."""
    return PAIRS_OF_THE_EXACT if proof.get("passed") else FEWEST_SEEDS


def _pace(study: Study, done: Confirmation, seconds: float) -> dict:
    return study.compare_speed(Recipe(), done.recipe, looks=PACE_LOOKS, seconds=seconds, salt="confirmation")


def _judge(study: Study, done: Confirmation, number: int, baseline: Baseline, proof: dict) -> None:
    """Over, once the quality is settled and, where it is as good, the speed as well."""
    if not done.paired:
        return
    exact = bool(proof.get("passed"))
    done.gate = _gate(done, baseline, 0 if exact else number)  # a proof is contradicted as easily whoever's turn it is
    if len(done.paired) > 1:
        _clock(done, same_steps=exact)
        if exact:
            done.gate = equal_by_construction(done.gate, proof, PAIRS_OF_THE_EXACT if _agrees(done) else FEWEST_SEEDS)
        slow = done.speedup.high < SURELY_FASTER
        of_pace_alone = exact and not done.by_stopwatch  # then no seed makes the speed surer
        done.over = done.passed or slow or (done.gate.settled and (of_pace_alone or not done.gate.passed))
        told = (
            f"; the blocks promised {done.blocks.median:.2f}x, the stopwatch saw less and is what counts"
            if done.by_stopwatch
            else ""
        )
        done.why = f"{done.gate.why}{told}"
        if done.gate.passed and not done.passed:
            done.why = f"as good, but {'not' if slow else 'not surely'} faster: {done.speedup}; {done.why}"
    else:
        done.why = done.gate.why


def _agrees(done: Confirmation) -> bool:
    """Whether nothing in the runs of what was proven exact speaks against the proof or the blocks: then two pairs are enough."""
    as_good = done.gate.difference is not None and done.gate.difference["mean"] > -done.gate.margin
    return as_good and done.stopwatch.median >= AGREEMENT * done.blocks.median


def _run(study: Study, done: Confirmation, pairs: int, baseline: Baseline) -> str | None:
    """Both arms on so many seeds, then the recipe alone on further ones if that is cheap; why the recipe is out, or None."""
    for seed in fresh_seeds(study.seed, pairs):
        if seed not in done.paired and (why := _paired_run(study, done, seed, baseline)):
            return why
    for seed in further_seeds(study.seed, pairs * _further_a_pair(done)):
        done.tuned_runs[seed] = run = study.run(done.recipe, seed)
        if "failed" in run:
            return f"seed {seed}: {run['failed']}"
    return None


def fresh_seeds(seed: int, count: int) -> list[int]:
    """Seeds that the search has not seen, far enough apart that their shuffles (seed + epoch) never coincide."""
    return [seed + FIRST_FRESH_SEED + SEED_STEP * number for number in range(count)]


def further_seeds(seed: int, count: int) -> list[int]:
    """As fresh, for the recipe alone."""
    return [seed + FIRST_FURTHER_SEED + SEED_STEP * number for number in range(count)]


def _further_a_pair(done: Confirmation) -> int:
    """Runs of the recipe alone that each pair is worth: what is cheap to know better need not be as dear as the original.

    None of a recipe that is exact: there a seed has to be held against the same seed.
    """
    if _exactness_of(done.recipe) in EXACT:
        return 0
    originals, tuned = (
        sum(run["trial_seconds"] for run in runs.values()) for runs in (done.baseline_runs, done.tuned_runs)
    )
    ratio = (originals / len(done.baseline_runs)) / (tuned / len(done.tuned_runs))
    return min(MOST_FURTHER, int(SHARE_OF_FURTHER * ratio))


def _paired_run(study: Study, done: Confirmation, seed: int, baseline: Baseline) -> str | None:
    """Both arms on one seed, in turns which goes first; why the recipe is out, or None."""
    arms = [(done.recipe, done.tuned_runs), (Recipe(), done.baseline_runs)]
    for recipe, runs in arms if len(done.paired) % 2 == 0 else reversed(arms):
        runs[seed] = run = study.run(recipe, seed)
        if "failed" in run:
            return f"seed {seed}{'' if recipe else ', of the original'}: {run['failed']}"
        if recipe and run["seconds_to_target"] is None:
            return f"seed {seed} never reached the target {baseline.target:g}: it ended at {run['metric']:.4g}"
    if _same_bits(study, done.recipe) and _metrics(done.tuned_runs[seed]) != _metrics(done.baseline_runs[seed]):
        return f"seed {seed} is not the original's run, though every member claims the same bits"
    return None


def _same_bits(study: Study, recipe: Recipe) -> bool:
    """Whether every run of the recipe has to be the original's: a GPU does not repeat even itself."""
    return study.device == "cpu" and not _quality_risks(recipe) and _exactness_of(recipe) is Exactness.BIT_EXACT


def _metrics(run: dict) -> list[float]:
    return [look["metric"] for look in run["evaluations"]]


def _ended(done: Confirmation, why: str) -> None:
    done.over, done.why = True, why


def _proof(study: Study, recipe: Recipe) -> dict:
    """That the whole recipe is exact, where every member is ours and says so: then the seeds need only not contradict."""
    return {} if _quality_risks(recipe) else study.proof(Recipe(), recipe, _exactness_of(recipe))


def _gate(done: Confirmation, baseline: Baseline, number: int) -> NonInferiorityResult:
    return quality_gate(
        {seed: run["metric"] for seed, run in done.baseline_runs.items()},
        {seed: run["metric"] for seed, run in done.tuned_runs.items()},
        margin=baseline.margin,
        higher_is_better=baseline.higher_is_better,
        more_baseline=[run["metric"] for run in baseline.runs],
        confidence=confidence_of(number),
    )


def _exactness_of(recipe: Recipe) -> Exactness:
    """The loosest class among the members: what the whole may promise."""
    return max((exactness_of(name) for name in recipe.methods), key=list(Exactness).index)


def _clock(done: Confirmation, same_steps: bool) -> None:
    """Times to the target: samples from the paired runs, seconds a sample from the interleaved comparison.

    ``same_steps``: it was proven that both arms take the same. Rounding may still carry a seed across the target a look earlier
    or later, one way as often as the other; then both are read at the original's look.
    """
    looks = [_looks_at_target(done.baseline_runs[seed], done.tuned_runs[seed]) for seed in done.paired]
    if same_steps:
        tuned_at = [
            _look_at(done.tuned_runs[seed], original["samples"])
            for seed, (original, _) in zip(done.paired, looks, strict=True)
        ]
        looks = [(original, at or tuned) for (original, tuned), at in zip(looks, tuned_at, strict=True)]
    done.samples = [(original["samples"], tuned["samples"]) for original, tuned in looks]
    if _exactness_of(done.recipe) not in EXACT:  # of these it was proven that they take the same steps
        arms = [(done.baseline_runs[seed], done.tuned_runs[seed]) for seed in done.paired]
        done.samples = [
            (*pair, *map(_since_the_look_before, runs, pair)) for runs, pair in zip(arms, done.samples, strict=True)
        ]
    done.blocks, done.seconds["baseline"], done.seconds["tuned"] = time_to_target(done.pace, done.samples)
    _check_by_stopwatch(done, [(original["seconds"], tuned["seconds"]) for original, tuned in looks])


def _check_by_stopwatch(done: Confirmation, times: list[tuple[float, float]]) -> None:
    """Holds the model (start + samples x pace) against the seconds that the paired runs really took.

    Where the stopwatch saw clearly less, something is paid for inside a run that no block showed (a first pass
    that fills a cache, a late compilation, a run that ends before it is warm): then the stopwatch is what is reported.
    """
    done.stopwatch = _over_seeds(times)
    share, surely = done.stopwatch.median / done.blocks.median, done.stopwatch.high < done.blocks.median
    done.by_stopwatch = share < (AGREEMENT if surely else FAR_APART)
    if done.by_stopwatch:
        done.stopwatch = _over_seeds(times, _rounding(done.samples))
        done.seconds["tuned"] = done.seconds["baseline"] / done.stopwatch.median
    done.speedup = done.stopwatch if done.by_stopwatch else done.blocks


def _since_the_look_before(run: dict, samples: int) -> int:
    """Training samples between the look at so many and the one before it."""
    return samples - max((look["samples"] for look in run["evaluations"] if look["samples"] < samples), default=0)


def _looks_at_target(original: dict, tuned: dict) -> tuple[dict, dict]:
    """The looks at which both arms of a seed had reached the target; of an original that never got there, its last.

    A run that crosses the target at its last look cannot show that it holds: then the original need not either.
    """
    of_tuned = _look_at(tuned, tuned["samples_to_target"])
    last = of_tuned is tuned["evaluations"][-1]
    of_original = _look_at(original, original["first_samples"] if last else original["samples_to_target"])
    return of_original or original["evaluations"][-1], of_tuned


def _look_at(run: dict, samples: int | None) -> dict | None:
    return next((look for look in run["evaluations"] if look["samples"] == samples), None)


def against_competent(study: Study, done: Confirmation, competent: Recipe, pace_seconds: float) -> None:
    """The same against the competent baseline, which needs the original's samples; nothing where that cannot be measured."""
    if not competent:
        done.over_competent, done.seconds["strong_baseline"] = done.speedup, done.seconds["baseline"]
        return
    pace = study.compare_speed(competent, done.recipe, looks=PACE_LOOKS, seconds=pace_seconds, salt="confirmation")
    if "failed" not in pace:
        modelled, *_, tuned = time_to_target(pace, done.samples)
        less = min(1.0, tuned / done.seconds["tuned"]) if done.by_stopwatch else 1.0  # what the stopwatch took away
        over = Ratio(*(less * getattr(modelled, key) for key in ("median", "low", "high")))
        done.over_competent = min(
            over, done.speedup, key=lambda each: each.median
        )  # nobody competent is slower than the textbook
        done.seconds["strong_baseline"] = done.over_competent.median * done.seconds["tuned"]


def time_to_target(pace: dict, samples: list[tuple[int, ...]]) -> tuple[Ratio, float, float]:
    """(speed-up to the target, seconds of a, seconds of b) of two recipes.

    Args:
        pace: an interleaved comparison of the two.
        samples: (of a, of b) until the look that saw the target, one pair a seed; where the two train differently followed by
            (of a, of b) since the look before that one.

    The seconds of a run are start + samples x seconds a sample (its evaluations included). The interval of the
    speed-up adds the spread over the seeds and the interval of the pace, as independent errors of a logarithm.
    """
    a = pace["seconds_per_1000_samples"]["a"] / 1000
    ratio, start = pace["ratio"], pace["start_seconds"]
    b = a / ratio["median"]
    times = [(start["a"] + x * a, start["b"] + y * b) for x, y, *_ in samples]
    of_pace = (math.log(ratio["high"]) - math.log(ratio["low"])) / 2
    return _over_seeds(times, _rounding(samples), of_pace), fmean(x for x, _ in times), fmean(y for _, y in times)


def _over_seeds(times: list[tuple[float, float]], least_spread: float = 0.0, of_pace: float = 0.0) -> Ratio:
    """The mean ratio of paired times, its interval by t; no calmer than ``least_spread`` and with the error of the pace."""
    logs = [math.log(x / y) for x, y in times]
    count, centre = len(logs), fmean(logs)
    of_seeds = (
        float(stdtrit(count - 1, 1 - ERROR / 2)) * max(stdev(logs), least_spread) / math.sqrt(count)
        if count > 1
        else 0.0
    )
    reach = math.hypot(of_seeds, of_pace)
    return Ratio(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach))


def _rounding(samples: list[tuple[int, ...]]) -> float:
    """The least that the logarithm of a ratio of counts spreads over the seeds, however alike they are.

    The target is looked for now and then, so a count is rounded up to the next look: an error spread evenly over the
    distance of two looks, whose standard deviation is that distance / sqrt(12). Three seeds that agree then leave 0.7 of a
    distance in doubt; more of them leave less. Nothing is added where no distances are told.
    """
    told = [each for each in samples if len(each) == 4]
    shares = [fmean(each[arm + 2] / each[arm] for each in told) for arm in (0, 1)] if told else []
    return math.hypot(*shares) / math.sqrt(12)
