"""The confirmation measures the winner again: fresh seeds, fresh comparison, both baselines. Only this is reported.

The search picked its winner partly by luck, so none of the winner's measurements is used here; the original's runs that
set the margin are. The fastest recipes are looked at in turns, with more seeds at each look; the original is run once
per seed for all of them, so that a slower recipe that is easier to prove costs little more. On seeds beyond those of
the baseline, an exact recipe that was found on this task trains in place of the original (``Baseline.substitute``): it
trains the same steps in less time. The fastest recipe goes first, or those that seem easier to prove. If one look
neither settles its quality nor suggests that the next one would, the next recipe follows. The fastest that passes wins.
Exact recipes are none of them: their check and their interleaved comparison are all the evidence that they need.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean

from hasten.benchmarking.ratio import Ratio
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.engine.registry import comes_with_hasten
from hasten.tuning import gate
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.confirmation import SUBSTITUTED, Confirmation, compute_speedups, misses_target
from hasten.tuning.finding import SURELY_FASTER
from hasten.tuning.gate import LOOKS, MIN_SEEDS, NonInferiorityResult
from hasten.tuning.study import EXACT_CLASSES, Study, exactness_of
from hasten.tuning.systems import (
    SEVERAL_ROUNDS,
    after_others,
    compare_again,
    disturbance,
    is_disturbed,
    loosest_exactness,
)
from hasten.tuning.time_to_target import time_to_target
from hasten.tuning.training import SEED_STEP, Baseline, Substitute, length_option

FIRST_FRESH_SEED, FIRST_FURTHER_SEED = 100_000, 500_000
MAX_FINALISTS = 3  # each further one has to pass a stricter gate
MAX_FURTHER, FURTHER_SHARE = 3, 0.4  # runs of the recipe alone per pair, and their cost relative to an original run
WORTH_PROVING = 1.15  # times the speed-up of a slower recipe that has passed


def confirm(
    study: Study,
    recipes: list[Recipe],
    baseline: Baseline,
    seconds: float,
    tested: Sequence[Recipe] = (),
    after_look: Callable[[list[Confirmation]], None] = lambda attempts: None,
    first: Sequence[Recipe] = (),
    rest: float = 0.0,
) -> list[Confirmation]:
    """Trains ``recipes``, each faster than the one before it, on fresh seeds and judges them; notes every attempt.

    Returns the attempts, the winner first if any recipe passes. Each recipe has ``quality_risks``. ``seconds`` is the
    budget of each comparison of speed.
    ``tested`` are the recipes that the search has tried to confirm before, as often as it has: they make the gate
    stricter. ``after_look`` is called with all attempts after each look. ``first``: the recipes that are looked at
    before the fastest one, in this order, with the largest parts of the error. The part of a recipe that passes goes to
    the others: a closed test, so that the chance of any harmful one to pass stays below the error. ``rest``: seconds of
    the budget, at most half of those left, that are reserved for the caller once a recipe has passed.
    """
    no_seed, looks = gate.not_passed("no seed was run", baseline.margin), _affordable_looks(study, baseline, seconds)
    if not _saves_time(baseline.substitute, LOOKS[looks - 1] - len(baseline.runs)):
        baseline.substitute = None
        looks = _affordable_looks(study, baseline, seconds)
    finalists = _finalists(recipes, first)
    first = [recipe for recipe in first if recipe in finalists] or finalists[:1]
    known = list(dict.fromkeys(map(str, [*tested, *first, *finalists])))
    attempts = [Confirmation(recipe, no_seed, most_looks=looks) for recipe in finalists]
    with ExitStack() as after_proof:
        try:
            while (index := _next(attempts, first)) is not None:
                attempt = attempts[index]
                others = [one for one in attempts if one is not attempt]
                passed = {str(one.recipe) for one in others if one.gate.passed and not one.missed}
                rank = [name for name in known if name not in passed].index(str(attempt.recipe))
                attempt.confidence = gate.confidence_of(rank, looks, earlier=list(tested).count(attempt.recipe))
                waiting = sum(not one.looks and not one.over for one in others)
                _look(study, attempt, baseline, seconds, _of_same_pace(attempt.recipe, finalists), waiting, rest)
                after_look(attempts)
                if attempt.passed and not any(one.passed for one in others):
                    after_proof.enter_context(study.budget.reserve(rest))
            ended = "the last look leaves it in doubt"
        except OutOfBudgetError:
            ended = "the budget ended before it was proven"
    return _conclude(study, attempts, ended)


def _conclude(study: Study, attempts: list[Confirmation], ended: str) -> list[Confirmation]:
    """Notes every attempt, with the reason why it lost; the attempts, the winner first if any recipe passed.

    ``ended``: why those that were looked at, and are still open, get no further look.
    """
    passed = [attempt for attempt in attempts if attempt.passed]
    winner = max(passed, key=lambda attempt: attempt.gain.median if attempt.gain else 0.0, default=None)
    for index, attempt in enumerate(attempts):
        if attempt.comparison and not attempt.over:
            why = ended if _worth_proving(index, attempts) else "another recipe that passed is as fast, or nearly"
            attempt.why = f"{why}: {attempt.why or attempt.gate.why}"
        lost = "slower" if attempt.passed else "refused" if attempt.why else "not tried"
        is_beaten = winner is not None and index > attempts.index(winner)
        attempt.why = attempt.why or ("a faster one passed" if is_beaten else "the budget ended before it was tried")
        ratio = attempt.gain and attempt.gain.to_json()
        study.note(str(attempt.recipe), "confirmation", "won" if attempt is winner else lost, attempt.why, ratio=ratio)
    return sorted(attempts, key=lambda attempt: attempt is not winner)


def _saves_time(substitute: Substitute | None, further: int) -> bool:
    """Whether a substitute saves time on so many further seeds, though one run more of it checks it first."""
    return substitute is not None and substitute.speedup * further > 1 + further


def _of_same_pace(recipe: Recipe, finalists: list[Recipe]) -> Recipe:
    """The first finalist that differs from ``recipe`` in the length of the training at most: its steps are the same."""

    def without_length(each: Recipe) -> Recipe:
        members = each.methods.items()
        return Recipe(
            {name: {k: v for k, v in options.items() if k != length_option(name)} for name, options in members}
        )

    return next(each for each in finalists if without_length(each) == without_length(recipe))


def _affordable_looks(study: Study, baseline: Baseline, seconds: float) -> int:
    """Number of looks, at least 1, that the budget allows at a recipe that halves the time of a run.

    The error is divided among these looks, so that no part of it is reserved for looks that cannot come.
    """
    original = fmean([run["trial_seconds"] for run in baseline.runs] or [0.0])
    left, known = study.budget.left_for_new() - seconds, len(baseline.runs)
    speedup = baseline.substitute.speedup if baseline.substitute else 1.0
    affordable = [pairs for pairs in LOOKS if (max(0, pairs - known) / speedup + pairs / 2) * original <= left]
    return max(1, len(affordable))


def _finalists(recipes: list[Recipe], first: Sequence[Recipe] = ()) -> list[Recipe]:
    """The recipes to confirm, fastest first: at most MAX_FINALISTS, among them ``first``.

    Of recipes with the same quality risks only the fastest is among them: they pass or fail together.
    """
    fastest: dict[str, Recipe] = {}
    for recipe in reversed(recipes):
        if recipe:
            fastest.setdefault(str(quality_risks(recipe)), recipe)
    finalists = list(fastest.values())
    needed = [recipe for recipe in finalists if recipe in first]
    others = [recipe for recipe in finalists if recipe not in first][: MAX_FINALISTS - len(needed)]
    return [recipe for recipe in finalists if recipe in (*needed, *others)]


def quality_risks(recipe: Recipe) -> Recipe:
    """The recipe without hasten's own exact methods: what may cost quality. The card of any other is not trusted."""
    return recipe.drop(
        *(name for name in recipe.methods if comes_with_hasten(name) and exactness_of(name) in EXACT_CLASSES)
    )


def _next(attempts: list[Confirmation], first: Sequence[Recipe]) -> int | None:
    """Index of the attempt to run more seeds of; None if all are decided.

    Prefers those close to passing, then those of ``first`` that were not looked at yet.
    """

    def order(index: int) -> tuple:
        attempt = attempts[index]
        is_first = attempt.recipe in first and not attempt.looks
        rank = first.index(attempt.recipe) if is_first else len(first)
        return not _promising(attempt), rank, attempt.looks, index

    open_attempts = [
        index
        for index, attempt in enumerate(attempts)
        if not attempt.over and attempt.looks < attempt.most_looks and _worth_proving(index, attempts)
    ]
    return min(open_attempts, key=order, default=None)


def _is_hopeless(attempt: Confirmation) -> bool:
    """Whether a recipe ends worse by the margin or more, over enough seeds: more of them would hardly prove it."""
    difference = attempt.gate.difference
    return bool(difference) and len(attempt.gate.seeds) >= MIN_SEEDS and difference["mean"] <= -attempt.gate.margin


def _promising(attempt: Confirmation) -> bool:
    """Whether more seeds with the same mean difference in quality would let the attempt pass."""
    result = attempt.gate
    if result.passed or not result.difference or len(result.seeds) < 2:
        return result.passed
    return gate.pairs_needed(result, attempt.confidence, attempt.confidence) <= LOOKS[attempt.looks]


def _worth_proving(index: int, attempts: list[Confirmation]) -> bool:
    """Whether attempt ``index`` could still win: none that is faster, or nearly as fast, has passed."""
    gain = attempts[index].gain
    passed = max((other.gain.median for other in attempts if other.passed and other.gain), default=0.0)
    faster_passed = any(faster.passed for faster in attempts[:index])
    return not faster_passed and (gain is None or gain.median > WORTH_PROVING * passed)


def _look(
    study: Study,
    attempt: Confirmation,
    baseline: Baseline,
    seconds: float,
    pace_of: Recipe,
    waiting: int,
    rest: float,
) -> None:
    """Compares the speed of an attempt, runs more paired seeds and judges them, also where the budget ends in between.

    Stores all of it in the attempt. ``pace_of``: a recipe of the same steps, whose speed is measured in its place, so
    that two recipes which differ in the length only are compared once. Runs of the recipe alone leave enough of the
    budget for a first look at ``waiting`` other recipes, and ``rest`` seconds.
    """
    pairs = LOOKS[attempt.looks]
    attempt.comparison = _compare(study, Recipe(), pace_of, seconds)
    if is_disturbed(attempt.comparison):
        how = {**SEVERAL_ROUNDS, "seconds": seconds, "salt": f"confirmation {after_others(study)}"}
        attempt.comparison = compare_again(study, Recipe(), pace_of, attempt.comparison, **how)
    if "failed" in attempt.comparison:
        return attempt.finish(attempt.comparison["failed"])
    attempt.looks += 1
    try:
        why = _run_pairs(study, attempt, pairs, baseline)
        if not why and not _ends_worse(attempt, baseline):  # else further runs would only say so more surely
            of_run = fmean(run["trial_seconds"] for run in attempt.tuned_runs.values())
            spare = (study.budget.left_for_new() - rest) / of_run - waiting * MIN_SEEDS
            known = len(attempt.tuned_runs) - len(attempt.paired)
            count = min(pairs * _further_per_pair(attempt), known + max(0, int(spare)))
            why = _run_further(study, attempt, count, baseline)
    except OutOfBudgetError:
        _judge(attempt, baseline)
        raise
    if not why or attempt.missed:  # then what is known of its speed and final metric is still an estimate
        _judge(attempt, baseline)
    return attempt.finish(why) if why else None


def _compare(study: Study, a: Recipe, b: Recipe, seconds: float) -> dict:
    return study.compare_speed(a, b, **SEVERAL_ROUNDS, seconds=seconds, salt="confirmation")


def _run_pairs(study: Study, attempt: Confirmation, pairs: int, baseline: Baseline) -> str | None:
    """Runs both arms on ``pairs`` seeds. Returns why the recipe lost, or None."""
    for seed in fresh_seeds(study.seed, pairs):
        if seed not in attempt.paired and (why := _run_pair(study, attempt, seed, baseline)):
            return why
    return None


def _run_further(study: Study, attempt: Confirmation, count: int, baseline: Baseline) -> str | None:
    """Runs a cheap recipe alone, on so many further seeds. Returns why it lost, or None."""
    for seed in further_seeds(study.seed, count):
        attempt.tuned_runs[seed] = run = study.run(attempt.recipe, seed)
        if "failed" in run:
            return f"seed {seed}: {run['failed']}"
        attempt.missed = _falls_short(run, baseline) and not any(map(misses_target, attempt.baseline_runs.values()))
        if attempt.missed:
            return _never_reached(seed, run, baseline)
    return None


def _falls_short(run: dict, baseline: Baseline) -> bool:
    """Whether a run missed the target and ended below it by more than the margin: then no other seed makes it good.

    A run that ends nearer than that is left to the gate; of its recipe only the whole training may be faster.
    """
    return misses_target(run) and not baseline.nearly_reaches_target(run["metric"])


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
    """Runs of the recipe alone per pair of runs; more if it is faster."""
    arms = attempt.baseline_runs, attempt.tuned_runs
    original, tuned = (fmean(run["trial_seconds"] for run in runs.values()) for runs in arms)
    return min(MAX_FURTHER, int(FURTHER_SHARE * original / tuned))


def _run_pair(study: Study, attempt: Confirmation, seed: int, baseline: Baseline) -> str | None:
    """Runs both arms on one seed, in alternating order; the original's runs on the first seeds may be there already.

    Returns why the recipe lost, or None.
    """
    for is_tuned in (True, False) if len(attempt.paired) % 2 == 0 else (False, True):
        run = study.run(attempt.recipe, seed) if is_tuned else _run_original(study, seed, baseline)
        (attempt.tuned_runs if is_tuned else attempt.baseline_runs)[seed] = run
        if "failed" in run:
            return f"seed {seed}{'' if is_tuned else ', of the original'}: {run['failed']}"
    attempt.missed = _falls_short(attempt.tuned_runs[seed], baseline) and not misses_target(attempt.baseline_runs[seed])
    return _never_reached(seed, attempt.tuned_runs[seed], baseline) if attempt.missed else None


def _run_original(study: Study, seed: int, baseline: Baseline) -> dict:
    """The original's run on one seed; that of the baseline's substitute, marked as such, where there is none yet."""
    is_known = seed in baseline.run_seeds or study.has_run(Recipe(), seed)
    if not is_known and (substitute := _sound_substitute(study, baseline)):
        run = study.run(substitute.recipe, seed)
        if "failed" not in run:
            return run | {SUBSTITUTED: str(substitute.recipe)}
        baseline.substitute = None
    return study.run(Recipe(), seed)


def _sound_substitute(study: Study, baseline: Baseline) -> Substitute | None:
    """The baseline's substitute, if it ends as well as the original on the first seed, and holds the target there.

    Within the margin; where it claims the same bits on the CPU, at every evaluation the same. One that is not sound is
    dropped.
    """
    substitute = baseline.substitute
    if substitute is None or not baseline.runs:
        return None
    run, original = study.run(substitute.recipe, baseline.run_seeds[0]), baseline.runs[0]
    if "failed" in run or (misses_target(run) and not misses_target(original)):
        baseline.substitute = None
        return None
    worse = (original["metric"] - run["metric"]) * (1 if baseline.higher_is_better else -1)
    claims_same_bits = study.device == "cpu" and loosest_exactness(substitute.recipe) is Exactness.BIT_EXACT
    if worse > baseline.margin or (claims_same_bits and _metrics(run) != _metrics(original)):
        baseline.substitute = None
    return baseline.substitute


def _judge(attempt: Confirmation, baseline: Baseline) -> None:
    """Sets ``gate``, the speed-ups, ``over`` and ``why`` of an attempt from its runs, if it has paired seeds.

    The attempt is over once quality and speed-up are settled.
    """
    if not attempt.paired:
        return
    result = attempt.gate = _judge_misses(attempt, _ask_gate(attempt, baseline), baseline)
    attempt.why = result.why
    if len(attempt.paired) < 2:
        return
    gain, block_speedup = compute_speedups(attempt)
    slow = gain.high < SURELY_FASTER
    is_settled = is_disturbed(attempt.comparison) if result.passed else result.settled or _is_hopeless(attempt)
    attempt.over = attempt.passed or slow or is_settled
    if is_disturbed(attempt.comparison):
        attempt.why += f"; {disturbance(attempt.comparison)}"
    if attempt.uses_measured:
        attempt.why += f"; the blocks promised {block_speedup.median:.2f}x, the measured runs show less and count"
    if result.passed and not attempt.passed:
        attempt.why = f"as good, but {'not' if slow else 'not surely'} faster: {gain}; {attempt.why}"


def _ask_gate(attempt: Confirmation, baseline: Baseline) -> NonInferiorityResult:
    """What the gate says of the runs of an attempt, and where a substitute has made some of them."""
    original = baseline.by_seed | attempt.baseline_runs
    before, after = gate.final_metrics(original, attempt.tuned_runs, baseline.margin, baseline.higher_is_better)
    result = gate.quality_gate(
        {seed: before[seed] for seed in attempt.baseline_runs},
        after,
        margin=baseline.margin,
        higher_is_better=baseline.higher_is_better,
        more_baseline=[before[seed] for seed in original if seed not in attempt.baseline_runs],
        confidence=attempt.confidence,
    )
    substitutes = [run[SUBSTITUTED] for seed in attempt.paired if SUBSTITUTED in (run := attempt.baseline_runs[seed])]
    if not substitutes:
        return result
    how = f"{substitutes[0]}, exact on this task, trained in place of the original"
    return replace(result, why=f"{result.why}; on {len(substitutes)} of these seeds {how}")


def _judge_misses(attempt: Confirmation, result: NonInferiorityResult, baseline: Baseline) -> NonInferiorityResult:
    """The result of the gate, not passed where the recipe misses the target on average, and the original never does."""
    attempt.misses_on_average, missed = False, sum(map(misses_target, attempt.tuned_runs.values()))
    if not missed or any(map(misses_target, attempt.baseline_runs.values())):
        return result
    mean = fmean(run["metric"] for run in attempt.tuned_runs.values())
    attempt.misses_on_average = mean < baseline.target if baseline.higher_is_better else mean > baseline.target
    why = f"{result.why}; {missed} of its {len(attempt.tuned_runs)} seeds missed the target {baseline.target:g}"
    if not attempt.misses_on_average:
        return replace(result, why=why)
    is_settled = result.settled and 2 * missed > len(attempt.tuned_runs)
    return replace(result, passed=False, settled=is_settled, why=f"{why}, and so does their mean, {mean:.4g}")


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
