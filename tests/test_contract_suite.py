"""Every method of ours is held against the contract suite, and the suite against methods that break it."""

import warnings
from functools import cache

import pytest

from hasten.core.card import FACTS
from hasten.engine.registry import method_class, method_names
from hasten.testing import CHECKS, Subject, check_method
from hasten.testing.checks import SMALL_TASKS, has_a_complete_card, has_settings_that_are_data, says_so_when_idle
from helpers.small_tasks import SETTINGS, tasks_with_effect

WITHOUT_A_TASK = (has_a_complete_card, has_settings_that_are_data)


@cache
@cache
def subject(name: str, with_effect: bool) -> Subject:
    """The method on a task on which it has an effect, or on the suite's own small tasks."""
    task = next(iter(tasks_with_effect(name)), None)
    given = task(batch_size=32) if with_effect and task not in (None, *SMALL_TASKS) else None
    return Subject(name, given, **SETTINGS.get(name, {}))


def applicable() -> list:
    """(method, check): all checks for methods that have an effect in one process here, and those that ask for no effect for all others."""
    return [
        pytest.param(name, check, id=f"{name}-{check.__name__}")
        for name in method_names()
        for check in CHECKS
        if check in WITHOUT_A_TASK
        or (
            not set(SMALL_TASKS) <= set(tasks_with_effect(name))
            if check is says_so_when_idle
            else tasks_with_effect(name)
        )
    ]


@pytest.mark.parametrize(("name", "check"), applicable())
def test_our_methods_keep_the_contract(name, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check(subject(name, check is not says_so_when_idle))


@pytest.mark.parametrize("name", method_names())
def test_our_methods_apply_to_what_can_be_looked_up(name):
    """Free words are for methods from outside."""
    assert method_class(name).card.applies_to <= FACTS.keys()


LIARS = '''
"""Methods that break the contract, each in its own way."""
import os
from dataclasses import dataclass

import torch

from hasten import Card, Exactness, Method

def card(exactness, **more):
    return Card(summary="faster", exactness=exactness, source="a friend", gain_when="always", accelerates={"forward"}, **more)

class NoCardFacts(Method):
    card = Card(summary="faster", exactness=Exactness.CHANGES_TRAINING)
    def batch(self, move, run):
        return lambda batch: [-move(batch)[0], batch[1]]

class LeavesThreads(Method):
    card = card(Exactness.BIT_EXACT)
    def model(self, model, run):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return model

class LeavesEnvironment(Method):
    card = card(Exactness.BIT_EXACT)
    def model(self, model, run):
        os.environ["FASTER"] = "yes"
        return model

class DrawsNumbers(Method):
    card = card(Exactness.EQUIVALENT_MATH)
    def update(self, update, run):
        return lambda: (torch.rand(1), update())

class ChangesLabels(Method):
    card = card(Exactness.BIT_EXACT)
    def batch(self, move, run):
        return lambda batch: [move(batch)[0], torch.zeros_like(batch[1])]

class ForgetsItsState(Method):
    card = card(Exactness.CHANGES_TRAINING)
    def update(self, update, run):
        class Count:
            steps = 0
            def state_dict(self):
                return {"steps": self.steps}
            def load_state_dict(self, state):
                pass
        count = run.checkpoint_state[self.name] = Count()
        def counted():
            update()
            count.steps += 1
        return counted

class KeepsToItself(Method):
    card = card(Exactness.CHANGES_TRAINING)
    def forward(self, forward, run):
        calls = [0]
        def slower_and_slower(batch):
            calls[0] += torch.is_grad_enabled()
            return forward(batch) / calls[0]
        return slower_and_slower

class ExportsAWrapper(Method):
    card = card(Exactness.CHANGES_TRAINING)
    def export(self, model, run):
        return torch.nn.Sequential(model)

class IdleButBusy(Method):
    card = card(Exactness.CHANGES_TRAINING)
    def batch(self, move, run):
        run.report_no_effect(self, "nothing here")
        return lambda batch: [2 * move(batch)[0], batch[1]]
'''

BROKEN = {
    "NoCardFacts": "has_a_complete_card: the card lacks source, gain_when",
    "LeavesThreads": "leaves_no_trace: it leaves the process changed: threads",
    "LeavesEnvironment": "leaves_no_trace: it leaves the process changed: environment",
    "DrawsNumbers": "leaves_no_trace: it draws random numbers of its own",
    "ChangesLabels": "is_as_exact_as_its_card_says: the card says 'same bits', but",
    "ForgetsItsState": "survives_a_checkpoint: what is kept as",
    "KeepsToItself": "goes_on_where_it_stopped: a run that was taken up does not end as one that was left alone",
    "ExportsAWrapper": "exports_a_plain_module: it exports weights under other names",
    "IdleButBusy": "says_so_when_idle: it says that it has nothing to do",
}


@pytest.fixture(scope="module")
def liars(tmp_path_factory):
    path = tmp_path_factory.mktemp("methods") / "liars.py"
    path.write_text(LIARS)
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_the_suite_catches(name, liars):
    with pytest.raises(AssertionError) as caught:
        check_method(f"{liars}:{name}")
    assert BROKEN[name] in str(caught.value)


def test_the_suite_passes_an_honest_method_given_as_a_class():
    from hasten.methods.gradient_accumulation import GradientAccumulation

    results = check_method(GradientAccumulation, pieces=3)
    assert set(results.values()) == {"passed"}, results
    assert results.keys() == {check.__name__ for check in CHECKS}
