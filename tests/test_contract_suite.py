"""Every method of hasten passes the contract suite of ``hasten.testing``."""

import warnings
from functools import cache

import pytest

from hasten.core.card import FACTS
from hasten.engine.registry import method_class, method_names
from hasten.testing import CHECKS, Subject
from hasten.testing.checks import (
    SMALL_TASKS,
    has_a_complete_card,
    has_options_that_are_data,
    reports_no_effect,
    shows_its_effect,
)
from helpers.small_tasks import SETTINGS, tasks_with_effect

WITHOUT_A_TASK = (has_a_complete_card, has_options_that_are_data)


@cache
def subject(name: str, with_effect: bool) -> Subject:
    """Returns the method on a task on which it has an effect, or on the small tasks of the suite."""
    task = next(iter(tasks_with_effect(name)), None)
    given_task = task(batch_size=32) if with_effect and task not in (None, *SMALL_TASKS) else None
    return Subject(name, given_task, **SETTINGS.get(name, {}))


def is_applicable(name: str, check) -> bool:
    """Returns whether the check can be decided in one process on this machine; other cases are not generated."""
    if check in WITHOUT_A_TASK:
        return True
    if check is reports_no_effect:
        return not set(SMALL_TASKS) <= set(tasks_with_effect(name))
    return bool(tasks_with_effect(name))


APPLICABLE = [
    pytest.param(name, check, id=f"{name}-{check.__name__}")
    for name in method_names()
    for check in CHECKS
    if check is not shows_its_effect and is_applicable(name, check)  # it has tests of its own, on all makes
]


@pytest.mark.parametrize(("name", "check"), APPLICABLE)
def test_method_passes_check(name, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check(subject(name, check is not reports_no_effect))


@pytest.mark.parametrize("name", method_names())
def test_method_applies_to_known_facts(name):
    """Other words are for methods of users."""
    assert method_class(name).card.applies_to <= FACTS.keys()
