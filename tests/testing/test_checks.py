"""The contract suite catches methods that break the contract; ``test_contract_suite.py`` runs it on those of hasten."""

import pytest

from hasten.methods.gradient_accumulation import GradientAccumulation
from hasten.testing import CHECKS, check_method

BROKEN_METHODS = '''
"""Methods that break the contract, each in its own way."""
import os
from dataclasses import dataclass

import torch

from hasten import Card, Exactness, Method

def card(exactness, **more):
    return Card(summary="faster", exactness=exactness, source="none", gain_when="ever", accelerates={"forward"}, **more)

class IncompleteCard(Method):
    card = Card(summary="faster", exactness=Exactness.CHANGES_TRAINING)
    def batch_transform(self, to_device, run):
        return lambda batch: [-to_device(batch)[0], batch[1]]

class ChangesNumThreads(Method):
    card = card(Exactness.BIT_EXACT)
    def model(self, model, run):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return model

class ChangesEnvironment(Method):
    card = card(Exactness.BIT_EXACT)
    def model(self, model, run):
        os.environ["FASTER"] = "yes"
        return model

class DrawsNumbers(Method):
    card = card(Exactness.EQUIVALENT_MATH)
    def optimizer_step(self, optimizer_step, run):
        return lambda: (torch.rand(1), optimizer_step())

class ChangesLabels(Method):
    card = card(Exactness.BIT_EXACT)
    def batch_transform(self, to_device, run):
        return lambda batch: [to_device(batch)[0], torch.zeros_like(batch[1])]

class LosesItsState(Method):
    card = card(Exactness.CHANGES_TRAINING)
    def optimizer_step(self, optimizer_step, run):
        class Count:
            steps = 0
            def state_dict(self):
                return {"steps": self.steps}
            def load_state_dict(self, state):
                pass
        count = run.checkpoint_state[self.name] = Count()
        def counted():
            optimizer_step()
            count.steps += 1
        return counted

class HidesItsState(Method):
    card = card(Exactness.CHANGES_TRAINING)
    def forward(self, forward, run):
        calls = [0]
        def shrinking_loss(batch):
            calls[0] += torch.is_grad_enabled()
            return forward(batch) / calls[0]
        return shrinking_loss

class ExportsAWrapper(Method):
    card = card(Exactness.CHANGES_TRAINING)
    def export(self, model, run):
        return torch.nn.Sequential(model)

class ReportsNoEffectWrongly(Method):
    card = card(Exactness.CHANGES_TRAINING)
    def batch_transform(self, to_device, run):
        run.report_no_effect(self, "nothing here")
        return lambda batch: [2 * to_device(batch)[0], batch[1]]
'''

MESSAGES = {
    "IncompleteCard": "has_a_complete_card: the card lacks source, gain_when",
    "ChangesNumThreads": "restores_process_state: it leaves the process changed: threads",
    "ChangesEnvironment": "restores_process_state: it leaves the process changed: environment",
    "DrawsNumbers": "restores_process_state: it draws random numbers",
    "ChangesLabels": "is_as_exact_as_its_card_states: the card states 'same bits', but",
    "LosesItsState": "saves_its_state: the state of",
    "HidesItsState": "resumes_bit_identically: a resumed run ends with other weights than an uninterrupted one",
    "ExportsAWrapper": "exports_a_plain_module: it exports weights under other names",
    "ReportsNoEffectWrongly": "reports_no_effect: it reports no effect on",
}


@pytest.fixture(scope="module")
def broken_methods(tmp_path_factory):
    path = tmp_path_factory.mktemp("methods") / "broken_methods.py"
    path.write_text(BROKEN_METHODS)
    return path


@pytest.mark.parametrize("name", MESSAGES)
def test_suite_catches_broken_method(name, broken_methods):
    with pytest.raises(AssertionError) as caught:
        check_method(f"{broken_methods}:{name}")
    assert MESSAGES[name] in str(caught.value)


def test_suite_passes_method_given_as_class():
    results = check_method(GradientAccumulation, accumulation_steps=3)
    assert set(results.values()) == {"passed"}, results
    assert results.keys() == {check.__name__ for check in CHECKS}
