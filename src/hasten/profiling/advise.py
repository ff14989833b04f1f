"""Advice: which methods could pay, how much at most, and why the others cannot.

Works from shares of the time, measured ceilings and cards; no method's code is run.
"""

from collections.abc import Mapping
from typing import Any

from hasten.core.card import CEILINGS, FACTS, PHASES, REMEDIES, Card
from hasten.core.recipe import Recipe
from hasten.engine.resources import available_cores
from hasten.reporting.result_schema import Advice, NotAdvised

MIN_BOUND = 1.02  # a method whose bound is lower is not worth a trial
MIN_REMAINDER = 1e-3  # share of the time that always remains, so that every bound is finite


def advise(
    phases: Mapping[str, float],
    ceilings: Mapping[str, float],
    facts: frozenset[str],
    cards: Mapping[str, Card],
    problems: frozenset[str] = frozenset(),
) -> tuple[list[Advice], list[NotAdvised]]:
    """Sorts methods into those that could pay and those that cannot.

    Args:
        phases: phase -> fraction of the wall clock, 0 to 1.
        ceilings: measured ceilings (time with / time without), by phase or by the name that a card gives its ceiling.
        facts: the keys of ``FACTS`` that hold for the run.
        cards: the methods to consider, by name.
        problems: the keys of ``REMEDIES`` that were found in the run; their remedies come first.

    Returns:
        Advice ``{method, bound, why}``, the highest bound first; methods that save whole steps have the bound None and
        come last. Not advised: ``{method, why}``.
    """
    advice: list[Advice] = []
    not_advised: list[NotAdvised] = []
    for name, card in sorted(cards.items()):
        missing = sorted(card.applies_to & FACTS.keys() - facts)
        if missing:
            why = f"it needs what does not hold here: {'; '.join(FACTS[fact] for fact in missing)}"
            not_advised.append({"method": name, "why": why})
            continue
        if not card.accelerates:
            saves = "; it saves memory, for a larger batch or model" if "out_of_memory" in card.remedy_for else ""
            not_advised.append({"method": name, "why": f"it shortens no phase of the step{saves}"})
            continue
        bound, why = bound_of(name, card, phases, ceilings, facts)
        if found := sorted(problems & card.remedy_for.keys()):
            options = remedy_options(card, found[0])
            how = f" (take {Recipe({name: options})})" if options else ""
            why = f"{'; '.join(REMEDIES[problem] for problem in found)}{how}; {why}"
        if bound is not None and bound < MIN_BOUND:
            not_advised.append({"method": name, "why": why})
        else:
            advice.append({"method": name, "bound": bound, "why": why})

    def order(entry: Advice) -> tuple[bool, float, float, str]:
        card = cards[entry["method"]]
        gain = card.gain
        return (
            not problems & card.remedy_for.keys(),
            -(entry["bound"] or 0.0),
            -(gain[1] if gain else 1.0),
            entry["method"],
        )

    return sorted(advice, key=order), not_advised


def remedy_options(card: Card, problem: str, processes: int = 1) -> dict[str, Any]:
    """The options of a method against a problem: those of its card, or for idle cores a thread for each core.

    ``processes`` share the cores of this machine.
    """
    threads = {"count": max(1, available_cores() // processes)} if problem == "idle_cores" else {}
    return {**card.remedy_for[problem], **threads}


def advise_without_profile(facts: frozenset[str], cards: Mapping[str, Card]) -> tuple[list[Advice], list[NotAdvised]]:
    """``advise`` where nothing was measured: every method whose facts hold could pay, its bound is unknown."""
    advice, not_advised = advise(dict.fromkeys(PHASES, 1.0), {}, facts, cards)
    unknown: list[Advice] = [{**entry, "bound": None, "why": "its phases were not measured"} for entry in advice]
    return unknown, not_advised


def bound_of(
    name: str,
    card: Card,
    phases: Mapping[str, float],
    ceilings: Mapping[str, float],
    facts: frozenset[str] = frozenset(),
) -> tuple[float | None, str]:
    """(the highest speed-up that a method could give, the reason).

    A ceiling that was measured for the method itself is taken as it is. Otherwise Amdahl's law: 1 / (1 - share of its
    phases), where a phase with a measured ceiling has the share that follows from it. On a GPU (``facts``) the share of
    the copy is no bound: the host waits in it for the whole queue, and the GPU is idle in the phases after it.
    """
    ceiling = card.ceiling or name
    if ceiling in ceilings:
        return ceilings[ceiling], f"what it works on, taken away as a whole, gives {ceilings[ceiling]:.2f}x"
    if "copy" in card.accelerates and "cuda" in facts and "copy" not in ceilings:
        return None, "no bound: a copy to the GPU may wait for the steps before it, which shows in other phases"
    if "steps" in card.accelerates:
        return None, "it saves whole steps; only a training run shows how many"
    if card.ceiling:
        return None, f"no bound: what it would give if {CEILINGS[card.ceiling]} was not measured"
    shares = {phase: _share(phase, phases, ceilings) for phase in PHASES if phase in card.accelerates}
    parts = " and ".join(f"{phase} {share:.0%}" for phase, share in shares.items())
    if sum(shares.values()) >= 1.0:  # the machine was too noisy: timer and ablation measure at different times
        return None, f"no bound: its phases were measured as more than all of the time ({parts}); measure again"
    bound = amdahl(sum(shares.values()))
    how = "measured by ablation" if shares.keys() <= ceilings.keys() else "measured by the phase timer"
    return bound, f"of the time, {parts} ({how}): at most {bound:.2f}x"


def amdahl(share: float) -> float:
    """Speed-up by Amdahl's law if ``share`` of the time, 0 to 1, is removed: 1 / (1 - share), at most 1000."""
    return 1.0 / max(MIN_REMAINDER, 1.0 - share)


def _share(phase: str, phases: Mapping[str, float], ceilings: Mapping[str, float]) -> float:
    if phase in ceilings:
        return max(0.0, 1.0 - 1.0 / ceilings[phase])
    return phases.get(phase, 0.0)
