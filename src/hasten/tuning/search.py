"""Looks for the fastest recipe: greedily, cheapest proofs first, every step measured against the best so far.

First what leaves the numbers alone (judged by pace, proven by running), then fewer bits, then other
mathematics (judged by time to the target on one seed). Nothing found here is reported as a gain: the
confirmation measures the winner anew, on seeds that the search has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hasten.contract.card import Card, Exactness
from hasten.contract.errors import Refusal
from hasten.contract.recipe import Recipe
from hasten.engine.find import make_methods, method_class
from hasten.engine.plan import in_order, refuse_conflicts
from hasten.measure.ratio import FASTER
from hasten.tuning.study import Study

EXACT = (Exactness.BIT_EXACT, Exactness.SAME_MATHS)
WORTH_IT = 1.02  # a time to the target that is not 2 % better is no better
SEARCH_SEED = 0


@dataclass(frozen=True)
class Candidate:
    """A method with the settings worth trying, mildest first, and the most it could give."""

    name: str
    card: Card
    tries: tuple[dict, ...]
    bound: float | None = None
    offered: bool = False  # by the user, from outside: its card is a claim, so its proof comes first


@dataclass
class Baseline:
    """What the task's own training does, over the search's seeds."""

    runs: list[dict]
    target: float
    margin: float
    higher_is_better: bool

    @property
    def metric(self) -> float:
        return sum(run["metric"] for run in self.runs) / len(self.runs)

    def as_good(self, metric: float) -> bool:
        """Good enough to go on with; the gate will judge with more seeds."""
        worse = self.metric - metric if self.higher_is_better else metric - self.metric
        return worse <= self.margin


@dataclass
class Ladder:
    """The recipes found, each faster than the one before; the confirmation climbs down if the top does not hold."""

    rungs: list[Recipe] = field(default_factory=lambda: [Recipe()])

    @property
    def best(self) -> Recipe:
        return self.rungs[-1]

    def climb(self, recipe: Recipe) -> None:
        self.rungs.append(recipe)


def fits(recipe: Recipe) -> str | None:
    """Why the methods of a recipe cannot go together, or None."""
    try:
        refuse_conflicts(in_order(make_methods(recipe)))
    except Refusal as refusal:
        return str(refusal)
    return None


def systems(study: Study, ladder: Ladder, candidates: list[Candidate], seconds: float) -> None:
    """Methods that only change how fast the same steps go: kept when surely faster and proven."""
    for candidate in candidates:
        stage = "precision" if candidate.card.exactness is Exactness.FEWER_BITS else "systems"
        base, best = ladder.best, None
        for settings in candidate.tries:
            recipe = base.with_method(candidate.name, **settings)
            text = str(Recipe({candidate.name: settings}))
            if conflict := fits(recipe):
                study.note(text, stage, "not tried", conflict)
                continue
            if candidate.offered and not (proof := study.proof(base, recipe, candidate.card.exactness)).get("passed"):
                study.note(text, stage, "refused", proof.get("why") or proof["failed"], seconds=proof["trial_seconds"])
                continue
            outcome = study.pace(base, recipe, seconds=seconds)
            if "failed" in outcome:
                study.note(text, stage, "failed", outcome["failed"], seconds=outcome["trial_seconds"])
                continue
            ratio = outcome["ratio"]
            if outcome["verdict"] != FASTER:
                verdict = {"slower": "slower", "unsure": "unsure"}.get(outcome["verdict"], "no gain")
                study.note(text, stage, verdict, outcome["why"], ratio=ratio, seconds=outcome["trial_seconds"])
                continue
            if best and best[1]["median"] >= ratio["median"]:
                study.note(text, stage, "no gain", f"{best[2]} is faster", ratio=ratio, seconds=outcome["trial_seconds"])
                continue
            proof = study.proof(base, recipe, candidate.card.exactness)
            seconds_spent = outcome["trial_seconds"] + proof["trial_seconds"]
            if not proof.get("passed"):
                study.note(text, stage, "refused", proof.get("why") or proof["failed"], ratio=ratio, seconds=seconds_spent)
                continue
            study.note(text, stage, "kept", f"{outcome['why']}; {proof['why']}", ratio=ratio, seconds=seconds_spent)
            best = (recipe, ratio, text)
        if best:
            ladder.climb(best[0])


def training(study: Study, ladder: Ladder, candidates: list[Candidate], baseline: Baseline) -> None:
    """Methods that change the training: kept when one seed reaches the target sooner and ends as well."""
    if not candidates:
        return
    reference = study.run(ladder.best, SEARCH_SEED)
    time_to_beat = reference.get("seconds_to_target") if "failed" not in reference else None
    if time_to_beat is None:
        time_to_beat = reference.get("seconds", float("inf"))
    for candidate in candidates:
        base, losses, proven = ladder.best, 0, False
        for settings in candidate.tries:
            recipe = base.with_method(candidate.name, **settings)
            text = str(Recipe({candidate.name: settings}))
            if conflict := fits(recipe):
                study.note(text, "training", "not tried", conflict)
                continue
            if not proven and candidate.card.exactness is Exactness.OTHER_MATHS:
                proof = study.proof(base, recipe, candidate.card.exactness)
                if not proof.get("passed"):
                    study.note(text, "training", "refused", proof.get("why") or proof["failed"], seconds=proof["trial_seconds"])
                    break
                proven = True
            outcome = study.run(recipe, SEARCH_SEED, give_up_after=round(time_to_beat, 2))
            verdict, why = _judged(outcome, time_to_beat, baseline)
            ratio = time_to_beat / outcome["seconds_to_target"] if outcome.get("seconds_to_target") else None
            told = {"median": ratio, "low": None, "high": None} if ratio else None
            study.note(text, "training", verdict, why, ratio=told, seconds=outcome["trial_seconds"])
            if verdict == "kept":
                ladder.climb(recipe)
                time_to_beat, losses = outcome["seconds_to_target"], 0
            else:
                losses += 1
                if losses == 2:  # settings grow bolder; two in a row that lost say enough
                    break


def _judged(outcome: dict, time_to_beat: float, baseline: Baseline) -> tuple[str, str]:
    if "failed" in outcome:
        return "failed", outcome["failed"]
    if outcome["gave_up"]:
        return "no gain", f"had not reached the target after {time_to_beat:.1f} s, so it could no longer win"
    if outcome["seconds_to_target"] is None:
        return "refused", f"never reached the target {baseline.target:g}: it ended at {outcome['metric']:.4g}"
    if not baseline.as_good(outcome["metric"]):
        return "refused", f"ended at {outcome['metric']:.4g}; the original ends at {baseline.metric:.4g}, and the margin is {baseline.margin:.3g}"
    if outcome["seconds_to_target"] * WORTH_IT > time_to_beat:
        return "no gain", f"reached the target in {outcome['seconds_to_target']:.1f} s; the best so far takes {time_to_beat:.1f} s"
    return "kept", f"reached the target in {outcome['seconds_to_target']:.1f} s instead of {time_to_beat:.1f} s, and ended at {outcome['metric']:.4g}"


def candidate(name: str, bound: float | None = None, settings: dict | None = None, offered: bool = False) -> Candidate:
    """A candidate from its card; settings that the user gave are the only ones tried."""
    card = method_class(name).card
    return Candidate(name, card, (settings,) if settings else card.tries, bound, offered)
