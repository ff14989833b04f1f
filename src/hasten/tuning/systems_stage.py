"""The first stage of ``tune``: exact methods, then methods of lower precision, both judged by the speed of steps.

It divides the budget, calls the greedy search of ``systems.py``, and confirms and stores what that found. Where the
budget allows a few comparisons only, there is no search: the best guesses are measured.
"""

import warnings
from contextlib import suppress
from functools import partial
from typing import Any

from hasten.benchmarking.arm import warm_up_steps
from hasten.benchmarking.blocks import MIN_PAIRS, block_steps
from hasten.benchmarking.equivalence_runs import STEPS as CHECKED_STEPS
from hasten.benchmarking.ratio import SLOWER, Ratio
from hasten.core.card import Exactness
from hasten.core.errors import ProgressWarning
from hasten.core.recipe import Recipe
from hasten.engine.environment import cores
from hasten.engine.registry import drop_distributed
from hasten.tuning.ablation import leave_one_out
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.candidates import Candidates, strong_baselines
from hasten.tuning.experience import compositions, distinct, exact_part, gpu_compositions
from hasten.tuning.finding import CONTINUED_SHARE, ESTIMATED, EXACT, SURELY_FASTER, Finding
from hasten.tuning.result import SearchState
from hasten.tuning.study import CHECK_SECONDS, CHECK_STEPS, Study, changes_training, is_in
from hasten.tuning.systems import (
    AS_FAST,
    LONGER,
    Candidate,
    able_forms,
    add_or_replace,
    confirm_speed,
    conflict_reason,
    failure_verdict,
    is_disturbed,
    product,
    search_systems,
    try_compositions,
    whole_run_ratio,
    without_effect,
)
from hasten.utils.durations import duration_option, format_duration

SYSTEMS_SHARE = 0.35  # of the budget left, if whole trainings fit into the rest
SYSTEMS_SHARE_OF_LONG = 0.75  # if they do not
EXACT_SHARE = 0.8  # of the budget of the systems stage, for the search among exact methods
COMPARISON_S = (5.0, 30.0)  # least and most seconds of a comparison that is reported
SCREENING_S = (2.0, 8.0)  # least and most seconds of a comparison
ONE_PROCESS_SHARE = 0.2  # of the budget, for the comparison with one process
BASELINE_RUNS, TUNED_RUNS = 3.0, 4.0  # whole runs of its training stage at least; without the time, runs are shorter
USUAL_SPEEDUP = 2.0  # of the exact methods, where it is not known yet
SHORT_RUNS = 14.0  # the length of a shorter training is the budget left, divided by this
MIN_SHORT_RUN_S = 2.0  # a shorter training says nothing
MAX_COMPOSITIONS = 2
SEARCH_COMPARISONS = 5.0  # with fewer in the budget there is no search: the best guess is measured
GUESSES = 3
LUCK = 1.05  # ratio of two comparisons of the same recipe, which is seen easily
PROCESS_START_S = 0.5
SPARE = 1.6  # times what a first comparison would have taken, of the budget that is recommended


def find_systems(study: Study, state: SearchState, is_followed: bool) -> None:
    """Finds and confirms the fastest recipe of exact methods, then that with methods of lower precision, in ``state``.

    ``is_followed``: whether a stage with whole trainings comes next, which gets a part of the budget.
    """
    budget, seconds, samples, plan = study.budget, state.comparison_seconds, state.samples, state.plan
    is_followed = is_followed and bool(state.candidates.training or state.candidates.communication)
    is_followed = is_followed and state.run_seconds is not None
    if budget.left() < SEARCH_COMPARISONS * comparison_seconds(plan):
        return confirm_best_guess(study, state, is_followed)
    share = _share_of_budget(study, state) if is_followed else 1.0
    screening = min(max(SCREENING_S[0], budget.total / 40), SCREENING_S[1])
    exact, lower = _by_exactness(state.candidates, state.level)
    experienced = _exact_compositions(study, state)
    if study.processes > 1:
        with budget.part(ONE_PROCESS_SHARE):
            state.one_process = compare_with_one_process(study, state, Recipe(), samples)
    withheld, save = (1 - share) * budget.left(), partial(_save_unconfirmed, state)
    with budget.part(share):
        exact_share = budget.part(EXACT_SHARE if lower else 1.0)
        with budget.reserve(seconds + _confirmation_overhead(plan)), exact_share, state.incumbents.calling(save):
            # together their gain is seen, where that of each is lost in the noise of its comparison
            try_compositions(study, state.incumbents, _together(state, exact), samples, LONGER * screening)
            try_compositions(study, state.incumbents, experienced, samples, screening)
            quick = [item for item in exact if not item.card.high_setup_cost]
            search_systems(study, state.incumbents, quick, samples, screening)
            find_strong_baseline(study, state, samples, screening)
            search_systems(study, state.incumbents, [item for item in exact if item not in quick], samples, screening)
            # else the whole recipe is taken apart once trainings have shown which it is
            if share != SYSTEMS_SHARE:
                shares = leave_one_out(study, state.incumbents, samples)
                if not state.winner:
                    state.contributions, state.ablated = shares, state.incumbents.best
    _confirm(study, state, state.incumbents.recipes, is_last=not lower and share == 1)
    if lower:
        before = len(state.incumbents.recipes)
        rest = budget.part(max(0.0, 1 - withheld / max(budget.left(), 1e-9)))
        with rest, budget.reserve(seconds + _confirmation_overhead(plan)), state.incumbents.calling(save):
            if not state.candidates.is_restricted:
                together = [_able(study, one) for one in gpu_compositions(state.diagnosis.get("facts") or ())]
                try_compositions(study, state.incumbents, together, samples, screening)
            search_systems(study, state.incumbents, lower, samples, screening)
        if found := state.incumbents.recipes[before:]:
            _confirm(study, state, found, is_last=share == 1)
    if budget.exhausted:
        note_not_tried(study, "systems", [*exact, *lower])


def _share_of_budget(study: Study, state: SearchState) -> float:
    """The part of the budget left for this stage where one with trainings follows: 1.0 if not even short ones fit."""
    left = study.budget.left()
    if left * (1 - SYSTEMS_SHARE) >= whole_runs_seconds(state, USUAL_SPEEDUP):
        return SYSTEMS_SHARE
    fits_short = left * (1 - SYSTEMS_SHARE_OF_LONG) >= SHORT_RUNS * MIN_SHORT_RUN_S
    return SYSTEMS_SHARE_OF_LONG if fits_short and study.task.can_be_shortened else 1.0


def _confirm(study: Study, state: SearchState, recipes: list[Recipe], is_last: bool) -> None:
    """Measures the best of the recipes again, in ``state``; one that it refuses is no base of what follows.

    With all that is left of the budget: a trial may have taken more than the share of the search, and what was found
    must not be lost. ``is_last``: as for ``confirm_speed``.
    """
    with study.budget.part(1.0):
        seconds = _all_seconds(study, state.plan, state.comparison_seconds) if is_last else state.comparison_seconds
        _add(state, found := confirm_speed(study, recipes, state.samples, seconds, is_last))
        good = found if found and found.speedup.median > SURELY_FASTER else None
        base, speedup = (good.recipe, good.speedup) if good else (Recipe(), AS_FAST)
        if state.incumbents.best != base:
            state.incumbents.recipes.append(base)
            state.incumbents.speedup = speedup
        state.save()


def settle_open(study: Study, state: SearchState) -> None:
    """Compares recipes that keep the training and may be faster for longer, with what the other stages have left of the
    budget. For a search that would recommend nothing.
    """
    open_ones = [one for one in state.findings if one.to_prove and not changes_training(one.recipe)]
    # an estimate is open only where other programs have disturbed it: whole trainings have refuted the others
    open_ones = [one for one in open_ones if one.evidence != ESTIMATED or is_disturbed(one.comparison)]
    recipes = [one.recipe for one in sorted(open_ones, key=lambda one: one.gain.median)]
    with suppress(OutOfBudgetError):
        if recipes:
            _confirm(study, state, recipes, is_last=True)


def _save_unconfirmed(state: SearchState) -> None:
    """Saves the best recipe of a search as ``state.unconfirmed``, an estimate."""
    best = state.incumbents.best
    if best and best not in [found.recipe for found in state.findings]:
        needed = (state.comparison_seconds + _confirmation_overhead(state.plan)) / CONTINUED_SHARE
        why, to_prove = "as fast as that in the search", f"measure it again: --budget +{duration_option(needed)}"
        state.unconfirmed = Finding(best, ESTIMATED, state.incumbents.speedup, why, to_prove=to_prove)
        state.save()


def _add(state: SearchState, found: Finding | None) -> None:
    state.unconfirmed = None
    same = [one for one in state.findings if found and one.recipe == found.recipe]
    is_settled = any(one.is_surely_faster and one.evidence != ESTIMATED for one in same)
    longest = max((one.comparison.get("seconds", 0.0) for one in same if one.evidence != ESTIMATED), default=0.0)
    is_shorter = found is not None and found.comparison.get("seconds", 0.0) < longest
    # in place of what an earlier search, of which less is stored, has found of this recipe; but a shorter comparison
    # from the store that leaves it open does not replace a longer one, or what that has settled
    if found and not (found.to_prove and (is_settled or is_shorter)):
        state.findings = [*(one for one in state.findings if one.recipe != found.recipe), found]


def _by_exactness(candidates: Candidates, level: str) -> tuple[list, list]:
    """(exact candidates, candidates of lower precision, if the level of the search allows any)."""
    lower = [item for item in candidates.systems if item.card.exactness is Exactness.REDUCED_PRECISION]
    return [item for item in candidates.systems if item not in lower], [] if level == EXACT else lower


def _able(study: Study, recipe: Recipe) -> Recipe:
    """The recipe without the methods that cannot run where the task's loop is."""
    return recipe.drop(*(name for name in recipe.methods if study.refusal(Recipe({name: {}}))))


def experience_of(study: Study, state: SearchState) -> list[Recipe]:
    """The recipes that made tasks like this one faster, without the methods that cannot run where its loop is.

    None where the user chose the methods.
    """
    if state.candidates.is_restricted:
        return []
    phases = {name: share for name, share in (state.diagnosis.get("phases") or {}).items() if share}
    facts = state.diagnosis.get("facts") or ()
    recipes = (*gpu_compositions(facts), *compositions(facts, phases, study.device))
    return distinct(_able(study, recipe) for recipe in recipes)


def _exact_compositions(study: Study, state: SearchState) -> list[Recipe]:
    """The exact methods of MAX_COMPOSITIONS recipes that made similar tasks faster; most similar task first."""
    return distinct(map(exact_part, experience_of(study, state)))[:MAX_COMPOSITIONS]


def _together(state: SearchState, exact: list[Candidate]) -> list[Recipe]:
    """[one recipe of all exact methods that have no option to choose, start fast and exclude no earlier one], or []."""
    recipe = Recipe()
    for item in exact if not state.candidates.is_restricted else ():
        has_no_choice = item.presets[:1] == ({},) or item.is_remedy
        if has_no_choice and not item.card.high_setup_cost and not item.offered:
            joined = recipe.with_method(item.name, **item.presets[0])
            recipe = joined if conflict_reason(joined) is None else recipe
    return [recipe] if len(recipe.methods) > 1 else []


def whole_runs_seconds(state: SearchState, speedup: float) -> float:
    """Seconds that the training stage takes at least with whole runs, if exact methods make them ``speedup`` faster."""
    return (BASELINE_RUNS + TUNED_RUNS / speedup) * (state.run_seconds or float("inf"))


def _confirmation_overhead(plan: dict[str, Any]) -> float:
    """Seconds that a confirmation takes besides its rounds: it builds the first pair, and checks the exactness."""
    return 2 * seconds_to_build(plan) + _check_seconds(plan)


def _check_seconds(plan: dict[str, Any], is_first: bool = True) -> float:
    """Seconds that a check of exactness takes. The first of a script also runs it as it is, which is done once."""
    if seconds := plan.get("check_seconds"):  # a script, whose runs are not cut short: of the first and of later ones
        return seconds[0 if is_first else 1]
    steps = min(2 * CHECKED_STEPS * plan["step"], max(CHECK_SECONDS, CHECK_STEPS * plan["step"]))
    return 2 * seconds_to_build(plan) + steps


def _all_seconds(study: Study, plan: dict[str, Any], least: float) -> float:
    """Seconds for a confirmation that nothing follows: the rest of the budget, within the limits of COMPARISON_S."""
    return min(max(least, study.budget.left() - _confirmation_overhead(plan)), COMPARISON_S[1])


def seconds_to_build(plan: dict[str, Any]) -> float:
    """Seconds in which an arm is built and warmed up."""
    return PROCESS_START_S + plan["start"] + warm_up_steps(plan["step"]) * plan["step"] + (plan["evaluation"] or 0.0)


def comparison_seconds(plan: dict[str, Any], is_first: bool = False) -> float:
    """Seconds that a comparison of two recipes takes at least, with the check of their exactness."""
    blocks = 2 * MIN_PAIRS * block_steps(plan) * plan["step"]
    return 2 * seconds_to_build(plan) + blocks + _check_seconds(plan, is_first)


def confirm_best_guess(study: Study, state: SearchState, is_followed: bool = False) -> None:
    """Measures recipes that are worth a guess, where the budget allows only a few comparisons, until one is faster.

    A recipe that no search has picked needs no second measurement: its comparison is the confirmation.
    """
    plan, tried = state.plan, list[Recipe]()
    needed = comparison_seconds(plan, is_first=True)
    for recipe in (form for guess in _guesses(study, state) for form in able_forms(study, guess)):
        if recipe in tried:
            continue
        began = study.budget.spent
        try:
            if study.budget.left() < needed:
                raise OutOfBudgetError
            found = confirm_speed(study, [recipe], state.samples, _all_seconds(study, plan, state.comparison_seconds))
        except OutOfBudgetError:
            needed = max(needed, study.budget.spent - began)
            enough = duration_option(SPARE * (began + needed))
            why = f"a comparison takes about {format_duration(needed)}; give about --budget {enough}"
            if not any(trial["stage"] == "confirmation" for trial in study.trials):
                state.too_small = f"the budget allows no comparison: {why}"
                warnings.warn(state.too_small, ProgressWarning, stacklevel=2)
            return study.note(str(recipe), "systems", "not tried", f"as a recipe of its own: {why}")
        needed = comparison_seconds(plan)
        _add(state, found)
        state.save()
        if found and found.is_surely_faster:
            return None if is_followed else _extend(study, state, found)
        tried.append(recipe)
    return None


def _extend(study: Study, state: SearchState, best: Finding) -> None:
    """Adds methods whose options have to be chosen to a recipe that is faster, as long as a comparison fits.

    Each is measured against the unchanged task. It has to gain more than the luck of such a comparison.
    """
    for item in _by_exactness(state.candidates, state.level)[0]:
        for options in item.presets if item.name not in best.recipe.methods else ():
            recipe = add_or_replace(best.recipe, item.name, options)
            if isinstance(recipe, str) or without_effect(study, recipe):
                continue
            if study.budget.left() < comparison_seconds(state.plan):
                return
            with suppress(OutOfBudgetError):
                found = confirm_speed(study, [recipe], state.samples, state.comparison_seconds)
                if not (found and found.is_surely_faster and found.gain.median >= LUCK * best.gain.median):
                    break  # the other presets are bolder
                _add(state, found)
                state.save()
                best = found


def _guesses(study: Study, state: SearchState) -> list[Recipe]:
    """GUESSES exact recipes: the methods without a choice together, what made similar tasks faster, single methods."""
    exact, _ = _by_exactness(state.candidates, state.level)
    singles = [Recipe({item.name: item.presets[0]}) for item in exact if item.presets]
    return [*_together(state, exact), *_exact_compositions(study, state), *singles][:GUESSES]


def note_not_tried(study: Study, stage: str, items: list) -> None:
    """Notes the candidates that the end of the budget left out."""
    tried = [trial["what"] for trial in study.trials]
    for item in items:
        if not any(is_in(item.name, what) for what in tried):
            study.note(item.name, stage, "not tried", "the search's part of the budget ended before it")


def find_strong_baseline(study: Study, state: SearchState, samples: float, seconds: float) -> None:
    """Sets ``state.strong_baseline``, the fastest of ``strong_baselines`` here, and ``state.strong_finding``.

    Methods that have no effect here are left out. ``seconds`` is the budget of each comparison.
    """
    best = Recipe()
    facts = frozenset(state.diagnosis.get("facts") or ())
    for form in strong_baselines(study.device, max(1, cores() // study.processes), facts):
        for recipe in able_forms(study, form):
            if recipe == best or not best.methods.items() <= recipe.methods.items():
                break  # it lacks what was faster, such as workers
            outcome = study.compare_speed(best, recipe, seconds=seconds)
            why, failed, ratio = f"as the strong baseline, against {best}", outcome.get("failed"), outcome.get("ratio")
            verdict = failure_verdict(failed) if failed else outcome["verdict"]
            why, spent = f"{why}: {failed}" if failed else why, outcome["trial_seconds"]
            study.note(str(recipe), "baseline", verdict, why, ratio=ratio, seconds=spent)
            if ratio and verdict != SLOWER and ratio["median"] > 1:
                before, step = state.strong_finding, whole_run_ratio(outcome, samples)
                speedup = product(before.speedup, step) if before else step
                state.strong_finding = Finding(recipe, "", speedup, "set by hand")
                best = state.strong_baseline = recipe


def compare_with_one_process(study: Study, state: SearchState, recipe: Recipe, samples: float) -> Ratio | None:
    """Speed-up of one process with all cores, without the recipe's distributed methods, over the job of several.

    For a run of ``samples`` training samples; None if it cannot be measured.
    """
    single = drop_distributed(recipe)
    outcome = study.compare_speed(recipe, single, seconds=state.comparison_seconds, single_process=True)
    what, spent = f"{single}, one process" if recipe else "one process", outcome["trial_seconds"]
    if "failed" in outcome:
        study.note(what, "baseline", "failed", outcome["failed"], seconds=spent)
        return None
    study.note(what, "baseline", outcome["verdict"], outcome["why"], ratio=outcome["ratio"], seconds=spent)
    return whole_run_ratio(outcome, samples)
