"""The greedy search among exact methods and among those of lower precision, by the speed of steps. An algorithm only:
``systems_stage.py`` chooses what it is called with and how much of the budget it gets.

Each candidate is compared with the best recipe so far: first compositions that won elsewhere, then one method after the
other. No whole training and no metric is needed. ``confirm_speed`` measures the best recipe again, with fresh
processes, because nothing that the search itself measures is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from hasten.benchmarking.arm import warm_up_steps
from hasten.benchmarking.blocks import BLOCK_SECONDS, MIN_PAIRS, block_steps
from hasten.benchmarking.measurement import SLACK
from hasten.benchmarking.ratio import FASTER, SAME, SLOWER, UNSURE, Ratio
from hasten.benchmarking.ratio import LOOKS as SPEED_LOOKS
from hasten.core.card import Card, Exactness
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.effects import NO_EFFECT
from hasten.engine.registry import make_methods, method_class, takes_any_option
from hasten.tuning import finding
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.finding import Finding
from hasten.tuning.study import BASE_FAILED, EXACT_CLASSES, Study, exactness_of
from hasten.utils.durations import duration_option
from hasten.utils.op_recorder import NOT_CHECKED

AS_FAST = Ratio(1.0, 1.0, 1.0)
MIN_GAIN = 1.02  # a smaller gain in the time of the training is none
ROUNDS, MANY_ROUNDS = (3, 8), (3, 16)  # pairs of processes in a comparison that is reported, and in a longer one
PROBABLE = 0.65  # of the half width of an interval of 95 %: the median is then above 1 with a certainty of 90 %
PROMISING_GAIN, LONGER = 1.05, 3  # a comparison that is unsure with this median is repeated for so many times as long
SEVERAL_ROUNDS: Any = {"looks": SPEED_LOOKS, "rounds": ROUNDS}  # of a comparison that is reported
LONGER_COMPARISON: Any = {**SEVERAL_ROUNDS, "salt": "longer"}
MAX_LOSSES = 2  # presets in a row that lost, after which a method is given up: they grow bolder
MAX_FALLBACKS = 3  # recipes to confirm, if the best ones fail
MAX_SLOWDOWN, MAX_OTHERS_PERCENT = 1.5, 10.0  # of the first recipe beside other programs; their share of processors
MAX_LOSS_CHANGE = 0.02  # of the mean training loss over the compared steps, by lower precision


@dataclass(frozen=True)
class Candidate:
    """A method that the search may try, with its options."""

    name: str
    card: Card
    presets: tuple[dict, ...]  # options to try, mildest first
    bound: float | None = None  # the highest speed-up that it could give; None: unknown
    offered: bool = False  # by the user, in a file: its card is unverified, so its exactness is checked first
    is_remedy: bool = False  # for a problem that was found, with options that are known: it is tried first


def candidate(
    name: str, bound: float | None = None, options: dict | None = None, offered: bool = False, on_gpu: bool = False
) -> Candidate:
    """A candidate with the presets of the method's card (on a GPU those for it first), or only ``options`` if given."""
    card = method_class(name).card
    presets = (*card.on_gpu.get("presets", ()), *card.presets) if on_gpu else card.presets
    return Candidate(name, card, (options,) if options else presets, bound, offered)


@dataclass
class Incumbents:
    """The best recipes so far, each faster than the one before it or as fast and better; the last is the best."""

    recipes: list[Recipe] = field(default_factory=lambda: [Recipe()])
    speedup: Ratio = AS_FAST  # of the best over the task as it is, as the search saw it
    on_push: Callable[[], object] = lambda: None  # see ``calling``

    @property
    def best(self) -> Recipe:
        return self.recipes[-1]

    def push(self, recipe: Recipe, gain: Ratio | None = None) -> None:
        """Adds a recipe; ``gain`` is its speed-up over the one before it."""
        self.recipes.append(recipe)
        if gain:
            self.speedup = product(self.speedup, gain)
        self.on_push()

    @contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """Context manager: ``call`` is called after each ``push``, and at the end."""
        self.on_push = call
        try:
            yield
        finally:
            self.on_push = lambda: None
            call()


def product(a: Ratio, b: Ratio) -> Ratio:
    """The speed-up of two steps one after the other; its interval holds where both do."""
    return Ratio(a.median * b.median, a.low * b.low, a.high * b.high)


def try_compositions(
    study: Study, incumbents: Incumbents, recipes: Iterable[Recipe], samples: float, seconds: float
) -> None:
    """Tries whole recipes, such as those that won elsewhere, added to the best one; pushes those that are accepted.

    Methods that had no effect here in an earlier trial are left out; a recipe that fails since some of its methods have
    no effect is tried again without these. ``samples`` and ``seconds`` are those of ``search_systems``.
    """
    for one in recipes:
        for recipe in able_forms(study, one):
            merged = merge(incumbents.best, recipe)
            if merged == incumbents.best or conflict_reason(merged):
                break
            if accepted := _try_recipe(study, incumbents.best, merged, str(recipe), samples, seconds):
                incumbents.push(*accepted)
                break


def without_effect(study: Study, recipe: Recipe) -> list[str]:
    """The methods of a recipe that had no effect in a trial so far, with the options that they have in it."""

    def had_none(name: str, options: dict[str, Any]) -> bool:
        member, reason = str(Recipe({name: options})), f"{name} {NO_EFFECT}"
        return any(reason in trial["why"] and member in trial["what"].split(" + ") for trial in study.trials)

    return [name for name, options in recipe.methods.items() if had_none(name, options)]


def able_forms(study: Study, recipe: Recipe) -> Iterator[Recipe]:
    """Yields the recipe without the methods that had no effect in a trial so far, as long as there are more of them.

    For loops that try what this yields: after a trial that shows another method without an effect, it yields the recipe
    without that one.
    """
    tried: Recipe | None = None
    while (recipe := recipe.drop(*without_effect(study, recipe))) and recipe != tried:
        yield recipe
        tried = recipe


def search_systems(
    study: Study, incumbents: Incumbents, candidates: list[Candidate], samples: float, seconds: float
) -> None:
    """Tries one method after the other, exact or of lower precision; pushes the fastest accepted preset of each.

    A method is accepted if it is surely faster (an exact one, which costs no quality, if it probably is: the recipe is
    confirmed as a whole), earns back the time of its start over the ``samples`` that a run trains, and passes its
    exactness check. ``seconds`` is the budget of each comparison.
    """
    for item in candidates:
        base, best, losses = incumbents.best, None, 0
        try:
            for options in item.presets:
                if base.methods.get(item.name) == options:
                    continue  # part of a composition
                text, recipe = str(Recipe({item.name: options})), add_or_replace(base, item.name, options)
                if isinstance(recipe, str):
                    accepted = study.note(text, _stage(item.card.exactness), "not tried", recipe)
                else:
                    how = item.card.exactness, item.offered
                    accepted = _try_recipe(study, base, recipe, text, samples, seconds, *how)
                if accepted and (best is None or accepted[1].median > best[1].median):
                    best, losses = accepted, 0
                elif (losses := losses + 1) == MAX_LOSSES:
                    break
        finally:  # also where the budget ends
            if best:
                incumbents.push(*best)


def _try_recipe(
    study: Study,
    base: Recipe,
    recipe: Recipe,
    text: str,
    samples: float,
    seconds: float,
    exactness: Exactness | None = None,
    check_first: bool = False,
) -> tuple[Recipe, Ratio] | None:
    """Compares ``recipe`` with ``base``: (recipe, speed-up) if it is accepted, else None; notes the trial.

    One that is faster, for whose check the budget is too short, is accepted: the confirmation begins with that check.
    """
    exactness = exactness or loosest_exactness(recipe)
    spent, ratio, outcome = 0.0, None, dict[str, Any]()

    def note(verdict: str, why: str) -> None:
        seen = outcome.get("effects", {}).get("b", {}).items()
        unknown = [f"; {name}: {what}" for name, what in seen if NOT_CHECKED in what and name not in base.methods]
        study.note(text, _stage(exactness), verdict, why + "".join(unknown), ratio=ratio, seconds=spent)

    if check_first:
        check = study.check_exactness(base, recipe, exactness)
        spent += check["trial_seconds"]
        if not check.get("passed"):
            return note(*check_verdict(check))
    outcome = study.compare_speed(base, recipe, seconds=seconds)
    if is_disturbed(outcome) or may_be_settled_by_more(study, outcome, LONGER * seconds):
        how = LONGER_COMPARISON | ({"salt": after_others(study)} if is_disturbed(outcome) else {})
        outcome = compare_again(study, base, recipe, outcome, **how, seconds=LONGER * seconds)
    spent += outcome["trial_seconds"]
    if "failed" in outcome:
        return note(failure_verdict(outcome["failed"]), outcome["failed"])
    ratio = outcome["ratio"]
    if is_disturbed(outcome):  # the confirmation corrects it, or calls it an estimate
        outcome = {**outcome, "why": f"{outcome['why']}; {disturbance(outcome)}"}
    if outcome["verdict"] != FASTER and not (exactness in EXACT_CLASSES and probably_faster(ratio)):
        return note("no gain" if outcome["verdict"] == SAME else outcome["verdict"], outcome["why"])
    gain = run_speedup(outcome, samples)
    if gain < MIN_GAIN:
        longer = outcome["start_seconds"]["b"] - outcome["start_seconds"]["a"]
        return note("no gain", f"its start takes {longer:.1f} s, which a run does not earn back ({gain:.2f}x in all)")
    try:
        check = study.check_exactness(base, recipe, exactness)
    except OutOfBudgetError:  # what was reserved is for the confirmation, which begins with this check
        note(outcome["verdict"], f"{outcome['why']}; the confirmation checks whether it is as exact as it claims")
        return recipe, whole_run_ratio(outcome, samples)
    spent += 0.0 if check_first else check["trial_seconds"]
    if not check.get("passed"):
        return note(*check_verdict(check))
    note("kept", f"{outcome['why']}; {check['why']}")
    return recipe, whole_run_ratio(outcome, samples)


def may_be_settled_by_more(study: Study, outcome: dict[str, Any], seconds: float) -> bool:
    """Whether a promising comparison was left open, and one of so many ``seconds`` would have several rounds.

    A longer single round would reduce the noise of its blocks only, and know as little about how much fresh processes
    differ. ``outcome`` is that of ``Study.compare_speed``.
    """
    if outcome.get("verdict") != UNSURE or outcome["ratio"]["median"] <= PROMISING_GAIN:
        return False
    step = study.step_seconds
    block = max(BLOCK_SECONDS, block_steps({"step": step, "sync_period": 1}) * step)
    warm_up = warm_up_steps(step) * step  # of each arm, which ``start_seconds`` leave out
    shortest_round = sum(outcome["start_seconds"].values()) + 2 * (warm_up + MIN_PAIRS * block)
    return seconds > ROUNDS[0] * SLACK * shortest_round


def confirm_speed(
    study: Study, recipes: list[Recipe], samples: float, seconds: float, is_last: bool = False
) -> Finding | None:
    """The last of ``recipes`` that is as exact as it claims; None if that is none of the MAX_FALLBACKS last ones.

    Where it turns out not to be faster, those before it are tried, too, and the fastest is returned. ``samples`` are
    those of a whole run, ``seconds`` the budget of each comparison. ``is_last``: nothing else needs the rest of the
    budget, so that a comparison which leaves it open whether a recipe is faster may be followed by a longer one.
    """
    slower: list[Finding] = []
    for recipe in [recipe for recipe in reversed(recipes) if recipe][:MAX_FALLBACKS]:
        try:
            found = _confirm_recipe(study, recipe, samples, seconds / (1 + len(slower)), is_last)
        except OutOfBudgetError:
            if not slower:
                raise
            break
        if found and found.speedup.median > finding.SURELY_FASTER:
            return found
        slower += [found] if found else []
    return max(slower, key=lambda one: one.speedup.median, default=None)


def _confirm_recipe(study: Study, recipe: Recipe, samples: float, seconds: float, is_last: bool) -> Finding | None:
    """Checks a recipe and measures it again against the unchanged task, in fresh processes; None if it fails.

    The check comes first: a comparison that the budget ends has the blocks until then, a check has nothing.
    """
    exactness = loosest_exactness(recipe)
    check = study.check_exactness(Recipe(), recipe, exactness)
    spent = check["trial_seconds"]
    if not check.get("passed"):
        return study.note(str(recipe), "confirmation", *check_verdict(check), seconds=spent)
    outcome = _compare_with_task(study, recipe, samples, seconds, is_last)
    spent, ratio, why = spent + outcome["trial_seconds"], outcome.get("ratio"), check["why"]
    if failed := outcome.get("failed"):
        return study.note(str(recipe), "confirmation", failure_verdict(failed), failed, seconds=spent)
    speedup = whole_run_ratio(outcome, samples)
    verdict = "passed"
    if speedup.median <= finding.SURELY_FASTER and not is_disturbed(outcome):
        verdict = outcome["verdict"] if outcome["verdict"] in (SLOWER, UNSURE) else "no gain"
    if exactness is Exactness.REDUCED_PRECISION:
        of_losses, why = _compare_losses(outcome, why)
        verdict = of_losses if of_losses != "passed" else verdict
    study.note(str(recipe), "confirmation", verdict, f"{outcome['why']}; {why}", ratio=ratio, seconds=spent)
    if verdict == "refused":
        return None
    level = finding.EXACT if exactness in EXACT_CLASSES else finding.PRECISION
    if check.get("statistics"):  # a training that is not reproducible proves nothing by its bits
        level = finding.ESTIMATED
    to_prove = finding.to_be_sure(speedup, outcome["seconds"])
    if is_disturbed(outcome):
        level, budget = finding.ESTIMATED, duration_option(outcome["seconds"] / finding.CONTINUED_SHARE)
        why, to_prove = f"{why}; {disturbance(outcome)}", f"repeat it on an idle machine: --budget +{budget}"
    return Finding(recipe, level, speedup, why, to_prove=to_prove, comparison=outcome)


def _compare_with_task(study: Study, recipe: Recipe, samples: float, seconds: float, is_last: bool) -> dict[str, Any]:
    """A comparison to report; for longer if that may settle it, or once more if other programs have disturbed it."""
    how: Any = {**SEVERAL_ROUNDS, "seconds": seconds}
    outcome = study.compare_speed(Recipe(), recipe, **how, salt="confirmation")
    longer = _longer_comparison(outcome, samples, seconds, is_last)
    to_start = sum(outcome.get("start_seconds", {}).values())
    if longer > outcome.get("seconds", 0.0) and longer + to_start < study.budget.left():
        how |= {"seconds": longer, "rounds": MANY_ROUNDS, "salt": f"confirmation of {longer:.0f} s"}
    elif is_disturbed(outcome):
        how["salt"] = f"confirmation {after_others(study)}"
    else:
        return outcome
    again = compare_again(study, Recipe(), recipe, outcome, **how)
    return {**outcome, "trial_seconds": again["trial_seconds"]} if "failed" in again else again


def after_others(study: Study) -> str:
    """Salt of a comparison after a disturbed one: a search that continues, perhaps on an idle machine, repeats it."""
    return f"after one beside others, in {study.budget.total:.0f} s"


def compare_again(study: Study, a: Recipe, b: Recipe, outcome: dict[str, Any], **how: Any) -> dict[str, Any]:
    """A further comparison of two recipes; ``outcome``, the first one, if the budget ends in it.

    ``trial_seconds`` are those of both. ``how``: arguments of ``Study.compare_speed``.
    """
    with suppress(OutOfBudgetError):
        again = study.compare_speed(a, b, **how)
        seconds = outcome["trial_seconds"] + again["trial_seconds"]
        return {**again, "trial_seconds": seconds}
    return {**outcome, "why": f"{outcome['why']}; the budget ended before more was measured"}


def _longer_comparison(outcome: dict[str, Any], samples: float, seconds: float, is_last: bool) -> float:
    """Seconds of a comparison that may settle what ``outcome`` left open; 0 if it left nothing open.

    ``seconds`` at least: it may come from the store, of a search with a smaller budget.
    """
    if "failed" in outcome:
        return 0.0
    needed = finding.seconds_to_be_sure(whole_run_ratio(outcome, samples), outcome["seconds"])
    if outcome["verdict"] != UNSURE and not needed:
        return 0.0
    return max(seconds, 10 * math.ceil(needed / 10)) if is_last else seconds


def is_disturbed(outcome: dict[str, Any]) -> bool:
    """Whether other programs have slowed the arms so much that a ratio says little about an idle machine."""
    others = (outcome.get("system_noise") or {}).get("others_percent") or 0.0
    return (outcome.get("slowdown") or 1.0) > MAX_SLOWDOWN and others > MAX_OTHERS_PERCENT


def disturbance(outcome: dict[str, Any]) -> str:
    """How other programs have disturbed a comparison, in words."""
    others, slowdown = outcome["system_noise"]["others_percent"], outcome["slowdown"]
    return (
        f"other programs used {others:.0f} % of the processors, and the recipe it is compared with ran "
        f"{slowdown:.1f} times slower than before, so an idle machine may show another ratio"
    )


def _compare_losses(outcome: dict, why: str) -> tuple[str, str]:
    """("passed" or "refused", reason): whether lower precision left the losses of the compared steps as they were."""
    losses = outcome.get("losses") or {}
    a, b = losses.get("a") or [], losses.get("b") or []
    if len(a) < 3 or len(a) != len(b):
        return "refused", f"{why}; too few steps were compared to see the loss"
    if None in (*a, *b):
        return "refused", f"{why}; the training loss of the compared steps is unknown, or not finite"
    later = slice(len(a) // 2, None)
    differences = [y - x for x, y in zip(a[later], b[later], strict=True)]
    change, size = fmean(differences), abs(fmean(a[later])) or 1.0
    noise = 2 * stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    text = f"{why}; over the compared steps the training loss changes by {change / size:+.2%}"
    if change > MAX_LOSS_CHANGE * size + noise:
        return "refused", text
    return "passed", text


def check_verdict(check: dict) -> tuple[str, str]:
    """(verdict for the report, reason) of an exactness check that failed or could not be finished."""
    if "failed" in check:
        return failure_verdict(check["failed"]), check["failed"]
    return "no effect" if NO_EFFECT in check["why"] else "refused", check["why"]


def failure_verdict(message: str) -> str:
    """The verdict on a trial that failed with ``message``: "not measured", "no effect" or "failed"."""
    if BASE_FAILED in message:
        return "not measured"
    return "no effect" if NO_EFFECT in message else "failed"


def probably_faster(ratio: dict[str, Any]) -> bool:
    """Whether a speed-up is MIN_GAIN at least, and above 1 with a certainty of 90 %."""
    half_width = math.log(ratio["high"] / ratio["low"]) / 2
    return ratio["median"] >= MIN_GAIN and math.log(ratio["median"]) >= PROBABLE * half_width


def run_speedup(outcome: dict, samples: float) -> float:
    """Speed-up of a whole run of ``samples`` by b over a, the start of both included.

    ``outcome`` is that of ``Study.compare_speed``.
    """
    if math.isinf(samples):
        return outcome["ratio"]["median"]
    start, steps_of_a = outcome["start_seconds"], samples / 1000 * outcome["seconds_per_1000_samples"]["a"]
    return (start["a"] + steps_of_a) / (start["b"] + steps_of_a / outcome["ratio"]["median"])


def whole_run_ratio(outcome: dict, samples: float) -> Ratio:
    """``run_speedup`` with its interval: that of the ratio of the steps, scaled."""
    scale = run_speedup(outcome, samples) / outcome["ratio"]["median"]
    return Ratio(*(scale * outcome["ratio"][key] for key in ("median", "low", "high")))


def merge(base: Recipe, other: Recipe) -> Recipe:
    """``base`` with the methods of ``other`` that do not conflict with it; options of ``other`` win."""
    recipe = base
    for name, options in other.methods.items():
        added: Any = add_or_replace(recipe, name, options)
        recipe = recipe if isinstance(added, str) else added
    return recipe


def add_or_replace(base: Recipe, name: str, options: dict) -> Recipe | str:
    """``base`` with one more method, in place of one that it conflicts with; or, as text, why that is impossible."""
    others = base.methods.get(name, {}) if takes_any_option(method_class(name)) else {}
    recipe = base.with_method(name, **others | options)
    conflict = conflict_reason(recipe)
    if conflict is None:
        return recipe
    replaced = (recipe.drop(member) for member in base.methods)
    return next((recipe for recipe in replaced if conflict_reason(recipe) is None), conflict)


def conflict_reason(recipe: Recipe) -> str | None:
    """Why the methods of a recipe exclude each other; None if they do not."""
    try:
        check_conflicts(sort_methods(make_methods(recipe)))
    except ConfigurationError as error:
        return str(error)
    return None


def loosest_exactness(recipe: Recipe) -> Exactness:
    """The exactness class of the whole recipe: the loosest among its methods."""
    return max((exactness_of(name) for name in recipe.methods), key=list(Exactness).index)


def _stage(exactness: Exactness) -> str:
    return "precision" if exactness is Exactness.REDUCED_PRECISION else "systems"
