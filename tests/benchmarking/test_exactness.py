"""The proofs find what they are for: honest methods pass, and each kind of lie is caught with its number."""

import math
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from hasten.benchmarking import equivalence_runs
from hasten.benchmarking.exactness import check_exactness
from hasten.benchmarking.process_state import differences, process_state
from hasten.core.card import Exactness
from hasten.core.recipe import Recipe
from hasten.testing import tasks

METHODS = '''
"""Methods whose cards may lie; the class that they claim is up to the test."""
from dataclasses import dataclass, replace

import torch

from hasten import Card, Exactness, Method
from hasten.benchmarking import laboratory

class Plain(Method):
    card = Card(summary="a method on trial", exactness=Exactness.BIT_EXACT)

class DoesNothing(Plain):
    def forward(self, forward, run):
        return lambda batch: forward(batch)

class DropsLabels(Plain):
    """A tenth of the samples get the wrong label."""
    def batch(self, move, run):
        def lossy(batch):
            x, y = move(batch)
            y = y.clone()
            y[: max(1, len(y) // 10)] = 0
            return x, y
        return lossy

class DividesTheRate(Plain):
    def optimizer(self, make, run):
        def slower(model):
            optimizer = make(model)
            for group in optimizer.param_groups:
                group["lr"] /= 30
            return optimizer
        return slower

class DetachesTheFirstLayer(Plain):
    def model(self, model, run):
        model[0].register_forward_hook(lambda module, inputs, output: output.detach())
        return model

class EasierValidation(Plain):
    def data(self, batches, run):
        if batches.training:
            return batches
        return batches.mapped(lambda passing: ([x, torch.zeros_like(y)] for x, y in passing))

class Rounds(Plain):
    """Gradients rounded to bfloat16, as a lower precision would."""
    def gradients(self, gradients, run):
        def rounded():
            gradients()
            for p in run.model.parameters():
                p.grad.copy_(p.grad.to(torch.bfloat16) if p.dtype == torch.float32 else p.grad)
        return rounded

class RoundsTooMuch(Plain):
    def gradients(self, gradients, run):
        def rounded():
            gradients()
            for p in run.model.parameters():
                p.grad.copy_(p.grad.sign() * p.grad.abs().mean())
        return rounded

class SpoilsAGradient(Plain):
    """In float32 the first gradient is not a number, and the update takes it."""
    def gradients(self, gradients, run):
        def spoilt():
            gradients()
            first = next(run.model.parameters())
            if first.dtype == torch.float32:
                first.grad.fill_(float("nan"))
        return spoilt

class HalfTheSteps(Plain):
    def plan(self, plan, run):
        return replace(plan, epochs=plan.epochs / 2)

class StopsLater(Plain):
    def plan(self, plan, run):
        return replace(plan, stop=lambda evaluations: len(evaluations) > 1)

class Explodes(Plain):
    def update(self, update, run):
        def exploding():
            update()
            with torch.no_grad():
                next(run.model.parameters()).fill_(float("nan"))
        return exploding

class Raises(Plain):
    def batch(self, move, run):
        def raising(batch):
            raise KeyError("lost")
        return raising

class Idle(Plain):
    def model(self, model, run):
        run.report_no_effect(self, "no such layer")
        return model

class ChangesTheProcess(Plain):
    def model(self, model, run):
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.backends.mkldnn.enabled = False
        return model

class IsSlow(Plain):
    """By the clock that the test has given to the laboratory."""
    def update(self, update, run):
        return lambda: (equivalence_runs.time.sleep(0.2), update())
'''


@pytest.fixture(scope="module")
def on_trial(tmp_path_factory):
    """``(class name, exactness, **more) -> ExactnessCheck`` on the perceptron."""
    path = tmp_path_factory.mktemp("methods") / "on_trial.py"
    path.write_text(METHODS)

    def proof(name: str, exactness: Exactness, base: str = "baseline", **more):
        base = Recipe.coerce(base)
        return check_exactness(
            tasks.perceptron(), base, base.with_method(f"{path}:{name}"), exactness, device="cpu", **more
        )

    return proof


@pytest.mark.parametrize("exactness", [Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH, Exactness.REDUCED_PRECISION])
def test_what_changes_nothing_is_as_exact_as_one_likes(exactness, on_trial):
    proof = on_trial("DoesNothing", exactness)
    assert proof.passed and ("12 steps" in proof.why or "3 batches" in proof.why)


@pytest.mark.parametrize(
    "lie", ["DropsLabels", "DividesTheRate", "DetachesTheFirstLayer", "EasierValidation", "HalfTheSteps"]
)
@pytest.mark.parametrize("claim", [Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH, Exactness.REDUCED_PRECISION])
def test_a_lie_about_exactness_is_caught(lie, claim, on_trial):
    proof = on_trial(lie, claim)
    assert not proof.passed, proof.why
    if lie == "EasierValidation":
        assert proof.why == "the validation data are not the same"
    if lie == "HalfTheSteps":
        assert "the plan of steps is another: passes: 1.0 instead of 2" in proof.why


def test_rounding_is_fewer_bits_but_not_the_same_bits(on_trial):
    fewer = on_trial("Rounds", Exactness.REDUCED_PRECISION)
    assert fewer.passed and 40 < fewer.number < 80, fewer.why
    assert not on_trial("Rounds", Exactness.BIT_EXACT).passed


def test_too_few_bits_are_too_few(on_trial):
    proof = on_trial("RoundsTooMuch", Exactness.REDUCED_PRECISION)
    assert not proof.passed and proof.number < 20 and "above its error against float64" in proof.why


def test_a_gradient_that_is_no_number_is_the_worst_of_all(on_trial):
    proof = on_trial("SpoilsAGradient", Exactness.REDUCED_PRECISION)
    assert not proof.passed and proof.number == -math.inf, proof.why


def test_other_maths_must_have_an_effect(on_trial):
    nothing, labels = (
        on_trial("DoesNothing", Exactness.CHANGES_TRAINING),
        on_trial("DropsLabels", Exactness.CHANGES_TRAINING),
    )
    assert not nothing.passed and nothing.number == 0 and "no effect" in nothing.why
    assert labels.passed and labels.number > 1e-3


def test_a_plan_that_is_another_is_an_effect(on_trial):
    proof = on_trial("StopsLater", Exactness.CHANGES_TRAINING)
    assert proof.passed and "stops early: True instead of False" in proof.why


@pytest.mark.parametrize("exactness", Exactness)
@pytest.mark.parametrize(
    ("name", "why"),
    [("Explodes", "finite"), ("Raises", "KeyError: 'lost'"), ("Idle", "nothing to act on: no such layer")],
)
def test_it_fails_closed(name, why, exactness, on_trial):
    proof = on_trial(name, exactness)
    assert not proof.passed and why in proof.why
    assert math.isnan(proof.number)


def test_a_method_that_is_idle_in_both_arms_is_not_on_trial(on_trial):
    assert on_trial("DoesNothing", Exactness.BIT_EXACT, base="channels_last").passed


def test_nothing_is_left_behind(on_trial):
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    before = process_state()
    assert on_trial("ChangesTheProcess", Exactness.EQUIVALENT_MATH).passed
    assert differences(before, process_state()) == []


def test_out_of_time_both_arms_are_compared_where_the_slower_one_stands(on_trial, monkeypatch):
    slept = []
    monkeypatch.setattr(equivalence_runs, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    proof = on_trial("IsSlow", Exactness.BIT_EXACT, seconds=1.0)
    assert proof.passed and "after 4 steps" in proof.why, (
        proof.why
    )  # 0.5 s after the first, an arm's half of the time is over


def test_a_ready_loader_with_a_generator_is_rewound_for_each_arm():
    task = tasks.perceptron()
    loader = torch.utils.data.DataLoader(
        task.train_data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    task = tasks.perceptron(train_data=loader, batch_size=None)
    proof = check_exactness(
        task, Recipe(), Recipe.coerce("gradient_accumulation"), Exactness.EQUIVALENT_MATH, device="cpu"
    )
    assert proof.passed, proof.why


def test_dropout_does_not_stand_in_the_way_of_the_same_formula():
    proof = check_exactness(
        tasks.transformer(dropout=0.5),
        Recipe(),
        Recipe.coerce("gradient_accumulation"),
        Exactness.EQUIVALENT_MATH,
        device="cpu",
    )
    assert proof.passed and 0 < proof.number < 1e-10, proof.why


@pytest.mark.parametrize("task", [tasks.perceptron, tasks.convolutional, tasks.transformer])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_lower_precisions_keep_every_gradient_20_decibels_above_its_error(name, task):
    proof = check_exactness(task(), Recipe(), Recipe.coerce(name), Exactness.REDUCED_PRECISION, device="cpu")
    assert proof.passed and 20 <= proof.number < 90, proof.why
