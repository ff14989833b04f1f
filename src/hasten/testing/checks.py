"""The checks themselves. Each takes a Subject and raises AssertionError, or SkipTest where it cannot be judged here."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import SkipTest

import torch
from safetensors.torch import load_file

from hasten.benchmarking.exactness import check_exactness
from hasten.benchmarking.process_state import differences, process_state, restored
from hasten.core.card import Exactness
from hasten.core.errors import ConfigurationError, format_error
from hasten.core.method import Method, hooks_of
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.loop import evaluate, train_steps
from hasten.engine.plan import Program, build
from hasten.engine.registry import cards_that_state, make_method, make_methods, method_class, options_of
from hasten.engine.train import train
from hasten.testing import tasks
from hasten.utils.rng import get_rng_state
from hasten.utils.tree import bitwise_equal

SMALL_TASKS = (tasks.perceptron, tasks.convolutional, tasks.transformer)


def check_method(what: str | type[Method], task: Task | None = None, **settings) -> dict[str, str]:
    """Holds a method against the contract.

    Args:
        what: its name, ``./file.py:Class``, or the class.
        task: what to train; None: the first of three small tasks on which the method has something to do.
        settings: the method's settings; None of them: its defaults, or the first of the card's tries that has an effect.

    Returns:
        ``{check: "passed" or "skipped: why"}``.

    Raises:
        AssertionError: it broke the contract; every broken check is listed.
    """
    subject, results, broken = Subject(what, task, **settings), {}, []
    for check in CHECKS:
        try:
            check(subject)
            results[check.__name__] = "passed"
        except SkipTest as why:
            results[check.__name__] = f"skipped: {why}"
        except AssertionError as error:
            broken.append(f"{check.__name__}: {error}")
        except Exception as error:
            broken.append(f"{check.__name__}: {format_error(error)}")
    assert not broken, f"{subject.name} breaks the contract of methods: " + "; ".join(broken)
    return results


class Interrupted(Exception):
    """Breaks off a run of ``goes_on_where_it_stopped``."""


class Subject:
    """A method on trial: its class, its settings and the task it is tried on."""

    def __init__(self, what: str | type[Method], task: Task | None = None, **settings):
        self.name = what if isinstance(what, str) else _address(what)
        self.method = method_class(self.name)
        self.settings, self.given_task = settings, task
        self.recipe = Recipe().with_method(self.name, **settings)
        self._task: Task | None = None

    @property
    def tasks(self) -> list[Task]:
        return [self.given_task] if self.given_task else [task(batch_size=32) for task in SMALL_TASKS]

    @property
    def task(self) -> Task:
        """The first task on which the method has something to do.

        Raises:
            SkipTest: there is none on this machine.
        """
        if self._task is None:
            idle = []
            for task in self.tasks:
                with restored():
                    program = trained(task, self.recipe)
                if not program.run.no_effect:
                    self._task = task
                    break
                idle = program.run.no_effect
            else:
                raise SkipTest(f"{idle[0][0]} has nothing to do here: {idle[0][1]}")
        return self._task

    @property
    def recipes(self) -> list[Recipe]:
        """The recipe asked for; without settings, one for each of the card's tries."""
        return (
            [self.recipe]
            if self.settings
            else [Recipe().with_method(self.name, **tried) for tried in self.method.card.presets]
        )


def trained(task: Task, recipe: Recipe, seed: int = 0) -> Program:
    """The program of a finished run."""
    program = build(task, make_methods(recipe), seed=seed)
    with program.process_context():
        for loss in train_steps(program):
            assert math.isfinite(loss.item()), f"the loss is {loss.item()} under {recipe}"
    return program


def has_a_complete_card(subject: Subject) -> None:
    card = subject.method.card
    missing = [field for field in ("summary", "source", "gain_when") if not getattr(card, field).strip()]
    assert not missing, f"the card lacks {', '.join(missing)}"
    assert card.gain is None or 0 < card.gain[0] <= card.gain[1], f"a gain is (low, high), not {card.gain}"
    assert hooks_of(subject.method), "it overrides no hook"
    assert card.presets, "the card names no settings to try; at least ({},) for the defaults"
    for tried in card.presets:
        make_method(subject.name, tried)  # refuses unknown keys and wrong types


def has_settings_that_are_data(subject: Subject) -> None:
    defaults = options_of(subject.method)
    for key, value in defaults.items():
        assert value is not dataclasses.MISSING, f"the setting {key} has no default"
        assert value is None or isinstance(value, (bool, int, float, str)), (
            f"the setting {key} is a {type(value).__name__}; settings are data"
        )
    written = Recipe().with_method(subject.name, **{key: value for key, value in defaults.items() if value is not None})
    assert Recipe.from_toml(written.to_toml()) == written, "its settings do not survive a recipe file"
    assert not defaults or subject.method.__dataclass_params__.frozen, (
        "a method is a frozen dataclass: settings do not change during a run"
    )


def trains(subject: Subject) -> None:
    with restored():
        assert trained(subject.task, subject.recipe).run.progress.step > 0, "not one step was done"


def leaves_no_trace(subject: Subject) -> None:
    """Flags, threads and environment are as before, and an exact method has drawn no random number of its own."""
    with restored():
        before = process_state()
        trained(subject.task, subject.recipe)
        changed = [
            name for name in differences(before, process_state()) if name != "random numbers"
        ]  # which every run seeds
        assert not changed, f"it leaves the process changed: {', '.join(changed)}"
        if subject.method.card.exactness in (Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH):
            after = get_rng_state()
            trained(subject.task, Recipe())
            assert torch.equal(get_rng_state()["torch"], after["torch"]), "it draws random numbers of its own"


def _companions() -> dict[str, dict]:
    """Methods that act in every run, with options: named before and after the subject, they must give the same."""
    steadying = {name: card for name, card in cards_that_state("remedy_for").items() if "divergence" in card.remedy_for}
    everyday = {name: card for name, card in cards_that_state("strong_baseline").items() if not card.applies_to}
    return {name: card.presets[-1] for name, card in (steadying | everyday).items()}


def is_the_same_in_any_order(subject: Subject) -> None:
    with restored():
        for companion, settings in _companions().items():
            if companion == subject.name:
                continue
            pair = [(subject.name, subject.settings), (companion, settings)]
            try:
                first, second = (weights(trained(subject.task, Recipe(dict(order)))) for order in (pair, pair[::-1]))
            except ConfigurationError:  # the cards say that they do not go together
                continue
            assert _same_bits(first, second), f"it matters whether {subject.name} or {companion} is typed first"


def is_as_exact_as_its_card_says(subject: Subject) -> None:
    task, proofs = subject.task, []
    for recipe in subject.recipes:
        proofs.append(check_exactness(task, Recipe(), recipe, subject.method.card.exactness, device="cpu"))
        if proofs[-1].passed:
            return
    raise AssertionError(f"the card says {subject.method.card.exactness.value!r}, but {proofs[0].why}")


def survives_a_checkpoint(subject: Subject) -> None:
    """What it keeps in ``run.checkpoint_state`` loads without executing code, into a run that has just been built."""
    with restored():
        old = trained(subject.task, subject.recipe).run.checkpoint_state
        saved = {name: kept.state_dict() for name, kept in old.items()}
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        new = build(subject.task, make_methods(subject.recipe), seed=1).run.checkpoint_state
        assert new.keys() == old.keys(), f"a new run keeps {sorted(new)}, the old one kept {sorted(old)}"
        for name, kept in new.items():
            kept.load_state_dict(loaded[name])
            assert bitwise_equal(kept.state_dict(), saved[name]), (
                f"what is kept as {name} does not come back as it was saved"
            )


def goes_on_where_it_stopped(subject: Subject) -> None:
    """A run that is broken off and taken up ends with the very weights of one that was left alone."""
    with restored(), TemporaryDirectory() as folder:
        half = trained(subject.task, subject.recipe).run.progress.step // 2
        if not half:
            raise SkipTest("the run has one step only")

        def break_off(records: list[dict]) -> None:
            if any(record["step"] > half for record in records):
                raise Interrupted

        once = partial(
            train, subject.task, subject.recipe, device="cpu", checkpoint_seconds=0
        )  # a checkpoint after every step
        whole, broken = Path(folder, "whole"), Path(folder, "broken")
        once(out=whole)
        with suppress(Interrupted):
            once(out=broken, observers=[break_off])
        assert any((broken / "checkpoints").iterdir()), "the run that was broken off has left no checkpoint"
        once(out=broken, resume=True)
        a, b = (load_file(run / "model.safetensors") for run in (whole, broken))
        assert _same_bits(a, b), (
            "a run that was taken up does not end as one that was left alone: it keeps something outside run.checkpoint_state"
        )


def exports_a_plain_module(subject: Subject) -> None:
    with restored():
        program = trained(subject.task, subject.recipe)
        exported = program.export()
        fresh = subject.task.model()
        assert isinstance(exported, torch.nn.Module), f"it exports a {type(exported).__name__}"
        assert exported.state_dict().keys() == fresh.state_dict().keys(), (
            "it exports weights under other names than the task's model has"
        )
        fresh.load_state_dict(exported.state_dict())
        training = program.run.model.training
        assert math.isfinite(evaluate(program).metric), "the exported module cannot be evaluated"
        assert program.run.model.training == training, "an evaluation leaves the model in another mode"


def says_so_when_idle(subject: Subject) -> None:
    """Where it has nothing to act on it gives a reason, and trains exactly as if it were not there."""
    found = False
    with restored():
        for task in subject.tasks:
            program = trained(task, subject.recipe)
            for name, why in program.run.no_effect:
                found = True
                assert name == subject.name and why.strip(), f"{name!r} is idle for the reason {why!r}"
            if program.run.no_effect:
                same = _same_bits(weights(program), weights(trained(task, Recipe())))
                assert same, f"it says that it has nothing to do on {task.name}, and yet the weights differ"
    if not found:
        raise SkipTest(f"{subject.name} has something to do on every task")


CHECKS: tuple[Callable[[Subject], None], ...] = (
    has_a_complete_card,
    has_settings_that_are_data,
    trains,
    leaves_no_trace,
    is_the_same_in_any_order,
    is_as_exact_as_its_card_says,
    survives_a_checkpoint,
    goes_on_where_it_stopped,
    exports_a_plain_module,
    says_so_when_idle,
)


def weights(program: Program) -> dict[str, torch.Tensor]:
    """A copy of the exported weights."""
    return {name: value.detach().clone() for name, value in program.export().state_dict().items()}


def _same_bits(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _address(cls: type[Method]) -> str:
    """The name under which a class can be found again."""
    ours, _, module = cls.__module__.rpartition(".")
    return module if ours.startswith("hasten.methods") else f"{cls.__module__}:{cls.__qualname__}"
