"""Joint search of the options that decide a training's schedule: length, peak learning rate, warm-up, batch size.

The cards of the methods state the ranges (``search_space``). One setting after the other would miss that they depend on
each other: a larger batch wants a higher peak, a shorter training too. Successive halving over the length:

1. Scrambled Sobol points, all of the shortest length. Each is a whole training with its schedule compressed into it, so
   that ends are compared with ends, and costs a small part of the task's own training.
2. The better half, and one point between the two best, train twice as long, or only as long as the best will need
   by what its last doubling has gained, and so on.
3. The first length at which a point trains as well as the task gives the incumbents.

``shorten`` then looks for the least length of the best recipe, whether this search found it or another one.

Sobol points and halving take less code than a sampler of a library needs to be adapted: 10 to 20 cheap trainings are
too few for a model of the objective to learn from.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from hasten.core.recipe import Recipe
from hasten.engine.registry import method_class, options_of
from hasten.tuning.budget import OutOfBudgetError
from hasten.tuning.study import Study
from hasten.tuning.systems import (
    Candidate,
    Incumbents,
    add_or_replace,
    without_effect,
)
from hasten.tuning.training import Baseline, Outcome, changes_something, note_outcome, run_seeds
from hasten.utils.search_range import SearchRange

POINTS = (4, 12)  # fewest and most of the first length
FIRST_LENGTH_SHARE = 0.2  # of the budget left, that the trainings of the first length may take
KEPT_SHARE = 1 / 2  # of the points, that train longer
LONGER = 2.0  # length / length before it
LEAST_STEP = LONGER**0.25  # the same, where little is missing
SHORTER = math.sqrt(1 / LONGER)  # the same, where a recipe is shortened
LONGEST = 0.85  # of the length of the best recipe so far
GAIN_LEFT = 0.6  # of what a doubling of the length has gained, that the next one gains at least
EASILY_PROVABLE = 3.0  # standard errors inside of the margin, of a length that was not trained
STEPS = 20  # between two lengths

Point = dict[tuple[str, str], float]  # (method, option) -> position from 0 to 1 in its range


@dataclass(frozen=True)
class Space:
    """The ranges of several methods together. One of them is the length of the training."""

    items: list[Candidate]

    def axes(self) -> list[tuple[str, str]]:
        """(method, option) of every option that is searched, but for the length."""
        return [key for key, one in self._ranges() if not one.is_length]

    @property
    def length(self) -> tuple[tuple[str, str], SearchRange] | None:
        """((method, option), range) of the length; None if no method changes it."""
        return next(((key, one) for key, one in self._ranges() if one.is_length), None)

    def length_in(self, recipe: Recipe) -> float:
        """The length of a recipe's training, relative to that of the task."""
        if self.length is None:
            return 1.0
        (method, option), one = self.length
        usual = options_of(method_class(method)).get(option, one.of) if method in recipe.methods else one.of
        return recipe.methods.get(method, {}).get(option, usual) / one.of

    def with_length(self, recipe: Recipe, length: float) -> Recipe:
        """The recipe with this length, and that of the parts of its schedule; as it is if a method excludes that."""
        for (method, option), one in self._ranges():
            if one.is_length:
                options = recipe.methods.get(method, {}) | {option: one.times(length)}
                changed = add_or_replace(recipe, method, options)
                recipe = recipe if isinstance(changed, str) else changed
        return recipe

    def shortens(self, best: Outcome, baseline: Baseline) -> bool:
        """Whether twice its shortest training is clearly shorter than that of the best recipe so far."""
        return self.length is not None and LONGER * self.length[1].low <= _longest(best, baseline)

    def drop(self, *names: str) -> "Space":
        """Without these methods, whose positions in the points then mean nothing."""
        return Space([item for item in self.items if item.name not in names])

    def sample(self, count: int, seed: int) -> list[Point]:
        """``count`` points: the middle of the space, then scrambled Sobol points; one empty point without axes."""
        keys = self.axes()
        if not keys:
            return [{}]
        drawn = torch.quasirandom.SobolEngine(len(keys), scramble=True, seed=seed).draw(count - 1).tolist()
        return [dict(zip(keys, position, strict=True)) for position in [[0.5] * len(keys), *drawn]]

    def add_to(self, base: Recipe, point: Point, length: float) -> Recipe | str:
        """``base`` with the methods of the space at a point; or, as text, why that is impossible."""
        recipe: Any = base
        for item in self.items:
            options, is_out = {}, False
            for name, one in item.card.search_space.items():
                if isinstance(one, SearchRange):
                    options[name] = one.times(length) if one.is_length else one.at(point[item.name, name])
                    is_out = is_out or options[name] == one.no_effect
                else:
                    options[name] = one
            if not is_out:
                recipe = add_or_replace(recipe, item.name, options)
                if isinstance(recipe, str):
                    break
        return recipe

    def _ranges(self) -> Iterator[tuple[tuple[str, str], SearchRange]]:
        for item in self.items:
            for name, one in item.card.search_space.items():
                if isinstance(one, SearchRange):
                    yield (item.name, name), one


@dataclass
class _Trial:
    """A point that was trained at some length, and how well it ended."""

    point: Point
    recipe: Recipe
    length: float
    outcome: Outcome

    def score(self, baseline: Baseline) -> float:
        """The final metric (negated if lower is better), less what the task's own training gained by a doubling of its
        samples at this length for each doubling of this training's seconds; -inf without a finite metric.
        """
        run, whole, sign = self.outcome.runs[0], baseline.runs[0], 1 if baseline.higher_is_better else -1
        if run.get("metric") is None or not math.isfinite(run["metric"]):
            return -math.inf
        gain = _gain_per_doubling(whole["evaluations"], self.length * whole["samples"], sign)
        return sign * run["metric"] - gain * math.log2(max(run["seconds"], 1e-9))


def has_length(item: Candidate) -> bool:
    """Whether one of its options is the length of the training."""
    return Space([item]).length is not None


def split_joint(candidates: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """(candidates to search jointly, the others). Without a length there is nothing to halve over: none is joint."""
    joint = [item for item in candidates if item.card.search_space and item.presets == item.card.presets]
    if Space(joint).length is None:
        joint = []
    return joint, [item for item in candidates if item not in joint]


def search_jointly(
    study: Study, incumbents: Incumbents, items: list[Candidate], baseline: Baseline, best: Outcome
) -> Outcome:
    """Searches the options of ``items`` together; pushes the recipes that win. Returns the outcome of the best.

    ``best`` is the outcome of the best recipe so far. What was found before the budget ended is pushed, too.
    """
    space = Space(items)
    base = incumbents.best.drop(*(item.name for item in items))
    if space.length is not None:
        space = _effective(study, base, space, space.length[1].low)
    if space.length is None:
        return best
    won: list[_Trial] = []
    with suppress(OutOfBudgetError):
        for trial in _halve(study, base, space, space.length[1], baseline, best):
            won.append(trial)
    won.sort(key=lambda trial: trial.score(baseline), reverse=True)  # all are of one length
    for trial in reversed(won):  # slower and safer ones first: the confirmation falls back on them
        incumbents.push(trial.recipe)
    return won[0].outcome if won else best


def shorten(
    study: Study, items: list[Candidate], baseline: Baseline, recipe: Recipe, outcome: Outcome
) -> list[tuple[Recipe, Outcome]]:
    """Shortens a recipe's training as long as it ends as well, then tries one length in between.

    Returns the recipes that do, each shorter than the one before it, with their outcomes. Nothing is tried unless one
    of ``items``, those of ``search_jointly``, sets the length, and the recipe has that method or reaches the target
    long before its end. ``outcome`` is that of the recipe.
    """
    space, reached = Space(items), outcome.share_at_target
    if space.length is None:
        return []
    step = SHORTER if space.length[0][0] in recipe.methods else reached
    if step is None or step > LONGEST:
        return []
    won, tried, is_last = list[tuple[Recipe, Outcome]](), list[Recipe](), False
    with suppress(OutOfBudgetError):  # what was found before is not lost
        while (shorter := space.with_length(recipe, step * space.length_in(recipe))) not in (recipe, *tried):
            tried.append(shorter)
            found = run_seeds(study, shorter, outcome, baseline, [], same_steps=True)
            note_outcome(study, str(shorter), found, outcome)
            if is_good := found.verdict == "kept":
                recipe, outcome = shorter, found
                won.append((recipe, outcome))
            if is_last:
                break
            step, is_last = (SHORTER, False) if is_good else (math.sqrt(step), True)
    return won


def add_lengthened(
    recipes: list[Recipe], items: list[Candidate], baseline: Baseline, metrics: Callable[[Recipe], list[float]]
) -> Recipe | None:
    """Adds the last of the recipes with a longer training, which ends better and is easier to prove.

    Its length is that at which it would end clearly better than it must, by the ends of the recipes at the lengths
    around it, whatever else differs between these; LONGER times the one that it has where they do not tell. ``recipes``
    are each faster than the one before it; the new one is put before those whose trainings are shorter. Returns it;
    None if the last recipe sets no length, or hardly a shorter one than the task. ``items`` are those of
    ``search_jointly``; ``metrics`` gives the final metrics of a recipe in the search.
    """
    space = Space(items)
    if space.length is None or not recipes or space.length[0][0] not in recipes[-1].methods:
        return None
    ((method, _), lengths), last, now = space.length, recipes[-1], space.length_in(recipes[-1])
    of_length = [(space.length_in(each), metrics(each)) for each in recipes if method in each.methods]
    provable = _provable_length({length: fmean(end) for length, end in of_length if end}, baseline) or 0.0
    recipe = space.with_length(last, provable if provable > now else LONGER * now)
    if not now < space.length_in(recipe) <= lengths.high:
        return None
    if recipe not in recipes:
        is_shorter = [space.length_in(each) < space.length_in(recipe) for each in recipes]
        recipes.insert(is_shorter.index(True), recipe)
    return recipe


def _provable_length(ends: dict[float, float], baseline: Baseline) -> float | None:
    """The least length at which a training would end clearly better than it must, by the ``ends`` at other lengths.

    Linear in the logarithm of the length between two neighbors; None where none of them ends so well, or all do.
    """
    for (short, worse), (long, better) in pairwise(sorted(ends.items())):
        if baseline.as_good([better], surely=EASILY_PROVABLE):
            if baseline.as_good([worse], surely=EASILY_PROVABLE):
                return None
            steps = [step / STEPS for step in range(1, STEPS + 1)]
            good = (at for at in steps if baseline.as_good([worse + at * (better - worse)], surely=EASILY_PROVABLE))
            return short * (long / short) ** next(good, 1.0)
    return None


def _effective(study: Study, base: Recipe, space: Space, length: float) -> Space:
    """The methods that change the training, each option in the middle of its range; without a length if none does.

    Checked where it is needed, see ``changes_something``; the trials that fail are noted.
    """
    recipe = space.add_to(base, dict.fromkeys(space.axes(), 0.5), length)
    if isinstance(recipe, str):
        study.note(", ".join(item.name for item in space.items), "training", "not tried", recipe)
        return Space([])
    is_needed = study.task.command or any(item.offered for item in space.items)
    if not is_needed or changes_something(study, base, recipe, str(recipe)):
        return space
    idle = without_effect(study, recipe)
    return _effective(study, base, space.drop(*idle), length) if idle else Space([])


def _halve(
    study: Study, base: Recipe, space: Space, lengths: SearchRange, baseline: Baseline, best: Outcome
) -> Iterator[_Trial]:
    """Yields the trials that win, all of the first length at which any does; no length is near that of ``best``."""
    whole, unchanged = baseline.runs[0], base.methods.keys() - {item.name for item in space.items}
    of_whole = best.whole_seconds(1) * whole["samples"] / best.runs[0]["samples"]  # with the exact methods of the best
    affordable = FIRST_LENGTH_SHARE * study.budget.left() / max(lengths.low * of_whole, 1.0)
    points = space.sample(min(POINTS[1], max(POINTS[0], int(affordable))), study.seed)
    length, end, seen = lengths.low, min(lengths.high, _longest(best, baseline)), []
    before = list[_Trial]()  # of the length before

    def train(recipe: Recipe) -> Outcome:
        outcome = run_seeds(study, recipe, best, baseline, seen)
        note_outcome(study, str(recipe.drop(*unchanged)), outcome, best)
        return outcome

    while points and length <= end:
        trials = []
        for point in points:
            recipe = space.add_to(base, point, length)
            if isinstance(recipe, str):
                study.note(recipe, "training", "not tried", recipe)
                continue
            outcome = train(recipe)
            if outcome.verdict == "no effect" and (idle := without_effect(study, recipe)):
                space, recipe = space.drop(*idle), recipe.drop(*idle)  # for this and all further points
                if space.length is None:
                    return
                outcome = train(recipe)
            if "failed" not in outcome.runs[0]:
                trials.append(_Trial(point, recipe, length, outcome))
                if outcome.verdict == "kept":
                    yield trials[-1]
        trials.sort(key=lambda trial: trial.score(baseline), reverse=True)
        if not trials or length == end or any(trial.outcome.verdict == "kept" for trial in trials):
            return
        better = trials[: max(1, math.ceil(KEPT_SHARE * len(trials)))]
        points = [trial.point for trial in better]
        points += [_between(better[0].point, better[1].point)] if len(better) > 1 else []
        step = min(_step_to_goal(trial, before, baseline) for trial in better)
        before, length = trials, min(step * length, end)


def _step_to_goal(trial: _Trial, before: list[_Trial], baseline: Baseline) -> float:
    """The length at which a point will end well / the length of its ``trial``; LONGER at most, and if unknown.

    By what its point has gained per doubling of the length since the trials ``before``, of which the next doubling
    gives less: GAIN_LEFT of it.
    """
    sign = 1 if baseline.higher_is_better else -1
    shorter = next((one for one in before if one.point == trial.point), None)
    metrics = [one.outcome.runs[0]["metric"] for one in (shorter, trial) if one]
    if shorter is None or None in metrics or not all(map(math.isfinite, metrics)):
        return LONGER
    first, last = metrics
    per_doubling = sign * (last - first) / math.log2(trial.length / shorter.length)
    missing = sign * (baseline.metric - last)
    if missing <= 0 or per_doubling <= 0:
        return LONGER
    return min(LONGER, max(LEAST_STEP, 2 ** (missing / (GAIN_LEFT * per_doubling))))


def _longest(best: Outcome, baseline: Baseline) -> float:
    """The longest length to try: a training that is hardly shorter than the best one is hardly faster."""
    return LONGEST * best.runs[0]["samples"] / baseline.runs[0]["samples"]


def _gain_per_doubling(evaluations: list[dict], samples: float, sign: int) -> float:
    """By how much the metric of the task's own training improved when it had trained twice the samples (at least 0).

    The later of the two evaluations is the first one at or after ``samples``.
    """
    # a script may evaluate before it trains, and a metric that is not finite is None
    evaluations = [row for row in evaluations if row["samples"] > 0 and row["metric"] is not None]
    if not evaluations:
        return 0.0
    later = next((row for row in evaluations if row["samples"] >= samples), evaluations[-1])
    earlier = min(evaluations, key=lambda row: abs(row["samples"] - later["samples"] / 2))
    doublings = math.log2(later["samples"] / earlier["samples"])
    return max(0.0, sign * (later["metric"] - earlier["metric"]) / doublings) if doublings else 0.0


def _between(a: Point, b: Point) -> Point:
    return {key: (a[key] + b[key]) / 2 for key in a}
