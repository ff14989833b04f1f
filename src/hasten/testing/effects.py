"""What a recipe of one method does in a short run: it shows that it acted, or gives the reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from hasten.benchmarking.process_state import restored
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import train_steps
from hasten.engine.plan import Program, build
from hasten.engine.registry import make_methods

STEPS = 4  # the third is observed


@dataclass(frozen=True)
class ObservedEffect:
    """Whether the method of a recipe acted in a short run, and the evidence."""

    acts: bool  # whether the method showed that it acted, or at least did not report the contrary
    text: str  # the evidence, or the reason why it has no effect; empty if the method gives neither


def observe_effect(task: Task, recipe: Recipe) -> ObservedEffect:
    """Trains 4 steps under a recipe of one method and evaluates; a ConfigurationError counts as no effect."""
    with restored():
        try:
            program = _trained(task, recipe)
        except ConfigurationError as error:
            return ObservedEffect(False, str(error))
    reasons = [reason for _, reason in program.run.no_effect]
    if reasons:
        return ObservedEffect(False, "; ".join(reasons))
    return ObservedEffect(True, "; ".join(program.effects.evidence.values()))


def _trained(task: Task, recipe: Recipe) -> Program:
    program = build(task, make_methods(recipe))
    with program.process_context():
        for _ in islice(program.effects.observed(train_steps(program)), STEPS):
            pass
        if program.validation is not None:
            evaluate(program)
    return program
