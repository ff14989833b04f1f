"""Which methods act in a run, in which order, and which cannot be combined, by their cards; calls their hooks."""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import Any

from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, hooks_of, required_traits
from hasten.core.run_context import RunContext

NO_EFFECT_ALONE = "there is only one process; pass --processes N with N >= 2"


def applicable_methods(methods: Sequence[Method], run: RunContext) -> list[Method]:
    """The methods that act in this run, innermost first; reports distributed ones as "no effect" in one process."""
    methods = sort_methods(methods)
    check_conflicts(methods)
    if run.parallel is not None:
        return methods
    for method in methods:
        if "distributed" in method.card.applies_to:
            run.report_no_effect(method, NO_EFFECT_ALONE)
    return [method for method in methods if "distributed" not in method.card.applies_to]


def call_hook(method: Method, hook: str, thing: Any, run: RunContext) -> Any:
    """What the hook of a method puts in the place of ``thing``; ConfigurationError if it returns None.

    An exception gets the attribute ``hook``, from which ``explain_error`` names the method.
    """
    name = f"the hook {hook!r} of the method {method.name!r}"
    try:
        replacement = getattr(method, hook)(thing, run)
    except Exception as error:
        error.hook = name  # pyright: ignore[reportAttributeAccessIssue]
        raise
    if replacement is None:
        raise ConfigurationError(f"{name} returns None; it must return what it was given, or a replacement of it")
    return replacement


def fold_hook(methods: Sequence[Method], run: RunContext, hook: str, thing: Any) -> Any:
    """Passes ``thing`` through ``hook`` of every method that overrides it; methods that replace it come first."""
    for method in sorted(methods, key=lambda method: hook not in method.card.replaces):
        if hook in hooks_of(method):
            thing = call_hook(method, hook, thing, run)
    return thing


def sort_methods(methods: Sequence[Method]) -> list[Method]:
    """Sorts innermost first by the card's ``order`` and ``after``, then by name; ConfigurationError for a cycle."""
    by_name = {method.name: method for method in methods}
    graph = {name: [other for other in method.card.after if other in by_name] for name, method in by_name.items()}
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " and ".join(sorted(set(error.args[1])))
        raise ConfigurationError(f"{cycle} each must come after the other; leave one of them out") from None
    ordered: list[Method] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=lambda name: (by_name[name].card.order, name))
        ordered.append(by_name[ready.pop(0)])
        sorter.done(ordered[-1].name)
    return ordered


def check_fits_task(methods: Sequence[Method], run: RunContext) -> None:
    """ConfigurationError if the task cannot be trained by several processes, or excludes a method."""
    task = run.task
    required = {"Task(step=)": {"python_between_kernels"}} if task.step is not None else {}
    if task.clip_grad_norm is not None:
        required["Task(clip_grad_norm=)"] = {"gradient_norm", "reduced_gradients"}
    if task.step is not None and run.parallel is not None:
        reason = "several processes would each need a part of what it computes"
        raise ConfigurationError(f"a task with a step of its own trains in one process: {reason}; pass --processes 1")
    for method in methods:
        for name, traits in required.items():
            if lost := traits & method.card.invalidates:
                reason = f"requires {', '.join(sorted(lost))}, which {method.name} invalidates"
                raise ConfigurationError(f"{name} {reason}; leave one of them out")
        if task.step is not None and "loss" in hooks_of(method):
            reason = "changes the loss function, but Task(step=) has its own"
            raise ConfigurationError(f"{method.name} {reason}; leave it out")


def check_conflicts(methods: Sequence[Method]) -> None:
    """ConfigurationError if two methods replace the same hook, or one invalidates what another requires (see cards)."""
    for a, b in combinations(methods, 2):
        continues = a.name in b.card.after or b.name in a.card.after  # one builds on the result of the other
        if not continues and (both := a.card.replaces & b.card.replaces):
            replaced = ", ".join(sorted(both))
            raise ConfigurationError(f"{a.name} and {b.name} both replace {replaced}; choose one of them")
        for one, other in ((a, b), (b, a)):
            if lost := required_traits(one) & other.card.invalidates:
                raise ConfigurationError(
                    f"{one.name} requires {', '.join(sorted(lost))}, which {other.name} invalidates; choose one of them"
                )
