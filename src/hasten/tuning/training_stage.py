"""The second stage of a search: methods that change the training, by whole trainings or by shorter ones."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from hasten.benchmarking.ratio import Ratio
from hasten.core.errors import RunError
from hasten.core.recipe import Recipe
from hasten.engine.registry import drop_distributed
from hasten.hosts.services import LONGER_RUN
from hasten.tuning import finding
from hasten.tuning.ablation import contributions, leave_one_out
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.confirm import compare_with_strong_baseline, confirm, fresh_seeds, quality_risks
from hasten.tuning.confirmation import Confirmation
from hasten.tuning.experience import is_exact
from hasten.tuning.finding import ESTIMATED, EXACT, PRECISION, PROVEN, Finding
from hasten.tuning.gate import (
    LOOKS,
    MIN_SEEDS,
    MOST_PAIRS,
    final_metrics,
    pairs_needed,
    quality_gate,
    resolve_margin,
)
from hasten.tuning.joint_search import Space, add_lengthened, has_length, search_jointly, shorten, split_joint
from hasten.tuning.largest_batch import largest_batch_compositions
from hasten.tuning.result import SearchState
from hasten.tuning.study import PROFILE_SECONDS, Study
from hasten.tuning.systems import is_disturbed
from hasten.tuning.systems_stage import (
    MIN_SHORT_RUN_S,
    SHORT_RUNS,
    compare_with_one_process,
    experience_of,
    note_not_tried,
    seconds_to_build,
    whole_runs_seconds,
)
from hasten.tuning.training import (
    SEED_STEP,
    SOONER,
    Baseline,
    Outcome,
    Substitute,
    first_outcome,
    search_training,
    seconds_of,
    try_training_composition,
)
from hasten.tuning.varied_arguments import sets_arguments
from hasten.utils.durations import duration_option, format_duration

BASELINE_SEEDS = 3
FEW_BASELINE_SEEDS, FEW_RUNS = 2, 8  # seeds where the budget is worth fewer runs of the task than this
MAX_COMPOSITIONS = 3
FEWEST_EVALUATIONS = 4  # of all runs, which show that a metric never moves
PROVABLE = 2.0  # standard errors inside of the margin
EASIER = 2  # recipes that are confirmed before the fastest one
CLOCK_SPREAD = 1.4  # factor by which the clocks of single runs, minutes apart, may differ
TRAINING_SHARE = 0.75  # of the budget left, for the search; the rest is for the confirmation


def find_training(study: Study, state: SearchState) -> None:
    """Finds and confirms, in ``state``, recipes that change the training.

    By whole trainings or, if those do not fit into the budget, by shorter ones (``study.horizon``).
    """
    budget, candidates = study.budget, state.candidates
    items = [*candidates.communication, *candidates.training]
    exact = finding.recommended(state.findings, PRECISION)
    horizon = _horizon(study, state, items, exact.speedup.median if exact else 1.0)
    if state.winner and horizon < 1:  # shorter trainings have a target of their own, and prove nothing
        return _measure_shares(study, state, exact if exact is state.chosen else None)
    study.horizon = horizon
    if not study.horizon:
        return _measure_shares(study, state, exact)
    is_whole = study.horizon >= 1
    try:
        baseline = state.baseline = run_baseline(study, state.margin)
    except OutOfBudgetError:
        return study.note("baseline", "baseline", "stopped", "the budget ended before the task's own training")
    except RunError as error:
        if not state.findings:
            raise
        study.note("baseline", "baseline", "failed", str(error))
        return _measure_shares(study, state, exact)  # exact recipes need no metric
    state.save()
    if is_whole and _never_moves(baseline):
        why = f"the metric is {baseline.metric:g} at every evaluation: it measures nothing"
        study.note("methods that change the training", "training", "not tried", why)
        return _measure_shares(study, state, exact)
    while is_whole and exact and exact.evidence == PRECISION and not _keeps_quality(study, state, baseline, exact):
        exact = finding.recommended(state.findings, PRECISION)  # the refuted one is an estimate now
    state.incumbents.recipes = [Recipe(), *([exact.recipe] if exact else [])]
    run_seconds = fmean(run["trial_seconds"] for run in baseline.runs)
    first = first_outcome(baseline, exact.speedup.median if exact else 1.0)
    confirmation = (MIN_SEEDS - len(baseline.runs) + MIN_SEEDS / 2) * run_seconds
    confirmation += 2 * (state.comparison_seconds + seconds_to_build(state.plan))
    saving = state.incumbents.calling(lambda: _save_unconfirmed(study, state, baseline))
    with budget.reserve(confirmation), budget.part(TRAINING_SHARE), saving:
        _search(study, state, items, baseline, first)
    if Space(split_joint(items)[0]).length is None:
        _note_shorter_trainings(study, state)
    state.save()
    if budget.exhausted:
        note_not_tried(study, "training", items)
    _confirm_found(study, state, items, baseline, is_whole)


def _never_moves(baseline: Baseline) -> bool:
    """Whether the metric is the same at every evaluation of every run."""
    values = [row["metric"] for run in baseline.runs for row in run["evaluations"]]
    return len(values) >= FEWEST_EVALUATIONS and len(set(values)) == 1


def _search(study: Study, state: SearchState, items: list, baseline: Baseline, best: Outcome) -> None:
    """Searches by trainings, in ``state``: compositions, the options of the schedule together, then single methods.

    What the user varies (``--vary``) comes before compositions. ``items`` are the candidates, ``best`` is the outcome
    to beat.
    """
    joint, others = split_joint(items)
    recipes = [recipe for recipe in experience_of(study, state) if not is_exact(recipe)][:MAX_COMPOSITIONS]
    if not state.candidates.is_restricted:
        facts = frozenset(state.diagnosis.get("facts") or ())
        epoch = state.plan["samples_per_epoch"] or float("inf")
        recipes += largest_batch_compositions(study, state.incumbents.best, items, facts, epoch)

    def shortened(recipe: Recipe, found: Outcome) -> list[tuple[Recipe, Outcome]]:
        return shorten(study, joint, baseline, recipe, found)

    def by_compositions(best: Outcome) -> Outcome:
        for recipe in recipes:  # each is compared at the shortest length with which those before it end well
            best = try_training_composition(study, state.incumbents, best, recipe, baseline, shortened)
        return best

    def jointly(best: Outcome) -> Outcome:
        if not Space(joint).shortens(best, baseline):
            others[:0] = [item for item in joint if not has_length(item)]
            return best
        found = search_jointly(study, state.incumbents, joint, baseline, best)
        for recipe, shorter in shortened(state.incumbents.best, found) if found is not best else ():
            state.incumbents.push(recipe)
            found = shorter
        return found

    stages = [by_compositions, jointly]
    if any(sets_arguments(item.name) for item in joint):  # the user asks for it, and short trainings cost less
        stages.reverse()
    for stage in stages:
        best = stage(best)
    search_training(study, state.incumbents, others, baseline, best, shortened)
    state.contributions = leave_one_out(study, state.incumbents, state.samples, baseline)
    state.ablated = state.incumbents.best


def _note_shorter_trainings(study: Study, state: SearchState) -> None:
    """Notes that a shorter training was not tried, where one reached the target sooner and nothing could shorten it."""
    sooner = next((trial for trial in study.trials if SOONER in trial["why"]), None)
    if sooner is None:
        return
    names = ",".join(state.length_arguments)
    remedy = f"--vary {names} lets the search shorten it" if names else "give the training fewer steps with it"
    study.note("a shorter training", "training", "not made", f"{sooner['what']} {sooner['why']}; {remedy}")


def _confirm_found(study: Study, state: SearchState, items: list, baseline: Baseline, is_whole: bool) -> None:
    """Confirms what the search has found: recipes faster than every proven one that were not confirmed before."""
    # those of an earlier result are confirmed again, from the store, so that a winner is measured to the end; a search
    # that continues has tested them, and shorter trainings say nothing about one that is proven
    levels = (PROVEN, ESTIMATED) if is_whole else (ESTIMATED,)
    earlier = [found for found in state.findings if found.evidence in levels and not found.comparison]
    again = [found.recipe for found in earlier if found.recipe not in state.tested]
    findings = [found for found in state.findings if found.recipe not in again]
    recipes, proven = state.incumbents.recipes, [found.recipe for found in findings if found.evidence == PROVEN]
    first_faster = 1 + max((index for index, recipe in enumerate(recipes) if recipe in proven), default=-1)
    recipes = recipes[first_faster:]
    known = [*state.tested, *(found.recipe for found in findings)]
    recipes = [recipe for recipe in recipes if quality_risks(recipe) and recipe not in known]
    joint, _ = split_joint(items)
    longer = add_lengthened(recipes, joint, baseline, lambda recipe: _metrics(study, recipe, baseline))
    recipes = [recipe for recipe in recipes if recipe not in known]
    _confirm(study, state, baseline, recipes, is_whole, _easiest_to_prove(study, recipes, longer, baseline))


def _measure_shares(study: Study, state: SearchState, exact: Finding | None) -> None:
    """Measures what each method of the exact recipe contributes, where no recipe follows that is taken apart."""
    if exact and state.ablated != exact.recipe:
        state.ablated, state.contributions = exact.recipe, contributions(study, exact.recipe, state.samples)


def _keeps_quality(study: Study, state: SearchState, baseline: Baseline, found: Finding) -> bool:
    """Trains a recipe of lower precision on the seeds of the baseline; False if it surely ends worse, by the margin.

    Its gradients and its first losses have passed their checks. Whole trainings can still contradict these; then it is
    an estimate only. What they show is added to the finding.
    """
    runs: dict[int, dict] = {}
    with study.budget.part(1.0):
        for seed in baseline.run_seeds:
            runs[seed] = study.run(found.recipe, seed)
            if "failed" in runs[seed]:
                break
    if failed := next((run["failed"] for run in runs.values() if "failed" in run), ""):
        found.evidence, found.to_prove = ESTIMATED, "its whole training fails"
        study.note(str(found.recipe), "confirmation", "failed", failed)
        return False
    original = {seed: run for seed, run in baseline.by_seed.items() if seed in runs}
    before, after = final_metrics(original, runs, baseline.margin, baseline.higher_is_better)
    result = quality_gate(before, after, margin=baseline.margin, higher_is_better=baseline.higher_is_better)
    if not result.difference:
        return True
    mean, found.quality = result.difference["mean"], result.difference
    is_worse = mean <= -baseline.margin and result.difference["high"] < 0
    why = f"over {len(runs)} paired seeds the metric changes by {mean:+.4g}; the margin is {baseline.margin:.3g}"
    study.note(str(found.recipe), "confirmation", "refused" if is_worse else "passed", why)
    found.why = f"{found.why}; {why}"
    if is_worse:
        found.evidence, found.to_prove = ESTIMATED, "more seeds would hardly prove it: whole trainings end worse"
    state.save()
    return not is_worse


def _easiest_to_prove(
    study: Study, recipes: list[Recipe], longer: Recipe | None, baseline: Baseline
) -> tuple[Recipe, ...]:
    """The recipes to confirm before the fastest one, which may have ended as well by luck: it was the best of several.

    Two of them, the faster one first: those that ended so well in the search that the gate may pass them with the seeds
    that a search can train, and ``longer``, the one of ``add_lengthened``. ``recipes`` are each faster than the one
    before it.
    """
    ends = [(recipe, _metrics(study, recipe, baseline)) for recipe in reversed(recipes)]
    first = [one for one, metrics in ends if one == longer or (metrics and baseline.as_good(metrics, surely=PROVABLE))]
    return tuple(first[:EASIER])


def _metrics(study: Study, recipe: Recipe, baseline: Baseline) -> list[float]:
    """The final metrics of a recipe on the seeds of the search, as far as it was trained on them."""
    runs = [study.complete.get((str(recipe), seed, study.horizon)) for seed in baseline.search_seeds]
    return [run["metric"] for run in runs if run]


def _save_unconfirmed(study: Study, state: SearchState, baseline: Baseline) -> None:
    """Saves the best recipe of a search as ``state.unconfirmed``, an estimate."""
    best = state.incumbents.best
    runs = [study.complete.get((str(best), seed, study.horizon)) for seed in baseline.search_seeds]
    seconds = [seconds_of(run) for run in runs if run]
    if seconds and best not in [found.recipe for found in state.findings]:
        whole, tuned = fmean(map(seconds_of, baseline.runs)), fmean(seconds)
        median = whole / tuned
        speedup = Ratio(median, median / CLOCK_SPREAD, median * CLOCK_SPREAD)
        seeds = f"{len(seconds)} seed{'s' * (len(seconds) > 1)}"
        why = f"trained so fast on {seeds} in the search, and ended as well; not confirmed yet"
        needed = MIN_SEEDS * (whole + tuned) / study.horizon
        to_prove = f"confirm it on {MIN_SEEDS} fresh seeds: --budget +{duration_option(needed)}"
        state.unconfirmed = Finding(best, ESTIMATED, speedup, why, to_prove=to_prove)
        state.save()


def prove(study: Study, state: SearchState, recipes: list[Recipe]) -> None:
    """Confirms recipes of an earlier search, each faster than the one before it, by whole trainings."""
    study.horizon = 1.0
    baseline = state.baseline = run_baseline(study, state.margin)
    _confirm(study, state, baseline, recipes, is_whole=True)


def _horizon(study: Study, state: SearchState, items: list, speedup: float) -> float:
    """Fraction of the training that fits as often as the training stage needs it; 0 if none does.

    ``speedup`` is that of the exact recipe, with which the candidates train.
    """
    left, seconds = study.budget.left(), state.run_seconds
    if not items or seconds is None:
        return 0.0
    whole = whole_runs_seconds(state, speedup)
    if left >= whole:
        return 1.0
    if left / SHORT_RUNS < MIN_SHORT_RUN_S or not study.task.can_be_shortened:
        needed = duration_option(whole + study.budget.spent)
        why = f"what is left of the budget is too little; --budget {needed} lets it run whole trainings"
        study.note("methods that change the training", "training", "not tried", why)
        return 0.0
    # one of few values, so that a search which was interrupted finds its runs in the store
    return 2 ** (math.floor(2 * math.log2(left / SHORT_RUNS / seconds)) / 2)


def run_baseline(study: Study, margin: float | None) -> Baseline:
    """Trains the original on 2 or 3 seeds; without a target, or with shorter trainings, sets ``study.target``.

    RunError if a run fails, or if no run holds the target.
    """
    runs, seeds = [], []
    for seed in fresh_seeds(study.seed, BASELINE_SEEDS):
        runs.append(study.run(Recipe(), seed))
        seeds.append(seed)
        if "failed" in runs[-1]:
            raise RunError(f"the task's own training does not run: {runs[-1]['failed']}")
        is_expensive = study.budget.total < FEW_RUNS * runs[0]["trial_seconds"]
        if len(runs) == FEW_BASELINE_SEEDS and is_expensive:
            break
    metrics = [run["metric"] for run in runs]
    size, why = resolve_margin(metrics, margin, max(run.get("resolution", 0.0) for run in runs))
    worst, best, sign = (min, max, 1) if study.higher_is_better else (max, min, -1)
    if study.target is None or study.horizon < 1:  # what every seed reaches, less what the gate lets a recipe be worse
        study.target = worst(run["best_metric"] for run in runs) - sign * size
        runs = [study.run(Recipe(), seed) for seed in seeds]
        if all(run["seconds_to_target"] is None for run in runs):  # a peak, which no run has held
            study.target = worst(_best_held(run, worst, best) for run in runs) - sign * size
            runs = [study.run(Recipe(), seed) for seed in seeds]
    target: Any = study.target
    if all(run["seconds_to_target"] is None for run in runs):
        raise RunError(
            f"the task's own training never held its target {target:g} (it ended at {best(metrics):.4g}); "
            "lower the target or train longer"
        )
    search_seeds = [study.seed + SEED_STEP * index for index in range(len(runs))]
    baseline = Baseline(search_seeds, runs, target, size, study.higher_is_better, seeds, why)
    ends = ", ".join(f"{metric:.4g}" for metric in metrics)
    text = f"{len(runs)} seeds end at {ends}; margin {size:.3g}: {why}"
    study.note("baseline", "baseline", "measured", text, seconds=sum(run["trial_seconds"] for run in runs))
    return baseline


def _best_held(run: dict, worst: Callable[..., float], best: Callable[..., float]) -> float:
    """The best metric of a run that its next evaluation, if there is one, has held."""
    metrics = [row["metric"] for row in run["evaluations"] if row["metric"] is not None]
    return best(worst(metrics[index : index + 2]) for index in range(len(metrics)))


def _confirm(
    study: Study,
    state: SearchState,
    baseline: Baseline,
    recipes: list[Recipe],
    is_whole: bool,
    first: Sequence[Recipe] = (),
) -> None:
    """Confirms the best recipes, in ``state``, and measures a new winner. ``first``: as for ``confirm``."""
    budget, seconds = study.budget, state.comparison_seconds
    tested, findings, before = list(state.tested), list(state.findings), state.winner
    baseline.substitute = _substitute(findings) if is_whole else None

    def take(attempts: list[Confirmation]) -> None:
        """Puts what is known of the attempts so far into the state, and saves it: what was proven is not lost."""
        looked_at = [attempt for attempt in attempts if attempt.over or attempt.gain]
        judged = [attempt.recipe for attempt in looked_at]
        if state.unconfirmed and state.unconfirmed.recipe in judged:
            state.unconfirmed = None
        if is_whole:  # the gate has judged them: further attempts have less of its error
            state.tested = tested + [one.recipe for one in looked_at if one.over or len(one.paired) >= MIN_SEEDS]
        known = [one for one in findings if one.evidence != ESTIMATED or one.recipe not in judged]
        settled = [one for one in looked_at if is_whole and one.over and one.gain and not is_disturbed(one.comparison)]
        known = [one for one in known if one.recipe not in [each.recipe for each in settled]]
        found = [one for one in looked_at if one.gain and one.gain.median > 1]
        state.findings = known + [_finding_of(study, state, attempt, is_whole) for attempt in found]
        best = max(attempts, key=lambda one: (one.passed, not one.passed and len(one.paired), bool(one.comparison)))
        if is_whole and (before is None or best.beats(before)):
            state.confirmation = best
        state.save()

    if recipes:
        rest = PROFILE_SECONDS + bool(state.strong_baseline) * seconds
        with budget.reserve((study.processes > 1) * seconds):  # a comparison with one process may change the verdict
            take(confirm(study, recipes, baseline, seconds, tested, take, first, rest))
    if state.winner is not None and state.winner is not before:
        _measure_winner(study, state, baseline, state.winner)


def _measure_winner(study: Study, state: SearchState, baseline: Baseline, winner: Confirmation) -> None:
    """Compares a new winner with one process and the strong baseline; measures its steps and its methods' shares."""
    budget, seconds = study.budget, state.comparison_seconds
    if study.processes > 1 and drop_distributed(winner.recipe):
        with budget.part(1.0):
            samples = fmean(count for count, _ in winner.counts.tuned) if winner.counts else 0.0
            state.winner_in_one_process = compare_with_one_process(study, state, winner.recipe, samples)
    pace, shares = winner.comparison["seconds_per_1000_samples"]["a"], state.diagnosis.get("phases") or {}
    state.step_profiles["baseline"] = {name: share * pace for name, share in shares.items() if share is not None}
    with budget.part(1.0):
        compare_with_strong_baseline(study, winner, state.strong_baseline, seconds)
        state.step_profiles["tuned"] = study.step_profile(winner.recipe)
    if winner.recipe != state.ablated or len(state.contributions) < len(winner.recipe.methods):
        samples = baseline.samples_to_target()
        state.ablated, state.contributions = winner.recipe, contributions(study, winner.recipe, samples, baseline)


def _substitute(findings: list[Finding]) -> Substitute | None:
    """The fastest exact recipe of hasten's own methods that was found on this task; None if there is none."""
    exact = [found for found in findings if not quality_risks(found.recipe)]
    best = finding.recommended(exact, EXACT)
    return best and Substitute(best.recipe, best.gain.median)


def _finding_of(study: Study, state: SearchState, attempt: Confirmation, is_whole: bool) -> Finding:
    """An attempt of the confirmation as a finding: proven if whole trainings passed the gate, else estimated."""
    assert attempt.speedup is not None
    is_proven = is_whole and attempt.gate.passed and not attempt.missed and not is_disturbed(attempt.comparison)
    where = "" if is_whole else f"in {study.horizon:.2g} of the training, with its schedule compressed: "
    return Finding(
        attempt.recipe,
        PROVEN if is_proven else ESTIMATED,
        attempt.speedup,
        where + attempt.why,
        attempt.training_speedup,
        attempt.gate.difference,
        to_prove="" if is_proven else _to_prove(state, attempt, is_whole, bool(study.task.command)),
        comparison=attempt.comparison,
    )


def _to_prove(state: SearchState, attempt: Confirmation, is_whole: bool, of_script: bool) -> str:
    """What it would take to prove the recipe of an attempt: seeds and budget."""
    result, seconds = attempt.gate, state.run_seconds
    if result.settled and not result.passed and result.difference is None:
        return f"no more seeds would prove it: {result.why}"
    if is_disturbed(attempt.comparison):
        return f"repeat it on an idle machine: --budget +{duration_option(2 * state.comparison_seconds)}"
    if result.difference and result.difference["mean"] <= -result.margin:
        return "more seeds would hardly prove it: it ends worse by more than the margin"
    if attempt.misses_on_average:
        return "more seeds would hardly prove it: it misses the target on average; accept it by --evidence estimated"
    if attempt.missed:
        return "no more seeds would prove it: one missed the target; lower the target, or accept --evidence estimated"
    done, needed = 0, float(MIN_SEEDS)
    if is_whole and result.difference and len(result.seeds) >= 2:
        # a search that continues asks at a quarter of the error, and at best once
        later = 1 - (1 - attempt.confidence) * attempt.most_looks / 4
        done, needed = len(attempt.paired), pairs_needed(result, attempt.confidence, later)
    seeds = next((look for look in LOOKS if look >= needed and look > done), 0) - done
    if seeds <= 0:
        count = f"about {needed:.0f}" if needed < math.inf else f"more than {MOST_PAIRS}"
        return (
            f"the seeds differ too much: it would take {count} paired seeds, and a search trains at most {LOOKS[-1]}; "
            "give a wider --margin, or accept it by --evidence estimated"
        )
    more_seeds = f"{seeds} more seed{'s' * (seeds > 1)}"
    if seconds is None or attempt.speedup is None:
        return more_seeds
    exact = _substitute(state.findings)
    of_original = seeds if exact is None else 0 if is_whole else BASELINE_SEEDS
    more = (seeds / attempt.speedup.median + of_original) * seconds
    if exact and seeds > of_original:
        more += (seeds - of_original + 1) * seconds / exact.speedup  # one run more shows that it ends as well
    if of_script:  # a search that continues first watches a whole run, in at most half of its time
        more = max(more + LONGER_RUN * seconds, 2 * LONGER_RUN * seconds)
    else:  # ``finish_earlier`` trains nothing where fewer than two runs fit
        more = state.start_seconds + max(more, 2 * seconds)
    return f"{more_seeds}, about {format_duration(more)}: --budget +{duration_option(more)}"
