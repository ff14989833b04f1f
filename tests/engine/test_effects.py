"""The observed step: when it comes, what it reports, and that it changes nothing."""

import re
from dataclasses import dataclass
from itertools import islice

import pytest
import torch

from hasten.core.card import Card, Exactness
from hasten.core.errors import NoEffectError, RunError
from hasten.core.method import Method
from hasten.engine.effects import WARMUP_STEPS
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.testing import tasks

CARD = Card(summary="for a test", exactness=Exactness.BIT_EXACT)


@dataclass(frozen=True)
class Observed(Method):
    """Registers a generator as its check."""

    card = CARD

    def setup(self, run):
        def check():
            SEEN.append(("before", run.progress.step))
            yield
            SEEN.append(("after", run.progress.step))
            return "seen"

        run.observe_effect(self, check)


@dataclass(frozen=True)
class Raises(Method):
    """Its check, a plain function, raises the error given by the test."""

    card = CARD

    def setup(self, run):
        def check():
            raise ERROR[0]

        run.observe_effect(self, check)


SEEN: list = []
ERROR: list = []


def steps_of(method, count=None, **changes):
    SEEN.clear()
    program = build(tasks.perceptron(**changes), [method])
    with program.process_context():
        losses = [loss.item() for loss in islice(program.effects.observed(train_steps(program)), count)]
    return program, losses


def test_observed_step_is_the_first_after_the_warmup():
    program, _ = steps_of(Observed())
    assert SEEN == [("before", WARMUP_STEPS), ("after", WARMUP_STEPS + 1)]
    assert program.effects.evidence == {"test_effects": "seen"} and program.run.no_effect == []


def test_observed_step_of_a_run_of_one_step_is_its_only_one():
    _, losses = steps_of(Observed(), batch_size=96, epochs=1)
    assert len(losses) == 1 and SEEN == [("before", 0), ("after", 1)]


def test_observed_step_counts_across_short_epochs():
    _, losses = steps_of(Observed(), batch_size=96, epochs=5)
    assert len(losses) == 5 and SEEN == [("before", 2), ("after", 3)]


def test_effect_of_a_run_that_ends_before_the_observed_step_is_not_checked():
    program, _ = steps_of(Observed(), count=2)
    assert program.effects.evidence == {"test_effects": "effect not checked: the run was too short"}


@dataclass(frozen=True)
class Yields(Method):
    """Its check is a function that returns a generator, which is called after the step."""

    card = CARD

    def setup(self, run):
        def check():
            yield
            return "seen"

        run.observe_effect(self, lambda: check())


def test_check_that_is_no_generator_function_is_named():
    program, _ = steps_of(Yields())
    assert "no generator function" in program.effects.evidence["test_effects"] and not program.run.no_effect


@dataclass(frozen=True)
class Returns(Method):
    """Its check returns what the test gives."""

    card = CARD

    def setup(self, run):
        run.observe_effect(self, lambda: SEEN[0])


@pytest.mark.parametrize("returned", [None, 3, "", " "])
def test_check_that_returns_no_text_shows_no_effect(returned):
    program = build(tasks.perceptron(), [Returns()])
    SEEN[:] = [returned]
    list(program.effects.observed(train_steps(program)))
    expected = f"effect not checked: the check returned {returned!r}, not a text that says what it saw"
    assert program.effects.evidence == {"test_effects": expected} and not program.run.no_effect


def test_reason_that_a_method_reported_itself_is_the_only_one():
    class Late(Method):
        card = CARD

        def grad_transform(self, grad_transform, run):
            def check():
                raise NoEffectError("found by the check")

            def transform():
                run.report_no_effect(self, "found by the method")
                grad_transform()

            run.observe_effect(self, check)
            return transform

    program, _ = steps_of(Late())
    assert [reason for _, reason in program.run.no_effect] == ["found by the method"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoEffectError("it did nothing"), "it did nothing"),
        (ZeroDivisionError("by zero"), r"its effect check failed at .*test_effects.py:\d+: ZeroDivisionError: by zero"),
    ],
)
def test_method_without_effect_is_reported_and_ends_the_run_if_required(error, reason):
    ERROR[:] = [error]
    program, losses = steps_of(Raises())
    assert len(losses) == 12 and program.effects.evidence == {}
    assert [name for name, _ in program.run.no_effect] == ["test_effects"]
    with pytest.raises(RunError, match=f"test_effects has no effect: {reason}"):
        program = build(tasks.perceptron(), [Raises()])
        program.effects.require_effect = True
        list(program.effects.observed(train_steps(program)))
    assert program.run.progress.step == WARMUP_STEPS + 1


def exits():
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (lambda: torch.stack([]), r"test_effects.py:\d+: RuntimeError: stack expects a non-empty"),  # raised in torch
        (exits, r"test_effects.py:\d+: SystemExit: 3"),
        ("no function", "test_effects.py: TypeError: 'str' object is not callable"),
    ],
)
def test_check_that_fails_is_reported_with_the_file_of_the_method(check, reason):
    class Fails(Method):
        card = CARD

        def setup(self, run):
            run.observe_effect(self, check)

    program, losses = steps_of(Fails())
    assert len(losses) == 12 and program.effects.evidence == {}
    [(_, why)] = program.run.no_effect
    assert re.fullmatch(f"its effect check failed at /.*{reason}.*", why)


@pytest.mark.parametrize("name", ["bfloat16", "channels_last", "gradient_clipping", "activation_checkpointing"])
def test_observed_step_changes_no_bit(name):
    def weights(observed: bool):
        program = build(tasks.convolutional(), [make_method(name)])
        steps = train_steps(program)
        list(program.effects.observed(steps) if observed else steps)
        return program.run.model.state_dict()

    with_check, without = weights(True), weights(False)
    assert all(torch.equal(with_check[key], without[key]) for key in without)
