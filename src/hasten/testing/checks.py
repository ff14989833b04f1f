"""The checks of the contract. Each takes a Subject and raises AssertionError, or SkipTest if it does not apply here."""

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
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
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import train_steps
from hasten.engine.plan import Program, build
from hasten.engine.registry import cards_that_state, make_method, make_methods, method_class, options_of
from hasten.engine.train import train
from hasten.testing import tasks
from hasten.testing.effects import observe_effect
from hasten.testing.models import available_makes
from hasten.utils.op_recorder import NOT_CHECKED
from hasten.utils.rng import get_rng_state
from hasten.utils.search_range import SearchRange
from hasten.utils.tree import bitwise_equal

SMALL_TASKS = (tasks.perceptron, tasks.convolutional, tasks.transformer)


def check_method(method: str | type[Method], task: Task | None = None, **options: Any) -> dict[str, str]:
    """Runs all checks on a method.

    Args:
        method: Its name, ``./file.py:Class``, or the class.
        task: What to train; None: the first of three small tasks on which the method has an effect.
        options: Options of the method; if none are given, its defaults and, for exactness, the presets of its card.

    Returns:
        ``{check: "passed" or "skipped: reason"}``.

    Raises:
        AssertionError: At least one check failed; the message lists all of them.
    """
    subject, results, failures = Subject(method, task, **options), {}, []
    for check in CHECKS:
        try:
            check(subject)
            results[check.__name__] = "passed"
        except SkipTest as reason:
            results[check.__name__] = f"skipped: {reason}"
        except AssertionError as error:
            failures.append(f"{check.__name__}: {error}")
        except Exception as error:
            failures.append(f"{check.__name__}: {format_error(error)}")
    assert not failures, f"{subject.name} breaks the contract of methods: " + "; ".join(failures)
    return results


class Subject:
    """A method to check, its options and the task on which it is checked; arguments as for ``check_method``."""

    def __init__(self, method: str | type[Method], task: Task | None = None, **options: Any):
        self.name = method if isinstance(method, str) else _qualified_name(method)
        self.method = method_class(self.name)
        self.options, self.given_task = options, task
        self.recipe = Recipe().with_method(self.name, **options)

    @property
    def tasks(self) -> list[Task]:
        return [self.given_task] if self.given_task else [task(batch_size=32) for task in SMALL_TASKS]

    @cached_property
    def task(self) -> Task:
        """The first task on which the method has an effect; SkipTest if there is none on this machine."""
        no_effect = []
        for task in self.tasks:
            with restored():
                no_effect = trained(task, self.recipe).run.no_effect
            if not no_effect:
                return task
        raise SkipTest(f"{no_effect[0][0]} has no effect here: {no_effect[0][1]}")

    @property
    def recipes(self) -> list[Recipe]:
        """The recipe with the given options; without options, one recipe for each preset of the card."""
        if self.options:
            return [self.recipe]
        return [Recipe().with_method(self.name, **preset) for preset in self.method.card.presets]


def trained(task: Task, recipe: Recipe, seed: int = 0) -> Program:
    """Trains the task to its end; returns the program of the run. AssertionError if a loss is not finite."""
    program = build(task, make_methods(recipe), seed=seed)
    with program.process_context():
        for loss in train_steps(program):
            assert math.isfinite(loss.item()), f"the loss is {loss.item()} under {recipe}"
    return program


def has_a_complete_card(subject: Subject) -> None:
    """The card states a summary, a source and conditions; the method overrides a hook; every preset is valid."""
    card = subject.method.card
    missing = [field for field in ("summary", "source", "gain_when") if not getattr(card, field).strip()]
    assert not missing, f"the card lacks {', '.join(missing)}"
    assert card.gain is None or 0 < card.gain[0] <= card.gain[1], f"a gain is (low, high), not {card.gain}"
    assert hooks_of(subject.method), "the method overrides no hook"
    assert card.presets, "the card has no presets; it needs at least ({},) for the defaults"
    for preset in (*card.presets, *card.on_gpu.get("presets", ())):
        make_method(subject.name, preset)  # raises for unknown options and wrong types
    for options in _ends_of(card.search_space):
        make_method(subject.name, options)


def _ends_of(space: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options at both ends of a search space; an end without an effect is left out."""
    for position in (0.0, 1.0):
        options = {name: one.at(position) if isinstance(one, SearchRange) else one for name, one in space.items()}
        if not any(isinstance(one, SearchRange) and options[name] == one.no_effect for name, one in space.items()):
            yield options


def has_options_that_are_data(subject: Subject) -> None:
    """Every option has a default and is a bool, int, float or str; recipe files store all of them."""
    defaults = options_of(subject.method)
    for name, value in defaults.items():
        assert value is not dataclasses.MISSING, f"the option {name} has no default"
        is_data = value is None or isinstance(value, (bool, int, float, str))
        assert is_data, f"the option {name} is a {type(value).__name__}; options are bool, int, float or str"
    recipe = Recipe().with_method(subject.name, **{key: value for key, value in defaults.items() if value is not None})
    assert Recipe.from_toml(recipe.to_toml()) == recipe, "a recipe file does not restore the options of the method"
    is_frozen = getattr(subject.method, "__dataclass_params__", None) and subject.method.__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    assert not defaults or is_frozen, "a method is a frozen dataclass: options do not change during a run"


def trains(subject: Subject) -> None:
    """A run with the method does at least one step, with finite losses."""
    with restored():
        assert trained(subject.task, subject.recipe).run.progress.step > 0, "the run did no step"


def restores_process_state(subject: Subject) -> None:
    """Flags, threads and environment are as before the run, and an exact method has drawn no random number."""
    with restored():
        before = process_state()
        trained(subject.task, subject.recipe)
        changed = [name for name in differences(before, process_state()) if name != "random numbers"]  # runs seed them
        assert not changed, f"it leaves the process changed: {', '.join(changed)}"
        if subject.method.card.exactness in (Exactness.BIT_EXACT, Exactness.EQUIVALENT_MATH):
            after = get_rng_state()
            trained(subject.task, Recipe())
            assert torch.equal(get_rng_state()["torch"], after["torch"]), "it draws random numbers"


def _companions() -> dict[str, dict[str, Any]]:
    """Methods -> options, to put into a recipe before or after the checked method; they act in every run."""
    remedies = {name: card for name, card in cards_that_state("remedy_for").items() if "divergence" in card.remedy_for}
    baseline = {name: card for name, card in cards_that_state("strong_baseline").items() if not card.applies_to}
    return {name: card.presets[-1] for name, card in (remedies | baseline).items()}


def is_independent_of_recipe_order(subject: Subject) -> None:
    """A recipe gives the same bits whether it names the method first or last."""
    with restored():
        for companion, options in _companions().items():
            if companion == subject.name:
                continue
            pair = [(subject.name, subject.options), (companion, options)]
            try:
                first, second = (weights(trained(subject.task, Recipe(dict(order)))) for order in (pair, pair[::-1]))
            except ConfigurationError:  # the cards exclude the combination
                continue
            problem = f"the weights depend on whether {subject.name} or {companion} is named first"
            assert _same_bits(first, second), problem


def is_as_exact_as_its_card_states(subject: Subject) -> None:
    """The method passes the check of the exactness that its card states, with at least one of the card's presets."""
    results = []
    for recipe in subject.recipes:
        results.append(check_exactness(subject.task, Recipe(), recipe, subject.method.card.exactness, device="cpu"))
        if results[-1].passed:
            return
    raise AssertionError(f"the card states {subject.method.card.exactness.value!r}, but {results[0].why}")


def saves_its_state(subject: Subject) -> None:
    """What the method stores in ``run.checkpoint_state`` loads without executing code, into a newly built run."""
    with restored():
        old = trained(subject.task, subject.recipe).run.checkpoint_state
        saved = {name: state.state_dict() for name, state in old.items()}
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        new = build(subject.task, make_methods(subject.recipe), seed=1).run.checkpoint_state
        assert new.keys() == old.keys(), f"a new run has the state of {sorted(new)}, the old one of {sorted(old)}"
        for name, state in new.items():
            state.load_state_dict(loaded[name])
            is_restored = bitwise_equal(state.state_dict(), saved[name])
            assert is_restored, f"the state of {name} is not restored as it was saved"


class InterruptedRunError(Exception):
    """Raised by the check ``resumes_bit_identically`` to interrupt its first run."""


def resumes_bit_identically(subject: Subject) -> None:
    """An interrupted and resumed run ends with the same weights as an uninterrupted one."""
    with restored(), TemporaryDirectory() as directory:
        half = trained(subject.task, subject.recipe).run.progress.step // 2
        if not half:
            raise SkipTest("a run of one step cannot be interrupted and resumed")

        def interrupt(records: list[dict[str, Any]]) -> None:
            if any(record["step"] > half for record in records):
                raise InterruptedRunError

        # with a checkpoint after every step
        run = partial(train, subject.task, subject.recipe, device="cpu", checkpoint_seconds=0)
        complete, resumed = Path(directory, "complete"), Path(directory, "resumed")
        run(out=complete)
        with suppress(InterruptedRunError):
            run(out=resumed, observers=[interrupt])
        assert any((resumed / "checkpoints").iterdir()), "the interrupted run has left no checkpoint"
        run(out=resumed, resume=True)
        first, second = (load_file(path / "model.safetensors") for path in (complete, resumed))
        assert _same_bits(first, second), (
            "a resumed run ends with other weights than an uninterrupted one: the method has state outside "
            "run.checkpoint_state"
        )


def exports_a_plain_module(subject: Subject) -> None:
    """The exported module has the parameter names of the task's model, and can be evaluated."""
    with restored():
        program = trained(subject.task, subject.recipe)
        exported = program.export()
        fresh = subject.task.model()
        assert isinstance(exported, torch.nn.Module), f"the method exports a {type(exported).__name__}, no nn.Module"
        same_names = exported.state_dict().keys() == fresh.state_dict().keys()
        assert same_names, "it exports weights under other names than the task's model has"
        fresh.load_state_dict(exported.state_dict())
        training = program.run.model.training
        assert math.isfinite(evaluate(program).metric), "the exported module cannot be evaluated"
        assert program.run.model.training == training, "an evaluation leaves the model in another mode"


def reports_no_effect(subject: Subject) -> None:
    """A method with nothing to act on reports the reason and trains exactly as if it were not in the recipe."""
    found = False
    with restored():
        for task in subject.tasks:
            program = trained(task, subject.recipe)
            for name, reason in program.run.no_effect:
                found = True
                assert name == subject.name and reason.strip(), f"{name!r} has no effect for the reason {reason!r}"
            if program.run.no_effect:
                same = _same_bits(weights(program), weights(trained(task, Recipe())))
                assert same, f"it reports no effect on {task.name}, but the weights differ"
    if not found:
        raise SkipTest(f"{subject.name} has an effect on every task")


def shows_its_effect(subject: Subject) -> None:
    """On a model of each make the method shows that it acted, or reports why it has no effect."""
    makes = {subject.given_task.name: subject.given_task} if subject.given_task else {}
    for name, task in (makes or {name: make() for name, make in available_makes().items()}).items():
        for recipe in subject.recipes:
            try:
                effect = observe_effect(task, recipe)
            except Exception as error:
                raise AssertionError(f"{recipe} fails on {name}: {format_error(error)}") from error
            if effect.text == NOT_CHECKED:
                raise SkipTest("states no effect: it is reported as 'effect not checked'")
            assert effect.text.strip(), f"{recipe} has no effect on {name}, without a reason"
            assert not effect.text.startswith(NOT_CHECKED), f"{recipe} on {name}: {effect.text}"


CHECKS: tuple[Callable[[Subject], None], ...] = (
    has_a_complete_card,
    has_options_that_are_data,
    trains,
    restores_process_state,
    is_independent_of_recipe_order,
    is_as_exact_as_its_card_states,
    saves_its_state,
    resumes_bit_identically,
    exports_a_plain_module,
    reports_no_effect,
    shows_its_effect,
)


def weights(program: Program) -> dict[str, torch.Tensor]:
    """A copy of the exported model's parameters and buffers, by name."""
    return {name: value.detach().clone() for name, value in program.export().state_dict().items()}


def _same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _qualified_name(cls: type[Method]) -> str:
    """The name by which a recipe finds a method class: that of the file for hasten's own, else ``module:Class``."""
    package, _, module = cls.__module__.rpartition(".")
    return module if package.startswith("hasten.methods") else f"{cls.__module__}:{cls.__qualname__}"
