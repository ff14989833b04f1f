"""WrapOrder, conflicts and the composition of hooks."""

import dataclasses
import re
from itertools import islice, permutations

import pytest
import torch

from hasten import Card, ConfigurationError, Exactness, Method, Task, WrapOrder
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.error_messages import explain_error
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from helpers import engine_tasks


def method(name: str, hooks: dict | None = None, **card) -> Method:
    facts = {"summary": name, "exactness": Exactness.CHANGES_TRAINING} | card
    made = type(name, (Method,), {"card": Card(**facts), **(hooks or {})})
    made.name = name
    return made()


FOUR = [
    method("late", order=WrapOrder.LATE),
    method("b"),
    method("a"),
    method("first_after_b", order=WrapOrder.FIRST, after=("b",)),
]


@pytest.mark.parametrize("given", list(permutations(FOUR)))
def test_method_order_is_independent_of_the_recipe_order(given):
    assert [m.name for m in sort_methods(list(given))] == ["a", "b", "first_after_b", "late"]


def test_cyclic_wrap_order_is_refused():
    with pytest.raises(ConfigurationError, match="a and b each must come after the other"):
        sort_methods([method("a", after=("b",)), method("b", after=("a",))])


def test_two_methods_that_replace_one_hook_are_refused():
    with pytest.raises(ConfigurationError, match="a and b both replace data"):
        check_conflicts([method("a", replaces={"data"}), method("b", replaces={"data"})])


def test_required_and_invalidated_trait_is_refused_in_either_order():
    needy, breaker = method("needy", requires={"gradient_norm"}), method("breaker", invalidates={"gradient_norm"})
    for pair in ([needy, breaker], [breaker, needy]):
        with pytest.raises(ConfigurationError, match="needy requires gradient_norm, which breaker invalidates"):
            check_conflicts(pair)


@pytest.mark.parametrize("hook", ["forward", "backward"])
def test_method_that_changes_the_forward_or_backward_pass_requires_a_monolithic_one(hook):
    changes, cuts = (
        method("changes", {hook: lambda self, inner, run: inner}),
        method("cuts", invalidates={"monolithic_forward"}),
    )
    with pytest.raises(ConfigurationError, match="changes requires monolithic_forward, which cuts invalidates"):
        check_conflicts([changes, cuts])


def failing(inner, run):
    raise ValueError("no such layer")


def message_of(methods: list[Method]) -> str:
    """The line that a user sees when a run cannot be built."""
    with pytest.raises(Exception) as raised:  # any, as ``train`` catches it
        build(engine_tasks.map_style(), methods)
    return str(explain_error(raised.value, "building the run", 8))


@pytest.mark.parametrize("hook", ["data", "model", "loss", "optimizer", "forward_backward", "zero_grad"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda self, inner, run: None, r"returns None; it must return what it was given"),
        (lambda self, inner, run: failing(inner, run), r"failed: ValueError: no such layer \(test_plan.py line \d+\)"),
        (lambda self, inner: inner, r"failed: TypeError: .*takes 2 positional arguments but 3 were given"),
    ],
    ids=["returns None", "raises", "wrong signature"],
)
def test_hook_that_returns_nothing_or_fails_is_named(hook, body, message):
    text = message_of([method("broken", {hook: body})])
    assert re.match(f"the hook '{hook}' of the method 'broken' {message}", text), text


class Misdeclared(Method):
    card = Card(summary="its hook lacks the context", exactness=Exactness.CHANGES_TRAINING)

    def forward(self, forward):
        return forward


def test_hook_of_the_wrong_signature_is_not_taken_for_the_users_model():
    text = message_of([Misdeclared()])
    assert text.startswith("the hook 'forward' of the method ") and "a batch (a, b, ..., target)" not in text


def test_later_methods_wrap_earlier_ones_and_a_replacement_is_innermost():
    reports = []

    def recording(name, throws_away=False):
        def optimizer_step(self, inner, run):
            def outer():
                reports.append(name)
                if not throws_away:
                    inner()

            return outer

        return {"optimizer_step": optimizer_step}

    methods = [
        method("inner", recording("inner", throws_away=True), order=WrapOrder.LAST, replaces={"optimizer_step"}),
        method("early", recording("early"), order=WrapOrder.EARLY),
        method("late", recording("late"), order=WrapOrder.LATE),
    ]
    build(engine_tasks.map_style(), methods).optimizer_step()
    assert reports == ["late", "early", "inner"]


def test_hook_is_called_once_while_building():
    asked = []

    def forward(self, inner, run):
        asked.append("forward")
        return inner

    program = build(engine_tasks.map_style(), [method("counting", {"forward": forward})])
    from hasten.engine.loop import train_steps

    assert len(list(train_steps(program))) == 12
    assert asked == ["forward"]


def on_a_plateau(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def of_another_model(_):
    return torch.optim.SGD(engine_tasks.model().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: "no module"}, "must return an nn.Module; it returned a str"),
        ({"model": torch.nn.ReLU}, "no parameters to train"),
        ({"optimizer": lambda model: None}, "must return a torch optimizer"),
        ({"optimizer": of_another_model}, "trains no parameter"),
        ({"optimizer": on_a_plateau}, "ReduceLROnPlateau waits for the metric of the task, accuracy; give it mode"),
        ({"optimizer": on_a_plateau, "validation_data": None}, "ReduceLROnPlateau waits for a metric; give Task"),
        ({"train_data": []}, r"Task\(train_data=\) is empty"),
        ({"train_data": "directory"}, "must be a dataset"),
        ({"batch_size": None}, r"Task\(batch_size=\) is missing"),
        ({"train_data": engine_tasks.Stream(), "optimizer": lambda model, steps: None}, "no length"),
    ],
)
def test_task_with_mismatched_parts_is_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        build(Task(**(vars(engine_tasks.map_style()) | changes)))


def test_parameters_outside_the_model_are_refused_in_several_processes():
    """Their gradients are not averaged over the ranks."""
    weight = torch.nn.Parameter(torch.ones(()))
    task = dataclasses.replace(
        engine_tasks.map_style(), optimizer=lambda model: torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    )
    with pytest.raises(ConfigurationError, match="1 parameters that are not in the model"):
        build(task, ranks=ProcessGroupInfo(world_size=2))


def test_model_of_an_earlier_run_is_refused():
    model = engine_tasks.model()
    task = dataclasses.replace(engine_tasks.map_style(), model=lambda: model)
    build(task)
    with pytest.raises(ConfigurationError, match="the same object again"):
        build(task)


class Placed(torch.nn.CrossEntropyLoss):
    device = None

    def to(self, device):
        self.device = device
        return super().to(device)


def test_loss_with_class_weights_is_moved_to_the_device_of_the_run():
    loss = Placed(weight=torch.ones(3))
    build(dataclasses.replace(engine_tasks.map_style(), loss=loss))
    assert loss.device == torch.device("cpu")


def test_state_of_a_loss_begins_anew_in_every_run():
    task, weights = engine_tasks.loss_with_a_state(), []
    for _ in range(2):
        program = build(task)
        list(islice(train_steps(program), 4))
        weights.append(program.run.model[0].weight.detach().clone())
    assert torch.equal(*weights)
