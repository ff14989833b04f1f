"""Selects the methods that are worth a trial, orders them, and states why the others are not tried."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from hasten.core.card import FACTS, Exactness
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.engine.registry import DISTRIBUTED, cards_that_state, make_methods, method_class
from hasten.profiling.advise import amdahl, remedy_options
from hasten.tuning.systems import Candidate, candidate
from hasten.tuning.varied_arguments import sets_arguments, with_varied

COMMUNICATION_BOUND = 1.5  # from this speed-up on, methods that reduce communication are tried first
WARMUP_OPTIONS = {"warmup_steps", "start_powerSGD_iter"}  # options of distributed methods
MAX_WORKERS = 16  # that a user would set by hand, however many cores there are


@dataclass
class Candidates:
    """The methods to try, each list in the order of its trials.

    ``systems`` are exact or of lower precision and are judged by the speed of their steps; ``training`` and
    ``communication`` change the training and are judged by trainings. ``communication`` is tried before ``training``:
    these methods reduce communication so much that every later trial gets shorter.
    """

    systems: list[Candidate] = field(default_factory=list)
    training: list[Candidate] = field(default_factory=list)
    not_tried: list[tuple[str, str]] = field(default_factory=list)  # (method, reason)
    communication: list[Candidate] = field(default_factory=list)
    is_restricted: bool = False  # to methods that the user named


@dataclass(frozen=True)
class MethodSelection:
    """The methods that the user allows a search to try, or offers to it in files."""

    only: Recipe | None  # the only methods to try; None: all
    offered: Recipe  # methods from files, to try besides

    @staticmethod
    def of(methods: Iterable[str] | None, extra: Iterable[str]) -> MethodSelection:
        """The selection of a user: ``methods`` and ``extra`` of ``tune``. Checks every name and option.

        Raises:
            ConfigurationError: an unknown method, a wrong option, or warm-up steps of a distributed method, which make
                blocks of steps differ.
        """
        offered = Recipe.parse(extra)
        classes = {name.rpartition(":")[2] for name in offered.methods}  # offered methods are tried in any case
        names = [methods] if isinstance(methods, str) else methods
        only = Recipe.parse(name for name in names if name not in classes) if names else None
        for recipe in (only or Recipe(), offered):
            make_methods(recipe)
            _refuse_warmup(recipe)
        return MethodSelection(only, offered)

    def source_hashes(self) -> dict[str, str]:
        """Method -> hash of its file, for methods from the user's files: changed code is measured again."""
        names = [name for recipe in (self.only or Recipe(), self.offered) for name in recipe.methods if ":" in name]
        files = {name: inspect.getsourcefile(method_class(name)) for name in names}
        return {name: sha256(Path(file).read_bytes()).hexdigest()[:16] for name, file in files.items() if file}


def _refuse_warmup(recipe: Recipe) -> None:
    for name, options in recipe.methods.items():
        for option in WARMUP_OPTIONS & options.keys():
            if options[option] and DISTRIBUTED in method_class(name).card.applies_to:
                raise ConfigurationError(
                    f"{name}:{option}={options[option]} makes the first steps differ from the later ones, and a search "
                    f"compares blocks of steps; leave {option} out, or train whole runs with it and compare those"
                )


def candidates_for(
    diagnosis: Mapping[str, Any],
    selection: MethodSelection,
    refusal: Callable[[Recipe], str] = lambda recipe: "",
    varied: Mapping[str, float] | None = None,
    processes: int = 1,
) -> Candidates:
    """The candidates in the order in which to try them, see ``_order``.

    The ``advice`` of the diagnosis holds the upper bounds of speed-ups, its ``not_advised`` the reasons for methods
    that are not tried. ``refusal`` returns why a recipe cannot run where the task's loop is, such as in a script, or
    "". ``varied`` maps the arguments of the user's script that may take other values to the user's own values.
    ``processes`` train together on this machine.
    """
    found, only = Candidates(is_restricted=selection.only is not None), selection.only
    facts = frozenset(diagnosis.get("facts") or ())
    on_gpu = "cuda" in facts
    chosen = [candidate(name, None, options, offered=True) for name, options in selection.offered.methods.items()]
    for advice in diagnosis["advice"]:
        name = advice["method"]
        if only is not None and name not in only.methods and not sets_arguments(name):
            continue
        if why := method_class(name).card.not_searched:
            found.not_tried.append((name, why))
        else:
            options = None if only is None else only.methods.get(name)
            bound = advice["bound"] or (_least_bound(name, diagnosis.get("phases", {})) if on_gpu else None)
            chosen.append(candidate(name, bound, options, on_gpu=on_gpu))
    if only is None:
        found.not_tried += [(entry["method"], entry["why"]) for entry in diagnosis.get("not_advised", ())]
    else:  # the user's choice overrides the advice
        handled = {item.name for item in chosen} | {name for name, _ in found.not_tried}
        chosen += [
            candidate(name, None, options, on_gpu=on_gpu)
            for name, options in only.methods.items()
            if name not in handled
        ]
    chosen = [_for_idle_cores(item, processes) for item in chosen] if "idle_cores" in facts else chosen
    for item in sorted(with_varied(chosen, varied or {}), key=_order):
        if why := refusal(Recipe({item.name: {}})):
            found.not_tried.append((item.name, why))
        elif item.card.exactness is not Exactness.CHANGES_TRAINING:
            found.systems.append(item)
        elif "parallelize" in item.card.replaces and (item.bound or 1.0) >= COMMUNICATION_BOUND:
            found.communication.append(item)
        else:
            found.training.append(item)
    return found


def _for_idle_cores(item: Candidate, processes: int) -> Candidate:
    """A candidate that can use idle cores: a thread for each core first, then for each second and fourth one.

    Others, and one with options of the user, stay as they are.
    """
    if "idle_cores" not in item.card.remedy_for or item.presets != item.card.presets:
        return item
    most = remedy_options(item.card, "idle_cores", processes)
    presets = [{name: value // part for name, value in most.items()} for part in (1, 2, 4)]
    presets = tuple(one for one in presets if min(one.values()) > 1)
    return replace(item, is_remedy=True, presets=presets) if presets else item


def _least_bound(name: str, phases: Mapping[str, float]) -> float | None:
    """What the bound of a method that accelerates copying is at least, by the known phases; None for other methods.

    For the order of the candidates only.
    """
    accelerated = method_class(name).card.accelerates
    return amdahl(sum(phases.get(phase, 0.0) for phase in accelerated)) if "copy" in accelerated else None


def strong_baselines(device: str, cores: int, facts: frozenset[str] = frozenset()) -> list[Recipe]:
    """What an experienced user sets by hand: a fused optimizer and TF32, without loader workers and with them.

    On a GPU also both of these recipes with what its owner would add, such as bfloat16. Methods need what the ``facts``
    about the run allow; without ``facts`` nothing is known. There are ``cores`` workers, at most MAX_WORKERS.
    """
    by_hand, workers = Recipe(), Recipe()
    for name, card in cards_that_state("strong_baseline").items():
        if facts and card.applies_to & FACTS.keys() - facts:
            continue
        if "workers" in card.applies_to:
            workers = workers.with_method(name, num_workers=min(cores, MAX_WORKERS), persistent_workers=True)
        elif device != "cpu" or "cuda" not in card.applies_to:
            by_hand = by_hand.with_method(name)
    forms = [by_hand, Recipe({**by_hand.methods, **workers.methods})]
    cards = cards_that_state("on_gpu") if device != "cpu" else {}
    usable = {name: card for name, card in cards.items() if not card.applies_to & FACTS.keys() - facts}
    on_gpu = {name: {} for name, card in usable.items() if card.on_gpu.get("baseline")}
    return [*forms, *(Recipe({**form.methods, **on_gpu}) for form in forms)] if on_gpu else forms


def _order(item: Candidate) -> tuple:
    """Sort key of candidates of one stage: what the user offered first, then remedies, strategies, ...

    ... (all others are measured with them), methods with a quick start, methods that the strong baseline has not
    measured already, high bounds and gains.
    """
    card = item.card
    return (
        not item.offered,
        not item.is_remedy,
        "full_weights" in card.invalidates,  # more communication: pays only if the model does not fit otherwise
        "parallelize" not in card.replaces,
        card.high_setup_cost,
        not card.strong_baseline,
        -card.trial_priority,
        -(item.bound or 1.0),
        -(card.gain[1] if card.gain else 1.0),
        item.name,
    )
