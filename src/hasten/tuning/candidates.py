"""Which methods are worth a trial, in which order, and why the others are not."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.engine.registry import DISTRIBUTED, cards_that_state, make_methods, method_class
from hasten.tuning.search import EXACT, Candidate, candidate

MUCH_TALK = 1.5  # times as fast without: then talking less is tried first
MOST_WORKERS = 16  # that somebody would set by hand, however many cores there are


@dataclass
class Candidates:
    """What to try: ``systems`` is judged by pace, ``training`` by time to the target, and so is ``less_talk``, which comes before all others."""

    systems: list[Candidate] = field(default_factory=list)
    training: list[Candidate] = field(default_factory=list)
    not_tried: list[tuple[str, str]] = field(default_factory=list)
    communication: list[Candidate] = field(
        default_factory=list
    )  # where ranks talk for so long that every later trial gets shorter by it


@dataclass(frozen=True)
class MethodSelection:
    """What the user said about methods: ``only`` these (None: all), and ``offered`` ones from outside."""

    only: Recipe | None
    offered: Recipe

    @staticmethod
    def of(methods: Iterable[str] | None, extra: Iterable[str]) -> MethodSelection:
        """Checks every name and setting before anything is measured.

        Raises:
            Refusal: an unknown method, a wrong setting, one that could be tried and never be confirmed.
        """
        only, offered = Recipe.parse(methods) if methods else None, Recipe.parse(extra)
        for recipe in (only or Recipe(), offered):
            make_methods(recipe)
            _refuse_other_steps_at_first(recipe)
        return MethodSelection(only, offered)

    def codes(self) -> dict[str, str]:
        """Fingerprints of the files that outside methods come from: another code is another trial."""
        outside = [name for recipe in (self.only or Recipe(), self.offered) for name in recipe.methods if ":" in name]
        files = {name: Path(inspect.getsourcefile(method_class(name))) for name in outside}
        return {name: sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items()}


def _refuse_other_steps_at_first(recipe: Recipe) -> None:
    for name, settings in recipe.methods.items():
        if settings.get("start") and DISTRIBUTED in method_class(name).card.applies_to:
            raise ConfigurationError(
                f"the steps before {name}:start={settings['start']} are other ones, and a search compares blocks of steps; leave start out, "
                "or train whole runs with it and compare these"
            )


def candidates_for(story: dict, wanted: MethodSelection) -> Candidates:
    """Candidates from a diagnosis: those with room to pay, cheapest proofs and highest bounds first.

    Args:
        story: what ``diagnose`` told; its advice carries the bounds, its ``not_advised`` the reasons.
    """
    found = Candidates()
    chosen = [candidate(name, settings=settings, offered=True) for name, settings in wanted.offered.methods.items()]
    for advice in story["advice"]:
        name = advice["method"]
        if wanted.only is not None and name not in wanted.only.methods:
            continue
        if why := method_class(name).card.not_searched:
            found.not_tried.append((name, why))
        else:
            chosen.append(
                candidate(name, advice["bound"], wanted.only.methods[name] if wanted.only is not None else None)
            )
    for advice in story.get("not_advised", ()):
        name = advice["method"]
        if wanted.only is None:
            found.not_tried.append((name, advice["why"]))
        elif name in wanted.only.methods:  # the user insists
            chosen.append(candidate(name, None, wanted.only.methods[name]))
    if wanted.only is not None:
        told = {each.name for each in chosen} | {name for name, _ in found.not_tried}
        chosen += [
            candidate(name, settings=settings) for name, settings in wanted.only.methods.items() if name not in told
        ]
    for each in sorted(chosen, key=_rank):
        _list_for(each, found).append(each)
    return found


def _list_for(each: Candidate, found: Candidates) -> list[Candidate]:
    if each.card.exactness is not Exactness.CHANGES_TRAINING:
        return found.systems
    return (
        found.communication
        if "parallelize" in each.card.replaces and (each.bound or 1.0) >= MUCH_TALK
        else found.training
    )


def strong_baselines(device: str, cores: int) -> list[Recipe]:
    """What a competent user sets by hand, in its usual forms: a fused optimizer and TF32, with loader workers or without."""
    cards = cards_that_state("strong_baseline")
    by_hand, workers = Recipe(), Recipe()
    for name, card in cards.items():
        if "workers" in card.applies_to:
            workers = workers.with_method(name, workers=min(cores, MOST_WORKERS), persistent=True)
        elif device != "cpu" or "cuda" not in card.applies_to:
            by_hand = by_hand.with_method(name)
    return [by_hand, Recipe(by_hand.methods | workers.methods)]


def _rank(each: Candidate) -> tuple:
    """Offered ones first; then exact before inexact, strategies, what everybody sets by hand, high bounds, quick starts, and shorter runs."""
    classes = (*EXACT, Exactness.REDUCED_PRECISION, Exactness.CHANGES_TRAINING)
    kind = 0 if each.card.exactness in EXACT else classes.index(each.card.exactness)
    claimed = each.card.gain[1] if each.card.gain else 1.0
    by_hand = not each.card.strong_baseline  # measured already, for the competent baseline
    strategy = "parallelize" in each.card.replaces  # all others are measured with it
    for_memory = (
        "full_weights" in each.card.invalidates
    )  # it talks more than the original, and pays where that does not fit
    return (
        not each.offered,
        kind,
        for_memory,
        not strategy,
        each.card.high_setup_cost,
        by_hand,
        -each.card.trial_priority,
        -(each.bound or 1.0),
        -claimed,
        each.name,
    )
