"""Which methods act in a run, in which order, and which cannot be combined. Computed from their cards."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations

from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, required_traits
from hasten.core.run_context import RunContext

NO_EFFECT_ALONE = "there is only one process; pass --processes N with N >= 2"


def applicable_methods(methods: Sequence[Method], run: RunContext) -> list[Method]:
    """The methods that act in this run, innermost first; those for several processes are reported where there is only one.

    Raises:
        Refusal: methods that conflict, applicable or not.
    """
    methods = sort_methods(methods)
    check_conflicts(methods)
    if run.parallel is not None:
        return methods
    for method in methods:
        if "distributed" in method.card.applies_to:
            run.report_no_effect(method, NO_EFFECT_ALONE)
    return [method for method in methods if "distributed" not in method.card.applies_to]


def sort_methods(methods: Sequence[Method]) -> list[Method]:
    """Sorts by (order, after, name): a stable topological order that ignores the order given."""
    named = {method.name: method for method in methods}
    waiting = {name: {other for other in method.card.after if other in named} for name, method in named.items()}
    ready = [(named[name].card.order, name) for name, before in waiting.items() if not before]
    heapq.heapify(ready)
    ordered: list[Method] = []
    while ready:
        _, done = heapq.heappop(ready)
        ordered.append(named[done])
        for name, before in waiting.items():
            if done in before:
                before.remove(done)
                if not before:
                    heapq.heappush(ready, (named[name].card.order, name))
    if len(ordered) < len(named):
        circle = sorted(name for name, before in waiting.items() if before)
        raise ConfigurationError(f"{' and '.join(circle)} each want to come after the other; leave one of them out")
    return ordered


def check_conflicts(methods: Sequence[Method]) -> None:
    """Computes conflicts from the cards; no pair of methods is listed anywhere.

    Raises:
        Refusal: two methods conflict.
    """
    for a, b in combinations(methods, 2):
        continues = a.name in b.card.after or b.name in a.card.after  # one builds on what the other has made
        if not continues and (both := a.card.replaces & b.card.replaces):
            raise ConfigurationError(
                f"{a.name} and {b.name} both replace {', '.join(sorted(both))}; choose one of them"
            )
        for one, other in ((a, b), (b, a)):
            if lost := required_traits(one) & other.card.invalidates:
                raise ConfigurationError(
                    f"{one.name} requires {', '.join(sorted(lost))}, which {other.name} invalidates; choose one of them"
                )
