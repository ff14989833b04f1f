"""The search among methods that change the training: kept if they end as well and sooner.

What counts is the time of the whole training. Recipes that train equally many samples can differ in it by the pace of
their steps only; between them the time to the target decides.

Candidates are judged on seeds of their own, against the baseline's runs. Nothing found here is reported: ``confirm``
runs the best recipes on fresh seeds. Where whole trainings do not fit into the budget, all runs, also the baseline's,
are those of a shorter training (``Study.horizon``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median, median_high, stdev
from typing import Any

from hasten.benchmarking.ratio import FASTER, SLOWER
from hasten.core.recipe import Recipe
from hasten.engine.registry import method_class, options_of
from hasten.tuning.study import Study
from hasten.tuning.systems import (
    MIN_GAIN,
    Candidate,
    Incumbents,
    able_forms,
    add_or_replace,
    check_verdict,
    conflict_reason,
    failure_verdict,
    loosest_exactness,
    merge,
)
from hasten.utils.search_range import SearchRange

FEWER_SAMPLES = 0.99  # above this ratio of samples only the speed can make a recipe faster
NEARLY_AS_FAST = 0.95  # then a clearly better end is worth more, if the confirmation agrees
SOONER = "reaches the target sooner, in a training that takes longer"  # in the reason of a trial
TIME_LIMIT = 1.25  # times the seconds of the best recipe, after which a run that has not reached the target is ended
MAX_LOSSES = 3  # presets in a row that lost, after which a method is given up: they grow bolder
AFFORDABLE_SHARE = 0.15  # of the budget left, for the other seeds of a recipe that won on the first seed
SEED_STEP = 1000  # so that the shuffles of two runs (seed + epoch) never coincide
CHEAP_RUN, FURTHER_RUNS = 1 / 6, 3  # a run that costs this share of the original's, and more of them on other seeds
MIN_EVALUATIONS = 3  # that two runs must share to count as the same run


@dataclass(frozen=True)
class Substitute:
    """An exact recipe, checked on this task, that trains further seeds in place of the original.

    It trains the same steps in less time; ``speedup`` is that of the whole training.
    """

    recipe: Recipe
    speedup: float


@dataclass
class Baseline:
    """The task's own training: ``runs``, results of ``Study.run`` on ``run_seeds``, which the confirmation uses, too.

    ``search_seeds`` are others: on these the search trains the candidates. ``target`` and ``margin`` are values of the
    metric.
    """

    search_seeds: list[int]
    runs: list[dict]
    target: float
    margin: float
    higher_is_better: bool
    run_seeds: list[int]  # of ``runs``
    margin_why: str = ""
    substitute: Substitute | None = None  # for the seeds of the confirmation that are not among ``run_seeds``

    @property
    def by_seed(self) -> dict[int, dict]:
        """The ``runs`` by the seed of each."""
        return dict(zip(self.run_seeds, self.runs, strict=True))

    @property
    def metric(self) -> float:
        """Mean over the seeds of the final metric."""
        return fmean(run["metric"] for run in self.runs)

    def samples_to_target(self) -> float:
        """Median over the seeds of the training samples until the target."""
        return median_high(run["samples_to_target"] or run["samples"] for run in self.runs)

    def nearly_reaches_target(self, metric: float) -> bool:
        """Whether a final metric is worse than the target by no more than the margin."""
        return (self.target - metric if self.higher_is_better else metric - self.target) <= self.margin

    def as_good(self, metrics: list[float], surely: float = 0.0) -> bool:
        """Whether the metrics are good enough to continue with; the quality gate decides later, with more seeds.

        They may be as good as the original's: worse by a standard error more than the margin. Or they ``surely`` are:
        inside of the margin by so many standard errors. Two or three runs of the original may agree by chance, so that
        the latter takes half of the margin at least for the standard deviation between seeds.
        """
        worse = self.metric - fmean(metrics) if self.higher_is_better else fmean(metrics) - self.metric
        spread = stdev(run["metric"] for run in self.runs)
        if not surely:
            return worse <= self.margin + spread / math.sqrt(len(metrics))
        error = max(spread, self.margin / 2) * math.sqrt(1 / len(metrics) + 1 / len(self.runs))
        return worse <= self.margin - surely * error


@dataclass(frozen=True)
class Outcome:
    """The verdict on a recipe and its runs, one for each of the search's seeds so far."""

    verdict: str  # "kept", "no gain", "refused", "failed" or "no effect"
    why: str
    runs: tuple[dict, ...]  # results of ``Study.run``, in the order of the search's seeds
    fastest: Outcome | None = None  # an earlier incumbent that was faster and ended worse

    @property
    def seconds(self) -> float:
        """Seconds that all runs of this recipe took, added up."""
        return sum(run["trial_seconds"] for run in self.runs)

    def whole_seconds(self, seeds: int | None = None) -> float:
        """Mean seconds of the whole training over the first seeds."""
        return fmean(map(seconds_of, self.runs[:seeds]))

    def to_target(self, unit: str, seeds: int | None = None) -> float | None:
        """Mean "seconds" or "samples" to the target over the first seeds; None if one of them missed it."""
        values = [run.get(f"{unit}_to_target") for run in self.runs[:seeds]]
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == len(values) else None

    @property
    def share_at_target(self) -> float | None:
        """Samples to the target / samples of the whole training; None if a run missed it."""
        samples = self.to_target("samples")
        return samples and samples / fmean(run["samples"] for run in self.runs)

    def share_of_samples(self, best: Outcome) -> float:
        """Samples that this recipe trains in all / those of ``best``, on the seeds that both were run on."""
        both = min(len(self.runs), len(best.runs))
        mine, others = (sum(run["samples"] for run in outcome.runs[:both]) for outcome in (self, best))
        return mine / others

    def times(self, best: Outcome) -> tuple[Any, Any, str]:
        """(seconds of this recipe, those of ``best``, what they are of), on the seeds that both were run on."""
        both = min(len(self.runs), len(best.runs))
        to_target = self.to_target("seconds", both), best.to_target("seconds", both)
        if FEWER_SAMPLES < self.share_of_samples(best) < 1 / FEWER_SAMPLES and all(to_target):
            return *to_target, "reached the target"
        return self.whole_seconds(both), best.whole_seconds(both), "trained"

    def gain_over(self, best: Outcome) -> float | None:
        """Speed-up over ``best`` in the seconds that ``times`` compares; None if a run failed or was pruned."""
        if any("failed" in run or run.get("pruned") for run in self.runs[: len(best.runs)]):
            return None
        seconds, best_seconds, _ = self.times(best)
        return best_seconds / seconds

    def needs_fewer(self, best: Outcome) -> bool:
        """Whether this recipe needed clearly fewer samples than ``best``, in all or to the target."""
        most, samples = best.to_target("samples", len(self.runs)), self.to_target("samples", len(best.runs))
        fewer = most is None or (samples is not None and samples < FEWER_SAMPLES * most)
        return fewer or self.share_of_samples(best) < FEWER_SAMPLES

    def ends_better(self, best: Outcome, baseline: Baseline) -> bool:
        """Whether this recipe is nearly as fast as any before, and its metric surely better than that of ``best``."""
        both, gain = min(len(self.runs), len(best.runs)), self.gain_over(best.fastest or best)
        ends, best_ends = (fmean(run["metric"] for run in outcome.runs[:both]) for outcome in (self, best))
        better = ends - best_ends if baseline.higher_is_better else best_ends - ends
        error = stdev(run["metric"] for run in baseline.runs) * math.sqrt(2 / both)
        return gain is not None and gain >= NEARLY_AS_FAST and better >= baseline.margin + error > 0

    @staticmethod
    def of(runs: list[dict], baseline: Baseline, best: Outcome, same_steps: bool = False) -> Outcome:
        """Judges a recipe by its runs so far, on one seed each; all but the last have been found good enough.

        With ``same_steps``, samples are compared in place of seconds.
        """
        run = runs[-1]

        def outcome(verdict: str, why: str) -> Outcome:
            return Outcome(verdict, why, tuple(runs))

        if "failed" in run:
            return outcome(failure_verdict(run["failed"]), run["failed"])
        if run["pruned"]:
            last = run["evaluations"][-1] if run["evaluations"] else run  # no metric before its first evaluation
            end = f" at {run['metric']:.4g}" if run["evaluations"] and run["metric"] is not None else ""
            why = f"was stopped after {last['seconds']:.1f} s{end}: it could no longer win"
            return outcome("no gain", why)
        is_short = outcome("kept", "").share_of_samples(best) < FEWER_SAMPLES
        if run["seconds_to_target"] is None and not (is_short and baseline.nearly_reaches_target(run["metric"])):
            why = f"never reached the target {baseline.target:g}: it ended at {run['metric']:.4g}"
            return outcome("refused", why)
        metrics = [run["metric"] for run in runs]
        if not baseline.as_good(metrics):
            original = f"the original ends at {baseline.metric:.4g}, and the margin is {baseline.margin:.3g}"
            return outcome("refused", f"ended at {fmean(metrics):.4g}; {original}")
        accepted = outcome("kept", "")
        gain = 1 / accepted.share_of_samples(best) if same_steps else accepted.gain_over(best)
        if gain is not None and gain < MIN_GAIN and not accepted.ends_better(best, baseline):
            seconds, best_seconds, what = accepted.times(best)
            return outcome("no gain", f"{what} in {seconds:.2f} s; the best so far takes {best_seconds:.2f} s")
        why = f"trained in {accepted.whole_seconds():.2f} s and ended at {fmean(metrics):.4g}, over {len(runs)} seeds"
        fastest = best.fastest or best  # is remembered, so that small losses of time do not add up
        return replace(accepted, why=why, fastest=None if (accepted.gain_over(fastest) or 1.0) >= 1.0 else fastest)


Shorten = Callable[[Recipe, Outcome], list[tuple[Recipe, Outcome]]]  # see ``joint_search.shorten``


def seconds_of(run: dict) -> float:
    """Seconds of a whole run by the median pace between its evaluations, so that a passing disturbance counts little.

    The seconds until the first evaluation, in which a compilation or the filling of a cache lies, are those measured.
    A script may evaluate twice at one step, and train on after its last evaluation.
    """
    rows: list[dict] = list(run.get("evaluations") or ())
    stretches = [
        (b["seconds"] - a["seconds"]) / (b["samples"] - a["samples"])
        for a, b in itertools.pairwise(rows)
        if b["samples"] > a["samples"]
    ]
    if not stretches:
        return run["seconds"]
    return rows[0]["seconds"] + median(stretches) * (run["samples"] - rows[0]["samples"])


def try_training_composition(
    study: Study, incumbents: Incumbents, best: Outcome, composition: Recipe, baseline: Baseline, shorten: Shorten
) -> Outcome:
    """Trains a recipe that won elsewhere, added to the best so far, and pushes it if it wins.

    If it fails since some of its methods have no effect here it is tried again without these; a length that is not
    shorter than that of the best recipe is left out. ``best`` is the outcome of the best recipe so far; returns that of
    the new best. ``shorten``: as for ``push_if_it_saves_time``.
    """
    for able in able_forms(study, composition):
        recipe = _without_longer_length(incumbents.best, able)
        merged = merge(incumbents.best, recipe)
        if merged == incumbents.best or conflict_reason(merged):
            break
        if study.task.command and not changes_something(study, incumbents.best, merged, str(recipe)):
            break
        outcome = run_seeds(study, merged, best, baseline, [])
        best = push_if_it_saves_time(study, incumbents, merged, outcome, best, str(recipe), shorten)
    return best


def push_if_it_saves_time(
    study: Study, incumbents: Incumbents, recipe: Recipe, outcome: Outcome, best: Outcome, text: str, shorten: Shorten
) -> Outcome:
    """Pushes a recipe that was kept, then shorter trainings with it. Returns the outcome of the new best.

    A recipe in slower steps may reach the target sooner than ``best`` and yet train for longer: then only those of its
    shorter trainings count that save time. Notes the trial, called ``text``.
    """
    before, is_longer = best, outcome.verdict == "kept" and _takes_longer(study, incumbents.best, recipe, outcome, best)
    if not is_longer:
        note_outcome(study, text, outcome, best)
    if outcome.verdict != "kept":
        return best
    if not is_longer:
        incumbents.push(recipe)
        best = outcome
    for each, shorter in shorten(recipe, outcome):
        if best is not before or (shorter.gain_over(before) or 0.0) >= MIN_GAIN:
            incumbents.push(each)
            best = shorter
    if is_longer:
        if best is before:
            seconds, best_seconds, _ = outcome.times(before)
            whole = f"{outcome.whole_seconds():.2f} s, the best so far {before.whole_seconds():.2f} s"
            why = f"{SOONER}: it takes {whole}; to the target {seconds:.2f} s and {best_seconds:.2f} s"
            outcome = replace(outcome, verdict="no gain", why=why)
        note_outcome(study, text, outcome, before)
    return best


def _takes_longer(study: Study, base: Recipe, recipe: Recipe, outcome: Outcome, best: Outcome) -> bool:
    """Whether a whole training takes longer than that of ``best``, with the recipe ``base``.

    Of as many samples a comparison of the steps decides: the clocks of two runs differ by more than their pace.
    """
    both = min(len(outcome.runs), len(best.runs))
    if best.whole_seconds(both) >= NEARLY_AS_FAST * outcome.whole_seconds(both):
        return False
    has_as_many = FEWER_SAMPLES < outcome.share_of_samples(best) < 1 / FEWER_SAMPLES
    return not has_as_many or study.compare_speed(base, recipe).get("verdict") == SLOWER


def length_option(name: str) -> str | None:
    """The option of a method that is the length of the training; None if it has none.

    By the cards of registered methods only: a length that ``--vary`` names is on the card of its Candidate alone.
    """
    space = method_class(name).card.search_space.items()
    return next((option for option, one in space if isinstance(one, SearchRange) and one.is_length), None)


def _without_longer_length(best: Recipe, recipe: Recipe) -> Recipe:
    """``recipe`` without a method that would replace the length of ``best`` by one that is not shorter."""

    def is_longer(name: str) -> bool:
        option = length_option(name) or ""
        now, then = (each.methods.get(name, {}).get(option) for each in (best, recipe))
        return now is not None and then is not None and then >= now

    return recipe.drop(*(name for name in recipe.methods if is_longer(name)))


def changes_something(study: Study, base: Recipe, recipe: Recipe, text: str) -> bool:
    """Whether a recipe that claims to change the training does so in a few steps; notes the trial ``text`` if not.

    Needed for methods that a user offers, and for scripts. In a whole training in hasten's loop each of its own methods
    shows its effect, or the training fails.
    """
    check = study.check_exactness(base, recipe, loosest_exactness(recipe))
    if not check.get("passed"):
        study.note(text, "training", *check_verdict(check), seconds=check["trial_seconds"])
    return bool(check.get("passed"))


def first_outcome(baseline: Baseline, speedup: float = 1.0) -> Outcome:
    """The outcome to beat: a run of the baseline, as fast as the exact ``speedup`` of the best recipe makes it.

    A recipe that trains the same steps needs no run of its own. The run is that of median seconds: another program may
    have slowed the first one.
    """
    by_seconds = sorted(baseline.runs, key=seconds_of)
    run = dict(by_seconds[(len(by_seconds) - 1) // 2])
    run |= {key: run[key] and run[key] / speedup for key in ("seconds", "seconds_to_target")}
    run["evaluations"] = [{**row, "seconds": row["seconds"] / speedup} for row in run.get("evaluations", ())]
    return Outcome("kept", "", (run | {"trial_seconds": 0.0},))


def search_training(
    study: Study,
    incumbents: Incumbents,
    candidates: list[Candidate],
    baseline: Baseline,
    best: Outcome,
    shorten: Shorten = lambda recipe, outcome: [],
) -> Outcome:
    """Tries one method after the other by trainings, mildest preset first, and pushes the recipes that win.

    ``best`` is the outcome of the best recipe so far; returns that of the new best. ``shorten``: as for
    ``push_if_it_saves_time``.
    """
    for item in candidates:
        base, losses, is_checked = incumbents.best, 0, False
        seen = [_curve(best.runs[0])] if item.name in base.methods else []
        for options in item.presets:
            if _has(base, item.name, options):
                continue  # part of a composition
            recipe = add_or_replace(base, item.name, options)
            text = str(Recipe({item.name: options}))
            if isinstance(recipe, str):
                study.note(text, "training", "not tried", recipe)
                continue
            if (item.offered or study.task.command) and not is_checked:
                if not changes_something(study, base, recipe, text):
                    break
                is_checked = True
            outcome = run_seeds(study, recipe, best, baseline, seen)
            if outcome.verdict == "kept" and not outcome.needs_fewer(best) and not outcome.ends_better(best, baseline):
                outcome = _require_speed(study, incumbents.best, recipe, outcome)
            before, best = best, push_if_it_saves_time(study, incumbents, recipe, outcome, best, text, shorten)
            if best is not before:
                losses, base = 0, incumbents.best
            elif outcome.verdict == "no effect" or (losses := losses + 1) == MAX_LOSSES:
                break
    return best


def _has(recipe: Recipe, name: str, options: dict[str, Any]) -> bool:
    """Whether a recipe has the method with these options, be they given or left at their defaults."""
    defaults = options_of(method_class(name))
    return name in recipe.methods and defaults | recipe.methods[name] == defaults | options


def _curve(run: dict) -> list[tuple[int, float]]:
    """(samples, metric) of each evaluation of a run."""
    return [(row["samples"], row["metric"]) for row in run.get("evaluations", ())]


def note_outcome(study: Study, text: str, outcome: Outcome, best: Outcome) -> None:
    """Notes the trial of a recipe called ``text`` for the report."""
    gain = outcome.gain_over(best)
    ratio: Any = {"median": gain, "low": None, "high": None} if gain else None
    study.note(text, "training", outcome.verdict, outcome.why, ratio=ratio, seconds=outcome.seconds)


def run_seeds(
    study: Study,
    recipe: Recipe,
    best: Outcome,
    baseline: Baseline,
    seen: list,
    same_steps: bool = False,
) -> Outcome:
    """Runs one seed after the other, as long as the recipe can be kept and the other seeds are affordable.

    A run on the first seed is ended once it can no longer win.

    With ``same_steps`` the recipe differs from the best one in its length only: samples are compared, since the clocks
    of two runs differ by more than their pace.

    ``seen`` holds the evaluations of other presets, or of the best recipe, on the first seed; those of this one are
    added. A preset that changes nothing in a run of this length is no gain: only the noise of the measured seconds
    could make it faster.
    """
    runs: list[dict] = []
    time_limit = round(TIME_LIMIT * best.whole_seconds(1), 2)
    for seed in baseline.search_seeds:
        runs.append(study.run(recipe, seed, time_limit=None if runs else time_limit))
        curve = _curve(runs[0])
        if len(runs) == 1 and len(curve) >= MIN_EVALUATIONS:
            if curve in seen:
                return Outcome("no gain", "trains exactly as a setting that was tried before", tuple(runs))
            seen.append(curve)
        outcome = Outcome.of(runs, baseline, best, same_steps)
        others = (len(baseline.search_seeds) - 1) * runs[0]["trial_seconds"]
        if outcome.verdict != "kept" or others > AFFORDABLE_SHARE * study.budget.left():
            break
    if outcome.verdict == "kept" and runs[0]["samples"] < FEWER_SAMPLES * baseline.runs[0]["samples"]:
        return _require_quality(study, recipe, outcome, best, baseline, same_steps)
    return outcome


def _require_quality(
    study: Study, recipe: Recipe, outcome: Outcome, best: Outcome, baseline: Baseline, same_steps: bool
) -> Outcome:
    """The outcome of a training on fewer samples; "refused" unless it surely ends as well, after further runs if cheap.

    The search picks the shortest of several trainings, which may be as good by luck.
    """
    runs = list(outcome.runs)
    original = fmean(run["trial_seconds"] for run in baseline.runs)
    is_cheap = len(runs) == len(baseline.search_seeds) and runs[0]["trial_seconds"] < CHEAP_RUN * original
    for index in range(FURTHER_RUNS if is_cheap else 0):
        runs.append(study.run(recipe, baseline.search_seeds[-1] + SEED_STEP * (index + 1)))
        outcome = Outcome.of(runs, baseline, best, same_steps)
        if outcome.verdict != "kept":
            return outcome
    if baseline.as_good([run["metric"] for run in runs], surely=1.0):
        return outcome
    return replace(outcome, verdict="refused", why=f"{outcome.why}: too near to the margin to be proven soon")


def _require_speed(study: Study, best: Recipe, recipe: Recipe, outcome: Outcome) -> Outcome:
    """The outcome of a recipe that needs as many samples as the best: kept only if its steps are surely faster."""
    speed = study.compare_speed(best, recipe)
    if speed.get("verdict") == FASTER:
        return outcome
    why = speed.get("why") or speed["failed"]
    why = f"takes as many samples to the target as the best so far, and a step is not faster: {why}"
    return replace(outcome, verdict="no gain", why=why)
