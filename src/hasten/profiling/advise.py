"""From shares and ceilings to advice: which methods could pay, how much at most, and why the others cannot.

Reads cards only; no method's code is run.
"""

from __future__ import annotations

from collections.abc import Mapping

from hasten.core.card import FACTS, PHASES, Card
from hasten.reporting.result_schema import Advice, NotAdvised

LEAST_BOUND = 1.02  # below it a method is not worth a trial
LEAST_REST = 1e-3  # share of the time that is never taken away: keeps every bound a number


def advise(
    phases: Mapping[str, float], headroom: Mapping[str, float], facts: frozenset[str], cards: Mapping[str, Card]
) -> tuple[list[Advice], list[NotAdvised]]:
    """(advice, not advised), each a list of plain dicts.

    Args:
        phases: share of the wall clock of each phase.
        headroom: ceilings that were measured, by phase, or by method where a method itself was tried.
        facts: what holds for the run (keys of ``FACTS``).
        cards: the methods that come into question.

    Returns:
        Advice ``{method, bound, why}``, the highest bound first; methods that save whole steps, which no
        timeline can bound, come last with the bound None. Not advised: ``{method, why}``.
    """
    advice, against = [], []
    for name, card in sorted(cards.items()):
        if missing := sorted(card.applies_to & FACTS.keys() - facts):
            against.append(
                {
                    "method": name,
                    "why": f"it needs what does not hold here: {'; '.join(FACTS[fact] for fact in missing)}",
                }
            )
            continue
        if not card.accelerates:
            against.append({"method": name, "why": "it shortens no phase of the step"})
            continue
        bound, why = bound_of(name, card, phases, headroom)
        if bound is not None and bound < LEAST_BOUND:
            against.append({"method": name, "why": why})
        else:
            advice.append({"method": name, "bound": bound, "why": why})
    advice.sort(key=lambda entry: (-(entry["bound"] or 0.0), -_claimed(cards[entry["method"]]), entry["method"]))
    return advice, against


def bound_of(
    name: str, card: Card, phases: Mapping[str, float], headroom: Mapping[str, float]
) -> tuple[float | None, str]:
    """What a method could give at most, and where that number comes from.

    A ceiling that was measured for the method itself is taken as it is. Else Amdahl: 1 / (1 - share of its
    phases), where the share of a phase whose ceiling was measured comes from that measurement.
    """
    if (ceiling := card.ceiling or name) in headroom:
        return headroom[ceiling], f"what it works on, taken away as a whole, gives {headroom[ceiling]:.2f}x"
    if "steps" in card.accelerates:
        return None, "it saves whole steps; how many, only training can tell"
    shares = {phase: _share(phase, phases, headroom) for phase in PHASES if phase in card.accelerates}
    bound = amdahl(sum(shares.values()))
    parts = " and ".join(f"{phase} {share:.0%}" for phase, share in shares.items())
    how = "by replacement" if shares.keys() <= headroom.keys() else "by the timeline"
    return bound, f"of the time, {parts} ({how}): at most {bound:.2f}x"


def amdahl(share: float) -> float:
    """How much faster the whole is when ``share`` of its time is gone."""
    return 1.0 / max(LEAST_REST, 1.0 - share)


def _share(phase: str, phases: Mapping[str, float], headroom: Mapping[str, float]) -> float:
    if phase in headroom:
        return max(0.0, 1.0 - 1.0 / headroom[phase])
    return phases.get(phase, 0.0)


def _claimed(card: Card) -> float:
    return card.gain[1] if card.gain else 1.0
